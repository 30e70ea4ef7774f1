"""Megatron's step schedule of batch sizes: read as Megatron reads it, and counted in closed form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynatrain.errors import ScheduleError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.schedule.batches import BatchSchedule, BatchStep, parse_batches
from megatron_dynatrain.schedule.clock import Clock, RunLength, run_length
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.schedule.triggers import Trigger

TEXTS = ["0:8", "0:8 640:16", "0:768,250B:1536 500B:3072,  750b:6144", "1.5k:12 0:2 2K:1e1 0.001M:6", " 0:1K 1T:2k "]
DRAWN = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), max_size=4, unique_by=lambda step: step[0]).map(
    lambda steps: BatchSchedule(tuple(BatchStep(*step) for step in [(0, 5), *sorted(steps)]))
)


@pytest.mark.parametrize("seq_length", [None, 16, 7])
@pytest.mark.parametrize("text", TEXTS)
def test_a_schedule_is_read_as_megatron_reads_it(text: str, seq_length: int | None) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    theirs = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, seq_length)
    ours = parse_batches(text, seq_length)
    assert [(step.samples, step.size) for step in ours.steps] == theirs.schedule
    places = [at + near for at, _ in theirs.schedule for near in (-1, 0, 1) if at + near >= 0]
    for samples in places:
        theirs.update(samples, consistency_check=False)
        assert ours.size_at(samples) == theirs.get_current_global_batch_size()
    assert len({ours.size_at(samples) for samples in places}) == len(theirs.schedule)


@pytest.mark.parametrize(
    ("text", "expected", "got"),
    [
        ("", "a first entry with threshold 0", ""),
        ("40:8 80:16", "a first entry with threshold 0", "40:8 80:16"),
        ("-40:8 0:8", "a first entry with threshold 0", "-40:8 0:8"),
        ("0:8 16", "entries THRESHOLD:SIZE, as 250B:1536", "16"),
        ("0:8 16:", "entries THRESHOLD:SIZE, as 250B:1536", "16:"),
        ("0:8 4X:16", "entries THRESHOLD:SIZE, as 250B:1536", "4X:16"),
        ("0:8 inf:16", "entries THRESHOLD:SIZE, as 250B:1536", "inf:16"),
        ("0:8 64:16 79:24", "another threshold, in samples, for each entry", "64:16 and 79:24"),
        ("0:8 64:0.5", "batch sizes of at least 1", "64:0.5"),
    ],
)
def test_what_megatron_would_stop_at_is_refused_by_its_flag(text: str, expected: str, got: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        parse_batches(text, 16)
    error = refused.value
    assert (error.subject, error.expected, error.got) == ("--step-batch-size-schedule", expected, got)


def stepped(batches: BatchSchedule, samples: int, iterations: int) -> list[int]:
    """Return the samples before each iteration and after the last, one iteration at a time."""
    found = [samples]
    for _ in range(iterations):
        found.append(found[-1] + batches.size_at(found[-1]))
    return found


@given(batches=DRAWN, start=st.integers(0, 70), iterations=st.integers(0, 40), target=st.integers(1, 200))
def test_counting_is_stepping(batches: BatchSchedule, start: int, iterations: int, target: int) -> None:
    passed = stepped(batches, start, 200)
    assert batches.samples_after(start, iterations) == passed[iterations]
    if target > start:
        assert batches.iterations_until(start, target) == next(n for n, at in enumerate(passed) if at >= target)
    else:
        assert batches.iterations_until(start, target) <= 0
    sizes = [batches.step_at(at) for at in passed if at < target]
    assert list(batches.met(start, target)) == list(dict.fromkeys(sizes))
    assert list(batches.met(start, None)) == list(dict.fromkeys(batches.step_at(at) for at in passed))


def test_a_constant_size_counts_back_too() -> None:
    eight = BatchSchedule.constant(8)
    assert [eight.iterations_until(100, target) for target in (92, 93, 99, 100, 101)] == [-1, 0, 0, 0, 1]
    assert eight.samples_after(100, -2) == 84


GROWING = parse_batches("0:8 40:16 60:24", None)  # 0 8 16 24 32 40 56 72 96 ...
START = Clock(iteration=0, samples=0, batches=GROWING)


def switch(kind: Any, value: int) -> PlannedSwitch:
    return PlannedSwitch(Trigger(kind, value), Target(None, ParallelLayout.for_world(1), 1, "here"), "here", 0)


def test_boundaries_are_those_of_the_schedule() -> None:
    samples = (1, 40, 41, 56, 57, 73)
    assert [START.boundary(Trigger("at_samples", count)) for count in samples] == [1, 5, 6, 6, 7, 8]
    assert [START.at(iteration).samples for iteration in (4, 5, 6, 7, 8)] == [32, 40, 56, 72, 96]
    assert [START.at(iteration).global_batch_size for iteration in (4, 5, 6, 7, 8)] == [8, 16, 16, 24, 24]
    assert START.at(6).at(8) == START.at(8)
    assert START.at(5, 1000).global_batch_size == 16  # a layout doesn't change it


def test_the_length_of_a_training_is_megatrons() -> None:
    for train_samples in range(1, 150):
        # update_train_iters of megatron/training/training.py
        iterations = consumed = 0
        while consumed < train_samples:
            consumed += GROWING.size_at(consumed)
            iterations += 1
        length = RunLength(iterations=iterations, samples=train_samples)
        assert run_length(START, [], train_iters=None, train_samples=train_samples) == length
        pending = [switch("at_iteration", 2), switch("at_samples", 50)]
        assert run_length(START, pending, train_iters=None, train_samples=train_samples) == length
        if iterations > 6:
            resumed = START.at(6)
            assert run_length(resumed, [], train_iters=None, train_samples=train_samples) == length


def test_a_length_in_iterations_needs_the_samples_of_every_step() -> None:
    found = run_length(START, [switch("at_iteration", 6)], train_iters=8, train_samples=None)
    assert found == RunLength(iterations=8, samples=96)
    assert run_length(START.at(7), [], train_iters=8, train_samples=None) == found
