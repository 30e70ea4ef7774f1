"""A fault in a fused layout or an unusual state of a layer is found before the commit, by name, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

Fault = Callable[[Any], None]
"""What is done to the flat memory of one slab of the target, the same on every rank."""


def _lost(flat: Any) -> None:
    flat.zero_()


def _halves_swapped(flat: Any) -> None:
    """Put what two tensor-parallel ranks had in the wrong order."""
    flat.copy_(flat.view(2, -1).flip(0).reshape(-1))


def _parts_swapped(flat: Any) -> None:
    """Put two fused parts, each split over two ranks, one after the other rank by rank: [a0 b0 a1 b1]."""
    flat.copy_(flat.view(2, 2, -1).transpose(0, 1).reshape(-1))


def _not_by_groups(flat: Any) -> None:
    """Put all queries first, then all keys, then all values; Megatron has them group by group: 2 + 1 + 1 heads of 4."""
    groups = flat.view(4, 4, 4, -1)
    flat.copy_(_cat([groups[:, :2], groups[:, 2:3], groups[:, 3:]]))


def _cat(parts: list[Any]) -> Any:
    import torch

    return torch.cat([part.reshape(-1) for part in parts])


def _rolled(flat: Any) -> None:
    flat.copy_(flat.roll(1))


_ATTENTION, _MLP = "decoder.layers.0.self_attention", "decoder.layers.0.mlp"
FUSED: Mapping[str, tuple[str, Fault]] = {
    "gate and up rank by rank": (f"param {_MLP}.linear_fc1.weight", _parts_swapped),
    "moments of gate and up rank by rank": (f"exp_avg_sq {_MLP}.linear_fc1.weight", _parts_swapped),
    "queries, keys and values not by groups": (f"param {_ATTENTION}.linear_qkv.base.weight", _not_by_groups),
    "halves of the bias swapped": (f"param {_ATTENTION}.linear_qkv.base.bias", _halves_swapped),
    "norm of the queries lost": (f"param {_ATTENTION}.q_layernorm.weight", _lost),
    "norm of the keys rolled": (f"param {_ATTENTION}.k_layernorm.weight", _rolled),
    "moments of the norm rolled": (f"exp_avg {_ATTENTION}.q_layernorm.weight", _rolled),
    "halves of the low rank swapped": (f"param {_ATTENTION}.linear_qkv.up", _halves_swapped),
    "moments of the low rank lost": (f"exp_avg {_ATTENTION}.linear_qkv.up", _lost),
    "replicated low rank lost": (f"param {_ATTENTION}.linear_qkv.down", _lost),
    "moments of the replicated low rank rolled": (f"exp_avg_sq {_ATTENTION}.linear_qkv.down", _rolled),
}
LATENT: Mapping[str, tuple[str, Fault]] = {
    "halves of the queries' heads swapped": (f"param {_ATTENTION}.linear_q_up_proj.weight", _halves_swapped),
    "heads of keys and values rolled": (f"param {_ATTENTION}.linear_kv_up_proj.weight", _rolled),
    "moments of keys and values swapped": (f"exp_avg {_ATTENTION}.linear_kv_up_proj.weight", _halves_swapped),
    "down projection lost": (f"param {_ATTENTION}.linear_kv_down_proj.weight", _lost),
    "moments of a down projection rolled": (f"exp_avg_sq {_ATTENTION}.linear_q_down_proj.weight", _rolled),
    "norm of the latent queries rolled": (f"param {_ATTENTION}.q_layernorm.weight", _rolled),
    "norm of the latent keys and values lost": (f"param {_ATTENTION}.kv_layernorm.weight", _lost),
}
BALANCED: Mapping[str, tuple[str, Fault]] = {
    "bias of the quantiles lost": (f"buffer {_MLP}.router.qb_beta", _lost),
    "bias of the quantiles rolled": (f"buffer {_MLP}.router.qb_beta", _rolled),
}
TP, DP, EP = ParallelLayout(tp=2, dp=1), ParallelLayout(dp=2), ParallelLayout(dp=2, ep=2)


def _switch_with_faults(
    context: RankContext, model: str, source: ParallelLayout, target: ParallelLayout, faults: Mapping[str, Any]
) -> dict[str, Any]:
    """Put each fault into the target of one attempt, on all ranks alike; then switch without any."""
    import torch

    from megatron_dynatrain.errors import SwitchAborted
    from megatron_dynatrain.mcore.states import LiveState
    from tests.cases.job import CaseJob
    from tests.cases.models import moe
    from tests.states import layer_models

    make = moe() if model == "BALANCED" else getattr(layer_models, model.lower())
    shape = getattr(layer_models, model)
    job = CaseJob(context, source, make, shape=shape, config=layer_models.config_of(shape))
    job.step(1.0)
    layer_models.fill(job)
    for name, buffer in job.chunks[0].named_buffers():
        if name.endswith("qb_beta"):
            buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) / 1024 + 1)
    before = job.gather()
    errors = {}
    for name, (slab, fault) in faults.items():

        @torch.no_grad()
        def spoil(phase: str, slab: str = slab, fault: Fault = fault) -> None:
            if phase != "verify/digest":
                return
            memory = LiveState(*job.target, rank=context.rank).memory(moments=True)
            state, parameter = slab.split()
            flat = memory.get(f"{state}@0:{parameter}")
            if flat is not None:  # else another rank has the moments
                kept = flat.clone()
                fault(flat)
                assert not torch.equal(kept, flat), "the fault changes nothing"

        job.on_phase = spoil
        try:
            job.switch(target)
        except SwitchAborted as aborted:
            errors[name] = str(aborted)
        else:
            raise AssertionError(f"committed in spite of: {name}")
    after_faults = job.gather()
    job.on_phase = lambda _: None
    job.switch(target)
    after = job.gather()
    return {
        "errors": errors,
        "harmed": before.differences(after_faults) if before is not None else None,
        "moved": before.differences(after) if before is not None else None,
    }


@pytest.mark.parametrize(
    ("model", "faults", "source", "target"),
    [
        pytest.param("FUSED", FUSED, TP, DP, id="fused-and-low-rank"),
        pytest.param("LATENT", LATENT, TP, DP, id="latent-attention"),
        pytest.param("BALANCED", BALANCED, DP, EP, id="quantile-balancing"),
    ],
)
def test_faults_of_a_layer_are_found_by_name(
    ranks: RankPool, model: str, faults: Mapping[str, Any], source: ParallelLayout, target: ParallelLayout
) -> None:
    found = ranks.run(2, _switch_with_faults, model, source, target, dict(faults))
    for record in found:
        assert list(record["errors"]) == list(faults)
        for name, (slab, _) in faults.items():
            state, parameter = slab.split()
            assert f"subject: {parameter} {state} (ranks" in record["errors"][name], name
    assert found[0]["harmed"] == []
    assert found[0]["moved"] == []
