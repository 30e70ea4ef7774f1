"""Ranks that leave the world, wait without memory and come back: the state stays whole, any rank may leave."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

Keys = dict[str, Any]
ROUNDING = 1e-6  # relative: fp32, other order of summation

# Each layout with the ranks that it runs on; the first is the launch, on all.
CHAINS: dict[str, list[Keys]] = {
    "first-rank-leaves": [{}, {"ranks": (1, 3), "tp": 2}, {"ranks": (2, 0, 3, 1), "pp": 2}, {}],
    "middle-ranks-leave": [{"pp": 2}, {"ranks": (3, 0), "pp": 2}, {"ranks": (2, 1)}, {"pp": 2}],
    "one-by-one": [{"tp": 2}, {"ranks": (0, 1)}, {"ranks": (1,)}, {"ranks": (1, 2), "tp": 2}, {"tp": 2}],
}


def walk(context: RankContext, chain: list[Keys], steps: int, apart: bool) -> dict[str, Any]:
    """Go through the layouts, training between them where `steps`; what each rank saw."""
    from megatron_dynatrain.layout import ParallelLayout
    from tests.ranks.core_job import CoreJob, Sizes, local_digests

    layouts = [ParallelLayout.for_world(keys.get("ranks", context.world), **_sizes(keys)) for keys in chain]
    job = CoreJob(Sizes(), layouts[0])
    switcher = job.switcher
    found: dict[str, Any] = {"losses": [], "reports": [], "held": []}

    def train() -> None:
        for _ in range(steps):
            found["losses"].append((job.done, job.step()[0]))

    train()
    job.step() if not steps else None
    found["held"].append(local_digests(switcher.world.chunks, switcher.world.optimizer))
    while switcher.committed < len(layouts) - 1:
        if switcher.parked:
            report = switcher.join_next(60)
            assert report is not None
            job.done = 1 + steps * (switcher.committed - 1) if not steps else steps * switcher.committed
        else:
            target = layouts[switcher.committed + 1]
            if apart:
                switcher.prepare_ahead(target)
            report = switcher.switch(target)
        found["reports"].append((report.number, report.outcome, report.moved_bytes == report.minimum_bytes))
        if not switcher.parked:
            train()
    found["held"].append(local_digests(switcher.world.chunks, switcher.world.optimizer))
    return found


def _sizes(keys: Keys) -> Keys:
    return {name: value for name, value in keys.items() if name != "ranks"}


@pytest.mark.parametrize("apart", [False, True], ids=["at-boundary", "beside"])
@pytest.mark.parametrize("name", CHAINS)
def test_leaving_and_coming_back_without_a_step_changes_no_bit(ranks: RankPool, name: str, apart: bool) -> None:
    for found in ranks.run(4, walk, CHAINS[name], 0, apart):
        assert all(outcome == "committed" and least for _, outcome, least in found["reports"])
        assert found["held"][0] == found["held"][1]


def test_losses_with_changing_ranks_are_those_of_a_run_on_all(ranks: RankPool) -> None:
    never = ranks.run(4, walk, [{}], 8, False)
    chain = [{}, {"ranks": (1, 3), "tp": 2}, {"ranks": (3, 0, 1, 2), "pp": 2}, {"ranks": (2,)}]
    walked = ranks.run(4, walk, chain, 2, True)
    expected = dict(never[0]["losses"])
    losses = {step: loss for found in walked for step, loss in found["losses"] if loss is not None}
    assert sorted(losses) == sorted(expected) == list(range(8))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=ROUNDING)


def cycles(context: RankContext, count: int) -> dict[str, Any]:
    """Park and call back half of the ranks many times; what a parked rank holds, and what is left at the end."""
    from pathlib import Path

    import torch

    from megatron_dynatrain.elastic.groups import live_groups
    from megatron_dynatrain.layout import ParallelLayout
    from tests.ranks.core_job import CoreJob, Sizes

    every = ParallelLayout.for_world(context.world)
    some = ParallelLayout.for_world(range(context.world // 2), tp=context.world // 2)
    job = CoreJob(Sizes(), every)
    job.step()
    switcher = job.switcher
    found: dict[str, Any] = {"parked bytes": [], "census": []}
    while switcher.committed < 2 * count:
        if switcher.parked:
            gc.collect()
            tensors = [item for item in gc.get_objects() if isinstance(item, torch.nn.Parameter)]
            found["parked bytes"].append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
            assert switcher.join_next(60) is not None
        else:
            switcher.switch(some if switcher.world.layout == every else every)
        if switcher.world.layout == every:
            gc.collect()
            modules = sum(1 for item in gc.get_objects() if isinstance(item, torch.nn.Module))
            threads = len(list(Path("/proc/self/task").iterdir()))
            found["census"].append((live_groups(), threads, len(list(Path("/proc/self/fd").iterdir())), modules))
            job.step()
    return found


def test_cycles_of_parking_leak_nothing_and_a_parked_rank_holds_no_state(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(4, cycles, 20, timeout=170)):
        assert found["parked bytes"] == [0] * (20 if rank >= 2 else 0)
        assert len(found["census"]) == 20
        assert len(set(found["census"][2:])) == 1, found["census"]  # the first ones make what stays


def failing_return(context: RankContext) -> dict[str, Any]:
    """A return that fails leaves the parked rank parked; then it comes back, leaves again and is dismissed."""
    from megatron_dynatrain.errors import LayoutError, SwitchRefused
    from megatron_dynatrain.layout import ParallelLayout
    from tests.ranks.core_job import CoreJob, Sizes

    every = ParallelLayout.for_world(context.world)
    first = ParallelLayout.for_world([0, 1])
    job = CoreJob(Sizes(), every)
    job.step()
    switcher = job.switcher
    switcher.switch(first)
    found: dict[str, Any] = {"parked": switcher.parked}
    if switcher.parked:
        before = time.process_time(), time.monotonic()
        report = switcher.join_next(60)
        found["cpu"] = (time.process_time() - before[0]) / (time.monotonic() - before[1])
        found["joined"] = report is not None and report.outcome
    else:
        time.sleep(3)
        stock = switcher.on_phase

        def on_phase(name: str) -> None:
            if name == "prepare/plan" and switcher.rank == 1:
                raise ValueError("no plan")

        switcher.on_phase = on_phase
        with pytest.raises(SwitchRefused, match="no plan"):
            switcher.switch(every)
        switcher.on_phase = stock
        with pytest.raises(SwitchRefused) as refused:
            switcher.switch(ParallelLayout.for_world([0, 1, 5, 6]))
        assert isinstance(refused.value.__cause__, LayoutError)
        found["joined"] = switcher.switch(every).outcome
    job.done = 1
    found["loss"] = job.step()[0]
    switcher.switch(first)
    if switcher.parked:
        found["dismissed"] = switcher.join_next() is None
    else:
        switcher.dismiss()
    found["threads"] = [thread.name for thread in threading.enumerate() if "dynatrain" in thread.name]
    return found


def test_a_return_that_fails_leaves_the_rank_parked_and_it_can_come_back(ranks: RankPool) -> None:
    results = ranks.run(3, failing_return)
    assert [found["parked"] for found in results] == [False, False, True]
    assert [found["joined"] for found in results] == ["committed"] * 3
    assert len({found["loss"] for found in results}) <= 3
    assert results[2]["dismissed"]
    assert results[2]["cpu"] < 0.3  # of a core, with a refused and a committed switch in it
    assert [found["threads"] for found in results] == [[]] * 3


def documented(context: RankContext) -> tuple[int, bool]:
    """Do what docs/elastic.md shows."""
    import re
    from pathlib import Path

    from megatron_dynatrain.layout import ParallelLayout
    from tests.ranks.core_job import CoreJob, Sizes

    text = (Path(__file__).resolve().parents[2] / "docs" / "elastic.md").read_text()
    block = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "join_next" in block)
    job = CoreJob(Sizes(), ParallelLayout.for_world(context.world))
    job.step()
    exec(block, {"switcher": job.switcher})
    return job.switcher.committed, job.switcher.parked


def test_the_documented_loop(ranks: RankPool) -> None:
    assert ranks.run(4, documented) == [(2, False)] * 4


def lose_one_and_take_one_in(context: RankContext) -> tuple[str | None, bool, list[int]]:
    """Rank 2 is lost while rank 3 is parked; the others go on with rank 3 in its place."""
    from megatron_dynatrain.layout import ParallelLayout
    from tests.ranks.core_job import CoreJob, Sizes, local_digests

    job = CoreJob(Sizes(), ParallelLayout.for_world(4))  # no step yet: parameters are all there is, and have copies
    switcher = job.switcher
    whole = local_digests(switcher.world.chunks, switcher.world.optimizer)
    switcher.switch(ParallelLayout.for_world([0, 1, 2]))
    if context.rank == 2:
        return None, True, []
    if switcher.parked:
        report = switcher.join_next(60)
        assert report is not None
    else:
        report = switcher.switch(ParallelLayout.for_world([0, 1, 3]), lost=[2])
    found = local_digests(switcher.world.chunks, switcher.world.optimizer)
    names = [name for name in whole if "[" not in name]
    return report.outcome, all(found[name] == whole[name] for name in names), list(switcher.processes)


def test_a_parked_rank_takes_the_place_of_a_lost_one(ranks: RankPool) -> None:
    found = ranks.run(4, lose_one_and_take_one_in)
    assert [record for rank, record in enumerate(found) if rank != 2] == [("committed", True, [0, 1, 3])] * 3
