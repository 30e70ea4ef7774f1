"""Switches leak nothing: what a rank holds after any number of cycles is what it holds after the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tests.ranks.dynamic import Layout, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.leaks import Census, count_after_switches
from tests.ranks.pool import RankPool

_COUNTS = [field.name for field in dataclasses.fields(Census) if field.name not in ("switches", "objects", "resident")]
_THREADS_OF_A_GROUP = 3  # of gloo
# Long enough that the index of the mock data set, which every switch makes anew, is small beside the process.
_SEQUENCE = 256


def _take_censuses(
    ranks: RankPool, world: int, cycle: Sequence[Layout], *, switches: int, **model: object
) -> list[list[Census]]:
    """Run `switches` switches, one after each step, around the cycle; return the censuses of each rank."""
    schedule = {number: cycle[(number - 1) % len(cycle)] for number in range(1, switches + 1)}
    argv = gpt_args(layers=2, hidden=32, seq=_SEQUENCE, global_batch=world, train_iters=switches + 1, **model)
    run = run_switched(ranks, world, argv, schedule, hooks=(count_after_switches,), limit=200)
    assert [record.outcome for record in run.switches] == ["committed"] * switches
    censuses = [record.extra["census"] for record in run.ranks]
    assert all([census.switches for census in of_rank] == list(range(switches + 1)) for of_rank in censuses)
    return censuses


def _check_flat(censuses: Sequence[Census], cycle: int) -> None:
    """Check each census against the first one of the same layout from the end of the first cycle on."""
    for census in censuses:
        groups_threads = _THREADS_OF_A_GROUP * census.groups
        assert census.threads == census.own + groups_threads, "groups of an old world are still alive"
        assert census.names == census.groups, "names of groups that are gone"
    for census in censuses[2 * cycle :]:
        first = censuses[cycle + census.switches % cycle]
        grown = {name: (getattr(first, name), getattr(census, name)) for name in _COUNTS}
        grown |= {name: (first.objects.get(name, 0), count) for name, count in census.objects.items()}
        grown = {name: (before, now) for name, (before, now) in grown.items() if now > before}
        assert not grown, f"after {census.switches} switches there is more than after {first.switches}: {grown}"


def _check_resident(censuses: Sequence[Census], cycle: int) -> None:
    first = max(census.resident for census in censuses[1 : 1 + cycle])
    last = max(census.resident for census in censuses[-cycle:])
    assert last <= 1.05 * first, f"resident memory grew from {first >> 10} to {last >> 10} KiB"


def test_50_switches_leak_nothing(ranks: RankPool) -> None:
    cycle = [layout_keys(pp=2), layout_keys(), layout_keys(tp=2, sp=True)]
    for of_rank in _take_censuses(ranks, 2, cycle, switches=51, tp=2, sp=True):
        _check_flat(of_rank, len(cycle))
        _check_resident(of_rank, len(cycle))


def test_switches_of_a_bf16_job_leak_nothing(ranks: RankPool) -> None:
    cycle = [layout_keys(pp=2), layout_keys(), layout_keys(tp=2, sp=True)]
    for of_rank in _take_censuses(ranks, 2, cycle, switches=12, tp=2, sp=True, bf16=True, swiglu=True, tied=False):
        _check_flat(of_rank, len(cycle))
        _check_resident(of_rank, len(cycle))


def test_worker_processes_of_the_launch_end_with_the_first_switch(ranks: RankPool) -> None:
    cycle = [layout_keys(pp=2), layout_keys(), layout_keys(tp=2)]
    census_of = _take_censuses(ranks, 2, cycle, switches=3, tp=2, extra="--num-workers 1")
    # Workers for training, validation and test, on each rank with tensor-parallel index 0.
    assert [[census.children for census in of_rank] for of_rank in census_of] == [[3, 3, 3, 3], [0, 3, 3, 0]]


def test_switches_of_4_ranks_leak_nothing(ranks: RankPool) -> None:
    cycle = [layout_keys(tp=2, pp=2, sp=True), layout_keys(), layout_keys(tp=4)]
    for of_rank in _take_censuses(ranks, 4, cycle, switches=9, tp=4):
        _check_flat(of_rank, len(cycle))
        _check_resident(of_rank, len(cycle))
