"""Iterations and samples of a run whose batch size changes."""

from __future__ import annotations

import pytest

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.schedule.batches import BatchSchedule
from megatron_dynatrain.schedule.clock import Clock, RunLength, run_length, walk
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.schedule.triggers import Trigger

START = Clock(iteration=0, samples=0, batches=BatchSchedule.constant(8))


def switch(kind: str, value: int, batch: int | None = None) -> PlannedSwitch:
    target = Target(None, ParallelLayout.for_world(1), 1, "here", batch)
    return PlannedSwitch(Trigger(kind, value), target, "here", 0)  # type: ignore[arg-type]


def test_a_clock_goes_on_with_the_batch_size_of_each_switch() -> None:
    clocks = walk(START, [switch("at_iteration", 5, 16), switch("at_samples", 57), switch("at_samples", 100, 4)])
    assert [(clock.iteration, clock.samples, clock.global_batch_size) for clock in clocks] == [
        (5, 40, 16),
        (7, 72, 16),  # 40 + 16 = 56 is one short
        (9, 104, 4),
    ]


def test_the_boundary_at_samples_is_the_first_that_has_them() -> None:
    clock = START.at(5, 16)
    assert [clock.boundary(Trigger("at_samples", samples)) for samples in (41, 56, 57, 72, 73)] == [6, 6, 7, 7, 8]


@pytest.mark.parametrize(("iterations", "samples"), [(10, 80), (1, 8)])
def test_without_a_change_the_length_is_megatrons(iterations: int, samples: int) -> None:
    same = [switch("at_iteration", 1), switch("at_samples", 17, 8)]
    assert run_length(START, same, train_iters=iterations, train_samples=None) == RunLength(
        iterations=iterations, samples=iterations * 8
    )
    for rest in (0, 7):
        found = run_length(START, same, train_iters=None, train_samples=samples + rest)
        assert found == RunLength(iterations=iterations, samples=samples + rest)


def test_a_length_in_iterations_needs_the_samples_of_every_batch_size() -> None:
    changes = [switch("at_iteration", 4, 16), switch("at_samples", 90, 2)]
    found = run_length(START, changes, train_iters=10, train_samples=None)
    assert found == RunLength(iterations=10, samples=4 * 8 + 4 * 16 + 2 * 2)


def test_a_length_in_samples_ends_with_the_last_whole_batch() -> None:
    changes = [switch("at_iteration", 4, 16)]
    for samples, iterations in ((48, 5), (63, 5), (64, 6)):
        found = run_length(START, changes, train_iters=None, train_samples=samples)
        assert found == RunLength(iterations=iterations, samples=samples)


def test_a_switch_after_the_end_changes_nothing() -> None:
    late = [switch("at_iteration", 10, 1)]
    assert run_length(START, late, train_iters=10, train_samples=None) == RunLength(iterations=10, samples=80)
    assert run_length(START, late, train_iters=None, train_samples=80) == RunLength(iterations=10, samples=80)


def test_a_run_that_resumes_has_the_length_of_the_whole() -> None:
    changes = [switch("at_iteration", 4, 16), switch("at_iteration", 8, 4)]
    whole = run_length(START, changes, train_iters=12, train_samples=None)
    resumed = Clock(iteration=6, samples=4 * 8 + 2 * 16, batches=BatchSchedule.constant(16))
    assert run_length(resumed, changes[1:], train_iters=12, train_samples=None) == whole


def test_an_overdue_switch_happens_at_the_next_boundary() -> None:
    late = Clock(iteration=9, samples=100, batches=BatchSchedule.constant(8))
    assert late.after(switch("at_iteration", 5, 16)) == Clock(
        iteration=10, samples=108, batches=BatchSchedule.constant(16)
    )
    assert late.after(switch("at_samples", 5, 16)).iteration == 10


def test_a_length_needs_one_of_the_two() -> None:
    with pytest.raises(ValueError, match="train_iters or train_samples"):
        run_length(START, [], train_iters=None, train_samples=None)
