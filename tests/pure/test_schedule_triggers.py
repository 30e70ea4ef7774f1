"""When a switch is due, and at which iteration it will be."""

from __future__ import annotations

import pytest

from megatron_dynatrain.schedule.batches import BatchSchedule
from megatron_dynatrain.schedule.triggers import Trigger

EIGHT = BatchSchedule.constant(8)


@pytest.mark.parametrize(
    ("trigger", "iteration", "samples", "due"),
    [
        (Trigger("at_iteration", 10), 9, 10_000, False),
        (Trigger("at_iteration", 10), 10, 0, True),
        (Trigger("at_iteration", 10), 11, 0, True),
        (Trigger("at_samples", 80), 10_000, 79, False),
        (Trigger("at_samples", 80), 0, 80, True),
        (Trigger("at_samples", 80), 0, 88, True),
    ],
)
def test_due_from_the_boundary_on(trigger: Trigger, iteration: int, samples: int, due: bool) -> None:
    assert trigger.due(iteration, samples) is due


@pytest.mark.parametrize(("samples", "boundary"), [(1, 1), (8, 1), (9, 2), (16, 2), (79, 10), (80, 10), (81, 11)])
def test_samples_are_reached_at_the_first_boundary_with_at_least_as_many(samples: int, boundary: int) -> None:
    trigger = Trigger("at_samples", samples)
    assert trigger.boundary(0, 0, EIGHT) == boundary
    assert next(i for i in range(100) if trigger.due(i, 8 * i)) == boundary


def test_the_boundary_counts_from_where_the_run_starts() -> None:
    assert Trigger("at_samples", 120).boundary(10, 100, EIGHT) == 13
    assert Trigger("at_samples", 100).boundary(10, 100, EIGHT) == 10
    assert Trigger("at_samples", 99).boundary(10, 100, EIGHT) == 10
    assert Trigger("at_samples", 92).boundary(10, 100, EIGHT) == 9
    assert Trigger("at_iteration", 12).boundary(10, 100, EIGHT) == 12


def test_a_trigger_reads_as_it_is_written() -> None:
    assert str(Trigger("at_samples", 4096)) == "at_samples: 4096"
