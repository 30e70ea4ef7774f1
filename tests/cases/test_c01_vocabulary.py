"""C01: the padded vocabulary follows the layout; real rows come along bit for bit, padding rows are zeros after it.

The rule (`Vocabulary`): where two layouts pad differently, only real rows are moved, and padding rows of the target are
zeros in all states. Where they pad alike, padding is carried like data. Stock `pretrain()` jobs pin one size instead:
`tests/ranks/test_vocabulary.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from megatron_dynatrain.errors import PlanError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.windows import WindowBudget, check_pairs, plan_all
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import ModelDescription
from tests.pure.models import dense_model
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

REAL, DIVISOR, WORLD = 70, 8, 8
STOPS = ((1, 72), (2, 80), (4, 96), (8, 128), (1, 72))
"""Tensor-parallel sizes, and the rows of the padded tables at each."""


def padded(tp: int) -> int:
    """Megatron's rule: a multiple of the divisor x tp."""
    multiple = DIVISOR * tp
    return -(-REAL // multiple) * multiple


# --- the plan, with bytes in memory -----------------------------------------------------------------------------------


def table_model(tied: bool) -> ModelDescription:
    """The small model with 70 real rows; `padded_to` gives it the rows of a layout."""
    model = dense_model(layers=1, vocab=padded(1), tied=tied)
    specs = []
    for spec in model.parameters:
        rows = REAL if spec.name in ("embedding.word_embeddings.weight", "output_layer.weight") else None
        segments = tuple(dataclasses.replace(segment, real_rows=rows) for segment in spec.segments)
        specs.append(dataclasses.replace(spec, segments=segments))
    return dataclasses.replace(model, parameters=tuple(specs))


def place(model: ModelDescription, tp: int, *, real_only: bool = True) -> Placement:
    layout = ParallelLayout.for_world(WORLD, tp=tp)
    return Placement(model.padded_to(padded(tp)), layout, real_only=real_only)


def witnesses(placement: Placement) -> dict[int, dict[str, Any]]:
    """Fill every real element with a number of its own; what is not in a piece is left at NaN."""
    import torch

    numbers = {spec.segments[0].key: i for i, spec in enumerate(placement.description.parameters)}
    offsets = {"param": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}
    shapes = placement.shapes()
    memories: dict[int, dict[str, Any]] = {}
    for rank in placement.layout.ranks:
        memory = {slab.name: torch.full((slab.numel,), float("nan")) for slab in placement.slabs(rank)}
        for piece in placement.pieces(rank):
            shape = shapes[piece.tensor]
            index = np.arange(int(np.prod(shape))).reshape(shape)[piece.box.relative_to(type(piece.box).whole(shape))]
            values = numbers[piece.tensor] * 4096 + index.ravel() + offsets[piece.state]
            memory[piece.slab][piece.offset : piece.offset + piece.box.numel] = torch.from_numpy(values)
        memories[rank] = memory
    return memories


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("budget", [2**14, 2**28])
def test_c01_plans_move_real_rows_and_nothing_else(tied: bool, budget: int) -> None:
    import torch

    from megatron_dynatrain.transport.memory import run_all

    model = table_model(tied)
    assert [padded(tp) for tp, _ in STOPS] == [rows for _, rows in STOPS]
    for (tp, _), (next_tp, rows) in itertools.pairwise(STOPS):
        source, target = place(model, tp), place(model, next_tp)
        plans = plan_all(source, target, budget=WindowBudget(bytes=budget))
        check_pairs(plans)
        assert all(plan.received_bytes == plan.minimum_received_bytes for plan in plans)
        moved = {
            rank: {slab.name: torch.full((slab.numel,), float("nan")) for slab in target.slabs(rank)}
            for rank in range(WORLD)
        }
        run_all(plans, witnesses(source), moved)
        for rank, memory in witnesses(target).items():
            for name, expected in memory.items():
                assert moved[rank][name].shape == expected.shape
                assert torch.equal(moved[rank][name].view(torch.int32), expected.view(torch.int32)), (rank, name)
        tables = [slab for slab in target.slabs(WORLD - 1) if slab.parameter.endswith("word_embeddings.weight")]
        assert tables[0].numel == rows // next_tp * 32


def test_c01_padding_that_differs_has_no_source() -> None:
    model = table_model(tied=False)
    with pytest.raises(PlanError, match="72 and 80 rows"):
        plan_all(place(model, 1, real_only=False), place(model, 2, real_only=False))


# --- a real model -----------------------------------------------------------------------------------------------------


def _visit(context: RankContext, stops: tuple[tuple[int, int], ...], tied: bool, verify: str) -> dict[str, Any]:
    """Go from stop to stop; return at each the rows of the real tables, the whole state (rank 0) and the logits."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_dynatrain.switch import SwitchOptions, Vocabulary
    from tests.cases.job import CaseJob
    from tests.cases.models import T_SHAPE, gpt, logits
    from tests.cases.witness import fill

    layouts = [ParallelLayout.for_world(context.world, tp=tp) for tp, _ in stops]
    job = CaseJob(
        context,
        layouts[0],
        lambda config: gpt(padded(config.tensor_model_parallel_size), tied=tied)(config),
        shape={**T_SHAPE, "num_layers": 1},
        options=SwitchOptions(timeout=60, verify=verify),
        vocabulary=Vocabulary(REAL, lambda layout: padded(layout.tp)),
    )
    job.step(0.0)  # makes the moments
    values = {name: parameter.detach().clone() for name, parameter in job.parameters().items()}
    fill(job)  # for the moments: an element there has a value of its own
    with torch.no_grad():
        for name, parameter in job.parameters().items():
            parameter.copy_(values[name])  # for the weights: of a size that logits can be computed with
    job.on_empty = _spoil
    found: dict[str, Any] = {"rows": [], "states": [], "logits": []}
    for i, layout in enumerate(layouts):
        if i:
            job.switch(layout)
        tables = [p for name, p in job.parameters().items() if "word_embeddings" in name or "output_layer" in name]
        found["rows"].append([len(table) for table in tables])
        state = job.gather()
        found["states"].append(None if state is None else state.bits)
        part = logits(job.chunks[0], REAL).contiguous()
        parts = [torch.empty_like(part) for _ in range(layout.tp)]
        dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
        found["logits"].append(torch.cat(parts, dim=-1)[..., :REAL].numpy())
    return found


def _spoil(chunks: list[Any], optimizer: Any) -> None:
    """Leave nothing in a new target that could be right by chance."""
    from tests.cases.job import owned_by

    for parameter in chunks[0].parameters():
        parameter.data.fill_(float("nan"))
    for item in owned_by(optimizer):
        for state in ("exp_avg", "exp_avg_sq"):
            item.state[state].fill_(float("nan"))


def _check_visit(found: list[dict[str, Any]], stops: tuple[tuple[int, int], ...], tied: bool) -> None:
    for record in found:
        expected = [[rows // tp] * (1 if tied else 2) for tp, rows in stops]
        assert record["rows"] == expected
        for logits in record["logits"]:
            np.testing.assert_allclose(logits, record["logits"][0], rtol=1e-6, atol=1e-6)
    first, *others = found[0]["states"]
    tables = {key for key in first if "word_embeddings" in key[0] or "output_layer" in key[0]}
    assert {state for _, state in tables} == {"param", "main", "exp_avg", "exp_avg_sq"}
    for state, (_, rows) in zip(others, stops[1:], strict=True):
        assert state.keys() == first.keys()
        for key, bits in state.items():
            if key not in tables:
                assert np.array_equal(bits, first[key]), key
                continue
            assert bits.shape == (rows, 32)
            assert np.array_equal(bits[:REAL], first[key][:REAL]), key
            assert not bits[REAL:].any(), f"padding of {key} is not zero"


@pytest.mark.parametrize(("tied", "verify"), [(False, "full"), (True, "digest")])
def test_c01_real_rows_come_along_and_padding_is_zero(ranks: RankPool, tied: bool, verify: str) -> None:
    stops = STOPS if not tied else (STOPS[0], STOPS[2], STOPS[1], STOPS[0])
    world = WORLD if not tied else 4
    found = ranks.run(world, _visit, stops, tied, verify)
    _check_visit(found, stops, tied)
