"""C21: which random streams a rank goes on with, by the rule of `mcore/random_streams.py`; (a) needs growing worlds."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

TRACKED = "model-parallel-rng"
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


def test_c21b_another_dp_keeps_the_streams(ranks: RankPool) -> None:
    """The sixth draw is the one of a job that never switched, for each stream and rank."""
    found = ranks.run(4, _switch, [{"tp": 2, "dp": 2}, {"tp": 2, "cp": 2, "dp": 1}])
    for record in found:
        assert record["switched"] == record["unswitched"]
    assert len(set(_by(found, TRACKED))) == 2
