"""A fault in a state that is not a plain parameter is found before the commit, by name, and the job is unharmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

SOURCE, TARGET = ParallelLayout(dp=2), ParallelLayout(ep=2, dp=2)
Fault = Callable[[list[Any], Any], None]


def _named(chunks: list[Any], ending: str) -> Any:
    found = [*chunks[0].named_parameters(), *chunks[0].named_buffers()]
    return next(tensor for name, tensor in found if name.endswith(ending))


def _swap(first: Any, second: Any) -> None:
    """Swap two tensors; equal ones would make it a fault that nobody could find."""
    assert not (first == second).all()
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def bias_left_at_zero(chunks: list[Any], optimizer: Any) -> None:
    _named(chunks, "layers.1.mlp.router.expert_bias").zero_()


def bias_rounded(chunks: list[Any], optimizer: Any) -> None:
    bias = _named(chunks, "layers.0.mlp.router.expert_bias")
    bias.copy_(bias.bfloat16())


def counter_not_empty(chunks: list[Any], optimizer: Any) -> None:
    _named(chunks, "layers.1.mlp.router.local_tokens_per_expert")[2] = 1


def totals_left_out(chunks: list[Any], optimizer: Any) -> None:
    _named(chunks, "layers.0.mlp.router.global_tokens_per_expert").zero_()


def frozen_left_at_junk(chunks: list[Any], optimizer: Any) -> None:
    _named(chunks, "layers.0.self_attention.linear_proj.weight").data.fill_(0.5)


def swapped_experts(chunks: list[Any], optimizer: Any) -> None:
    """Swap the two experts of a rank: the multiset of all values stays what it was."""
    first, second = (_named(chunks, f"layers.0.mlp.experts.local_experts.{e}.linear_fc2.weight") for e in (0, 1))
    _swap(first.data, second.data)


def swapped_moments_of_experts(chunks: list[Any], optimizer: Any) -> None:
    from tests.cases.job import owned_by

    names = {parameter: name for name, parameter in chunks[0].named_parameters()}
    of = {names[item.parameter]: item for item in owned_by(optimizer)}
    first, second = (
        next(i for n, i in of.items() if n.endswith(f"layers.0.mlp.experts.local_experts.{e}.linear_fc1.weight"))
        for e in (0, 1)
    )
    _swap(first.state["exp_avg"], second.state["exp_avg"])


def loss_scale_forgotten(chunks: list[Any], optimizer: Any) -> None:
    for inner in optimizer.chained_optimizers:
        inner.grad_scaler._growth_tracker = 0


FAULTS: dict[str, tuple[Fault, str]] = {
    "bias left at zero": (bias_left_at_zero, "decoder.layers.1.mlp.router.expert_bias buffer"),
    "bias rounded to bf16": (bias_rounded, "decoder.layers.0.mlp.router.expert_bias buffer"),
    "counter not empty": (counter_not_empty, "layers.1.mlp.router.local_tokens_per_expert"),
    "totals left out": (totals_left_out, "decoder.layers.0.mlp.router.global_tokens_per_expert buffer"),
    "frozen parameter left at junk": (frozen_left_at_junk, "decoder.layers.0.self_attention.linear_proj.weight param"),
    "experts swapped": (swapped_experts, "decoder.layers.0.mlp.experts.experts.2.linear_fc2.weight"),
    "moments of experts swapped": (
        swapped_moments_of_experts,
        "decoder.layers.0.mlp.experts.experts.2.linear_fc1.weight exp_avg",
    ),
    "loss scale's counter forgotten": (loss_scale_forgotten, "grad_scaler.growth_tracker"),
}


def _frozen_projections(config: Any) -> Any:
    from tests.cases.models import moe

    model = moe()(config)
    for layer in model.decoder.layers:
        layer.self_attention.linear_proj.requires_grad_(False)
    return model


def _gradient_of(name: str) -> float:
    """Return another gradient for each expert: at ep 1 a local number is the global one."""
    expert = int(name.split(".local_experts.")[1].split(".")[0]) if ".local_experts." in name else 0
    return 1 + len(name) % 5 + 10 * expert


def _switch_with_faults(context: RankContext) -> dict[str, Any]:
    """Put each fault into the target of one attempt, on rank 1 alone; then switch without any."""
    import torch

    from megatron_dynatrain.errors import SwitchAborted
    from tests.cases.job import CaseJob
    from tests.cases.models import EXPERT_SHAPE

    shape = {
        **EXPERT_SHAPE,
        "num_layers": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": ["global_aux_loss"],
        "moe_aux_loss_coeff": [1e-2],
    }
    job = CaseJob(
        context,
        SOURCE,
        _frozen_projections,
        shape=shape,
        dtype=torch.float16,
        optimizer={"initial_loss_scale": 1024, "loss_scale_window": 1000},
    )
    for number in (1, 2, 3):
        job.step(lambda name, number=number: number * _gradient_of(name))
    for name, buffer in job.chunks[0].named_buffers():
        if name.endswith(("expert_bias", "global_tokens_per_expert", "ga_steps")):
            buffer.copy_(1 + torch.arange(buffer.numel()).view(buffer.shape) * 2**-10)
    before = job.gather()
    errors = {}
    for name, (fault, _) in FAULTS.items():

        @torch.no_grad()
        def spoil(phase: str, fault: Fault = fault) -> None:
            if phase == "verify/digest" and context.rank == 1:
                fault(*job.target)

        job.on_phase = spoil
        with pytest.raises(SwitchAborted) as aborted:
            job.switch(TARGET)
        errors[name] = str(aborted.value)
    harmed = before.differences(job.gather()) if before is not None else (job.gather() and [])
    job.on_phase = lambda _: None
    refused = _switch_while_ranks_disagree(job, context.rank)
    job.switch(TARGET)
    after = job.gather()
    return {
        "errors": errors,
        "refused": refused,
        "harmed": harmed,
        "moved": before.differences(after) if before is not None else None,
    }


def _switch_while_ranks_disagree(job: Any, rank: int) -> list[str]:
    """Give rank 1 another learning rate, then another loss scale, for one attempt each."""
    from megatron_dynatrain.errors import SwitchRefused

    found = []
    inner = job.optimizer.chained_optimizers[0]
    group, scaler = inner.optimizer.param_groups[0], inner.grad_scaler
    for owner, name, value in ((group, "lr", group["lr"] * 2), (scaler, "_growth_tracker", 1)):
        kept = owner[name] if owner is group else getattr(owner, name)
        put = owner.__setitem__ if owner is group else owner.__setattr__
        if rank == 1:
            put(name, value)
        with pytest.raises(SwitchRefused) as refused:
            job.switch(TARGET)
        found.append(str(refused.value))
        put(name, kept)
    return found


def test_faults_in_other_states_are_found_by_name(ranks: RankPool) -> None:
    found = ranks.run(2, _switch_with_faults)
    for record in found:
        assert list(record["errors"]) == list(FAULTS)
        for name, (_, words) in FAULTS.items():
            assert words in record["errors"][name], name
        for text, subject in zip(record["refused"], ("eps=", "grad_scaler"), strict=True):
            assert "the ranks have different values of the optimizer; subject: " in text
            assert subject in text
    assert found[0]["harmed"] == []
    assert found[0]["moved"] == []
