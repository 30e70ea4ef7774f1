"""C15: the padding of a bucket follows the number of shards, and is never state.

`tests/pure/test_flat_buffer.py` has the offsets of dp 2, 3, 4 and 8 at plan level; here Megatron's own optimizer has
them, and the plans are executed.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.windows import plan_all
from megatron_dynatrain.transport.memory import run_all
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import ModelDescription, ParameterSpec
from tests.pure.models import LAST, parameter
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool
from tests.transport.witness import differences, empty, filled

# Megatron fills its buffers in reverse module order: 200, 300, 64.
MODULE_ORDER = (("p2", 64), ("p1", 300), ("p0", 200))
BUFFER_INDEX = {"p0": (0, 200, 0), "p1": (256, 556, 0), "p2": (576, 640, 0)}


def _buffer(context: RankContext) -> dict[str, Any]:
    """Build the model of the case with data parallelism only and return what the real buffer and optimizer say."""
    import torch

    from tests.cases.job import CaseJob
    from tests.cases.models import BARE_SHAPE, bare

    shapes = {name: ((size,), None) for name, size in MODULE_ORDER}
    # A new Switcher checks the predicted placement of the main parameters against these objects; the job raises.
    job = CaseJob(context, ParallelLayout(dp=context.world), bare(**shapes), shape=BARE_SHAPE, dtype=torch.bfloat16)
    (buffer,) = job.chunks[0].buffers
    names = {parameter: name for name, parameter in job.parameters().items()}
    job.step(1.0)
    state = job.gather()
    return {
        "index": {names[parameter]: tuple(place) for parameter, place in buffer.param_index_map.items()},
        "numel": buffer.numel,
        "runs": {name: (one.start, one.start + one.main.numel()) for name, one in job.owned().items()},
        "copies": None if state is None else {name: int(count) for name, count in state.copies.items()},
    }


@pytest.mark.parametrize(
    ("dp", "padded", "runs"),
    [
        (2, 640, [{"p0": (0, 200), "p1": (0, 64)}, {"p1": (64, 300), "p2": (0, 64)}]),
        (3, 768, [{"p0": (0, 200)}, {"p1": (0, 256)}, {"p1": (256, 300), "p2": (0, 64)}]),
    ],
)
def test_c15_megatrons_own_buffer_and_shards(
    ranks: RankPool, dp: int, padded: int, runs: list[dict[str, tuple[int, int]]]
) -> None:
    found = ranks.run(dp, _buffer)
    for record, expected in zip(found, runs, strict=True):
        assert record["index"] == BUFFER_INDEX
        assert record["numel"] == padded
        assert record["runs"] == expected
    copies = found[0]["copies"]
    assert {count for (_, state), count in copies.items() if state != "param"} == {1}


def three() -> ModelDescription:
    specs: tuple[ParameterSpec, ...] = tuple(
        parameter(name, (size,), None, LAST, dtype="bfloat16") for name, size in MODULE_ORDER
    )
    return ModelDescription(specs, num_layers=1)


def test_c15_two_to_three_to_four_to_eight_and_back() -> None:
    placements = [Placement(three(), ParallelLayout(dp=dp)) for dp in (2, 3, 4, 8, 2)]
    memory = {rank: filled(placements[0], rank) for rank in range(2)}
    for source, target in itertools.pairwise(placements):
        plans = plan_all(source, target)
        after = {rank: empty(target, rank) for rank in target.layout.ranks}
        run_all(plans, memory, after, check_writes=True)
        assert sum(plan.received_bytes for plan in plans) == sum(plan.minimum_received_bytes for plan in plans)
        for rank in target.layout.ranks:
            assert list(differences(after[rank], filled(target, rank))) == []
        memory = after


def test_c15_dp4_to_dp2_cp2_plans_no_bytes() -> None:
    source, target = (Placement(three(), ParallelLayout(dp=dp, cp=cp)) for dp, cp in ((4, 1), (2, 2)))
    plans = plan_all(source, target)
    assert sum(plan.sent_bytes + plan.received_bytes for plan in plans) == 0
    assert sum(plan.local_bytes for plan in plans) == 564 * (4 * 2 + 3 * 4)


def _to_context_parallel(context: RankContext) -> dict[str, Any]:
    from tests.cases.job import CaseJob
    from tests.cases.models import BARE_SHAPE, bare

    shapes = {name: ((size,), None) for name, size in MODULE_ORDER}
    job = CaseJob(context, ParallelLayout(dp=4), bare(**shapes), shape=BARE_SHAPE)
    job.step(1.0)
    # `numpy()` makes the storage of a parameter one that can't be resized: a commit must bear that.
    before = {name: one.main.detach().numpy().copy() for name, one in job.owned().items()}
    state = job.gather()
    report = job.switch(ParallelLayout(dp=2, cp=2))
    after = {name: one.main.detach().numpy().copy() for name, one in job.owned().items()}
    now = job.gather()
    return {
        "moved": report.moved_bytes,
        "same": before.keys() == after.keys() and all(np.array_equal(before[n], after[n]) for n in before),
        "differences": None if state is None or now is None else state.differences(now),
    }


def test_c15_dp4_to_dp2_cp2_moves_no_bytes(ranks: RankPool) -> None:
    found = ranks.run(4, _to_context_parallel)
    assert [(record["moved"], record["same"]) for record in found] == [(0, True)] * 4
    assert found[0]["differences"] == []
