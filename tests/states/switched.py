"""A run that switches twice, compared with one that never does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.ranks import independent_gather
from tests.ranks.dynamic import SwitchedRun, all_steps, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool
from tests.ranks.records import PretrainRecord, StepRecord

FIRST, SECOND, STEPS = 2, 4, 6
SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "seq": 16, "global_batch": 4, "train_iters": STEPS}
Hooks = Sequence[Callable[..., None]]
Layout = Mapping[str, Any]
FP32, FP16, BF16 = 2e-6, 5e-5, 5e-4
"""Largest relative differences of losses between layouts, about ten times what they are."""


def small_args(extra: str = "", **keywords: Any) -> list[str]:
    """Return the flags of a small model, see `gpt_args`."""
    return gpt_args(**{**SMALL, **keywords}, extra=extra)


def run_twice_switched(
    ranks: RankPool, argv: Sequence[str], first: Layout, second: Layout, *, hooks: Hooks = (), world: int = 2
) -> SwitchedRun:
    """Run with switches after 2 and 4 steps, and require that both commit and that the first keeps all bits."""
    switches = {FIRST: layout_keys(**first), SECOND: layout_keys(**second)}
    around = functools.partial(independent_gather.around_switch, at=FIRST)
    run = run_switched(ranks, world, argv, switches, hooks=(*hooks, around))
    assert [(s.outcome, s.error) for s in run.switches] == [("committed", None)] * 2
    before, after = (run.ranks[0].extra[name] for name in ("before", "after"))
    assert before.differences(after) == []
    return run


def assert_trains_on(
    ranks: RankPool,
    argv: Sequence[str],
    first: Layout,
    second: Layout,
    *,
    within: float,
    hooks: Hooks = (),
    world: int = 2,
) -> SwitchedRun:
    """Require that a run with two switches trains as one without: losses, learning rates, samples, Adam's step."""
    run = run_twice_switched(ranks, argv, first, second, hooks=hooks, world=world)
    never = ranks.pretrain(world, argv, hooks=hooks)
    assert_same_steps(run.steps, all_steps(never), within=within)
    assert adam_steps(run.ranks) == adam_steps(never)
    return run


def adam_steps(records: Sequence[PretrainRecord]) -> list[set[int]]:
    """Return the values of Adam's step count after each step, over all ranks: one of them may own nothing."""
    per_rank = ([set(step.adam_steps) for step in record.steps] for record in records)
    return [set().union(*counts) for counts in zip(*per_rank, strict=True)]


def assert_same_steps(steps: Sequence[StepRecord], never: Sequence[StepRecord], *, within: float) -> None:
    """Require steps that are equal but for the rounding of losses and gradient norms."""
    assert len(steps) == len(never) > SECOND
    for step, reference in zip(steps, never, strict=True):
        for value, expected, limit in (
            (step.loss, reference.loss, within),
            (step.grad_norm, reference.grad_norm, 10 * within),
        ):
            assert value is not None
            assert expected is not None
            assert abs(value - expected) <= limit * abs(expected), step.iteration
        assert (step.lr, step.consumed_samples) == (reference.lr, reference.consumed_samples)
