"""C21: which random streams a rank goes on with: the rule of `mcore/random_streams.py`; (a) at a fixed world."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

TRACKED = "model-parallel-rng"
EXPERTS = "expert-parallel-rng"
STREAMS = ("python", "numpy", "torch", TRACKED)
Draws = dict[str, list[float]]


def _draw(count: int) -> Draws:
    """Draw from every stream of this process."""
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    draws: Draws = {
        "python": [random.random() for _ in range(count)],
        "numpy": np.random.rand(count).tolist(),
        "torch": torch.rand(count).tolist(),
    }
    with get_cuda_rng_tracker().fork():
        draws[TRACKED] = torch.rand(count).tolist()
    return draws


def _seed() -> None:
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def _switch(context: RankContext, sizes: list[dict[str, int]]) -> dict[str, Any]:
    """Five draws, the switches, then three more; and what draws 6 to 8 would have been without a switch."""
    from tests.cases.job import CaseJob
    from tests.cases.models import BARE_SHAPE, bare

    first, *others = [ParallelLayout(**size) for size in sizes]
    job = CaseJob(context, first, bare(weight=((12, 30), 0)), shape=BARE_SHAPE)
    _seed()
    _draw(5)
    reference = _draw(3)
    _seed()
    found: dict[str, Any] = {"first five": _draw(5), "unswitched": reference}
    for layout in others:
        job.switch(layout)
    return {**found, "switched": _draw(3)}


def _by(found: list[dict[str, Any]], name: str) -> list[tuple[float, ...]]:
    return [tuple(record["switched"][name]) for record in found]


@pytest.mark.parametrize(
    "sizes",
    [
        [{"tp": 2, "dp": 2}, {"tp": 4, "dp": 1}],
        [{"tp": 4, "dp": 1}, {"tp": 2, "dp": 2}],
        [{"tp": 2, "dp": 2}, {"tp": 4, "dp": 1}, {"tp": 2, "dp": 2}],
    ],
    ids=["tp2-tp4", "tp4-tp2", "tp2-tp4-tp2"],
)
def test_c21b_another_tp_gets_new_streams_by_the_rule(ranks: RankPool, sizes: list[dict[str, int]]) -> None:
    found = ranks.run(4, _switch, sizes)
    layout = ParallelLayout(**sizes[-1])
    owners = [layout.coordinate(rank)["tp"] for rank in range(4)]
    draws = _by(found, TRACKED)
    for rank, owner in enumerate(owners):
        for other, its_owner in enumerate(owners):
            assert (draws[rank] == draws[other]) == (owner == its_owner), (rank, other)
    for name in ("python", "numpy", "torch"):  # Megatron has these equal over tp
        assert len(set(_by(found, name))) == 1, name
    # None is an old one: not the own one that goes on, none that starts again, and none of another rank.
    old = {
        tuple(values[start : start + 3])
        for record in found
        for name in STREAMS
        for values in [record["first five"][name] + record["unswitched"][name]]
        for start in range(6)
    }
    assert not old & {tuple(record["switched"][name]) for record in found for name in STREAMS}
    if len(sizes) == 3:
        again = ranks.run(4, _switch, sizes)
        assert [record["switched"] for record in again] == [record["switched"] for record in found]


def test_c21b_a_second_switch_does_not_repeat_the_streams_of_the_first(ranks: RankPool) -> None:
    there, wide = {"tp": 2, "dp": 2}, {"tp": 4, "dp": 1}
    once = ranks.run(4, _switch, [wide, there])
    twice = ranks.run(4, _switch, [there, wide, there])
    for name in STREAMS:
        assert not set(_by(once, name)) & set(_by(twice, name)), name


def _draw_experts(count: int) -> list[float]:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork(EXPERTS):
        return torch.rand(count).tolist()


def _begin_experts(layout: ParallelLayout, rank: int) -> None:
    """Seed and draw five of every stream, and three more of the experts' on ep 1."""
    _seed()
    _draw(5)
    _draw_experts(5 + 3 * layout.coordinate(rank, expert=True)["ep"])


def _switch_experts(context: RankContext, sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """Five draws of every stream, three more of the experts' on ep 1, the switches, and the sixth draw."""
    from tests.cases.job import CaseJob
    from tests.cases.models import EXPERT_SHAPE, moe

    first, *others = [ParallelLayout(**size) for size in sizes]
    shape = {**EXPERT_SHAPE, "num_layers": 1, "sequence_parallel": first.sequence_parallel}
    job = CaseJob(context, first, moe(), shape=shape)

    _begin_experts(first, context.rank)
    unswitched = {**_draw(1), EXPERTS: _draw_experts(1)}
    _begin_experts(first, context.rank)
    for layout in others:
        job.switch(layout)
    owner = (job.layout.coordinate(context.rank)["tp"], job.layout.coordinate(context.rank, expert=True)["ep"])
    return {"unswitched": unswitched, "switched": {**_draw(1), EXPERTS: _draw_experts(1)}, "owner": owner}


@pytest.mark.parametrize(
    "sizes",
    [
        [{"ep": 2, "dp": 4}, {"ep": 2, "cp": 2, "dp": 2}],
        [{"tp": 2, "ep": 2, "etp": 1, "dp": 2}, {"tp": 2, "cp": 2, "ep": 2, "etp": 1, "dp": 1}],
    ],
    ids=["ep2", "tp2-ep2"],
)
def test_c21a_at_a_fixed_world_another_dp_keeps_the_streams_of_experts(
    ranks: RankPool, sizes: list[dict[str, Any]]
) -> None:
    sizes = [{**size, "sequence_parallel": size.get("tp", 1) > 1} for size in sizes]
    found = ranks.run(4, _switch_experts, sizes)
    for record in found:
        assert record["switched"] == record["unswitched"]
    for record in found:
        for other in found:
            (tp, ep), (other_tp, other_ep) = record["owner"], other["owner"]
            assert (record["switched"][TRACKED] == other["switched"][TRACKED]) == (tp == other_tp)
            assert (record["switched"][EXPERTS] == other["switched"][EXPERTS]) == (ep == other_ep)  # etp is 1


def test_c21b_another_dp_keeps_the_streams(ranks: RankPool) -> None:
    """The sixth draw is the one of a job that never switched, for each stream and rank."""
    found = ranks.run(4, _switch, [{"tp": 2, "dp": 2}, {"tp": 2, "cp": 2, "dp": 1}])
    for record in found:
        assert record["switched"] == record["unswitched"]
    assert len(set(_by(found, TRACKED))) == 2


def _grow(context: RankContext) -> dict[str, Any]:
    """The case as it stands: tp2 ep2 dp2 on four of eight ranks, then tp2 ep2 dp4 on all of them."""
    import torch

    from tests.cases.job import CaseJob
    from tests.cases.models import EXPERT_SHAPE, moe

    grown = ParallelLayout(tp=2, ep=2, dp=4, sequence_parallel=True)
    start = ParallelLayout(tp=2, ep=2, dp=2, sequence_parallel=True)
    shape = {**EXPERT_SHAPE, "num_layers": 1, "sequence_parallel": True}
    job = CaseJob(context, grown, moe(), shape=shape)
    job.switch(start)

    found: dict[str, Any] = {"unswitched": None}
    if job.switcher.parked:
        torch.manual_seed(99)  # what a parked process draws is of no account
        job.switcher.join_next(60)
    else:
        _begin_experts(start, context.rank)
        found["unswitched"] = {**_draw(1), EXPERTS: _draw_experts(1)}
        _begin_experts(start, context.rank)
        job.switch(grown)
    dense, expert = grown.coordinate(context.rank), grown.coordinate(context.rank, expert=True)
    return {**found, "switched": {**_draw(1), EXPERTS: _draw_experts(1)}, "owner": (dense["tp"], expert["ep"])}


def test_c21a_ranks_that_join_take_the_streams_of_their_twins(ranks: RankPool) -> None:
    found = ranks.run(8, _grow, timeout=120)
    reference = {record["owner"]: record["unswitched"] for record in found[:4]}
    assert len(reference) == 4
    for rank, record in enumerate(found):
        assert record["switched"] == reference[record["owner"]], rank
