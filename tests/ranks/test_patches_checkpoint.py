"""Each mend of Megatron's checkpoints: the fault without it, and none with it.

All runs do 6 steps; a checkpoint is saved after 4 and the last 2 are done again from it, in another layout. The
reference is the run that never stopped: a save that is wrong already can't be seen by loading and saving again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.gpt_args import checkpoint_args, gpt_args
from tests.ranks.hooks import count_managers, mend_checkpoints
from tests.ranks.pool import RankFailure, RankPool
from tests.ranks.records import PretrainRecord, StepRecord, losses, steps_with_loss

STEPS, SAVED = 6, 4
ROUNDING = 1e-6  # relative: fp32, other order of summation
small = functools.partial(gpt_args, layers=2, hidden=32, train_iters=STEPS)
moe = functools.partial(small, experts=2, swiglu=True, tied=False)
# Buckets of at least 3,000 elements; most end in padding, as 32 x 3 is not a multiple of 128.
bucketed = functools.partial(small, extra="--overlap-grad-reduce --ddp-bucket-size 3000")


def all_but(mend: str) -> tuple[Callable[..., None], ...]:
    return (functools.partial(mend_checkpoints, without=mend),)


def save(ranks: RankPool, argv: list[str], *hooks: Callable[..., None]) -> tuple[Path, list[PretrainRecord]]:
    directory = ranks.scratch("checkpoint")
    argv = argv + checkpoint_args(save=directory, interval=SAVED) + ["--exit-interval", str(SAVED)]
    return directory, ranks.pretrain(2, argv, hooks=hooks or (mend_checkpoints,))


def load(ranks: RankPool, argv: list[str], directory: Path, *hooks: Callable[..., None]) -> list[PretrainRecord]:
    return ranks.pretrain(2, argv + checkpoint_args(load=directory), hooks=hooks or (mend_checkpoints,))


def largest_difference(steps: list[StepRecord], reference: list[StepRecord]) -> float:
    pairs = [(step, same) for step in steps for same in reference if same.iteration == step.iteration]
    assert [step.iteration for step, _ in pairs] == list(range(SAVED, STEPS))
    assert [(s.lr, s.consumed_samples, s.adam_steps) for s, _ in pairs] == [
        (s.lr, s.consumed_samples, s.adam_steps) for _, s in pairs
    ]
    values = [(s.loss, r.loss) for s, r in pairs] + [(s.grad_norm, r.grad_norm) for s, r in pairs]
    return max(abs(a - b) / abs(b) for a, b in values if a is not None and b is not None)


@pytest.fixture(scope="module")
def reference(ranks: RankPool) -> list[StepRecord]:
    return steps_with_loss(ranks.pretrain(2, small()))


@pytest.fixture(scope="module")
def checkpoint(ranks: RankPool, reference: list[StepRecord]) -> Path:
    directory, records = save(ranks, small(), mend_checkpoints, count_managers)
    assert losses(records) == [step.loss for step in reference[:SAVED]]
    assert [record.extra["managers"] for record in records] == [0, 0]
    return directory


def test_with_all_mends_another_layout_goes_on_where_the_first_stopped(
    ranks: RankPool, checkpoint: Path, reference: list[StepRecord]
) -> None:
    records = load(ranks, small(pp=2), checkpoint)
    assert largest_difference(steps_with_loss(records), reference) < ROUNDING


def test_queue_a_save_starts_no_manager_process(ranks: RankPool, checkpoint: Path) -> None:
    # With the mend: the fixture asserts none.
    _, records = save(ranks, small(), *all_but("checkpoint_queue"), count_managers)
    assert [record.extra["managers"] for record in records] == [1, 1]


def test_adam_state_a_fresh_optimizer_can_load(ranks: RankPool, checkpoint: Path) -> None:
    with pytest.raises(RankFailure, match=r"AssertionError: \n[\s\S]*assert len\(steps\) == 1"):
        load(ranks, small(pp=2), checkpoint, *all_but("checkpoint_adam_state"))


def test_step_the_setter_is_not_asked_for_it(ranks: RankPool, checkpoint: Path) -> None:
    with pytest.raises(RankFailure, match="KeyError: 'step'"):
        load(ranks, small(pp=2), checkpoint, *all_but("checkpoint_step"))


def test_step_alias_every_parameter_counts_its_own(ranks: RankPool, checkpoint: Path) -> None:
    records = load(ranks, small(pp=2), checkpoint, *all_but("checkpoint_step_alias"))
    (wrong,) = records[0].steps[0].adam_steps
    assert wrong > SAVED + 1  # one for each parameter of the rank


def test_bucket_padding_moments_are_saved_at_the_right_offsets(ranks: RankPool) -> None:
    reference = steps_with_loss(ranks.pretrain(2, bucketed()))
    right, _ = save(ranks, bucketed())
    wrong, _ = save(ranks, bucketed(), *all_but("checkpoint_bucket_padding"))
    assert largest_difference(steps_with_loss(load(ranks, bucketed(), right)), reference) < ROUNDING
    assert largest_difference(steps_with_loss(load(ranks, bucketed(), wrong)), reference) > 100 * ROUNDING


def test_chained_groups_two_optimizers_are_loaded_by_one(ranks: RankPool) -> None:
    reference = steps_with_loss(ranks.pretrain(2, moe(ep=2)))
    directory, _ = save(ranks, moe(ep=2))
    assert largest_difference(steps_with_loss(load(ranks, moe(ep=1), directory)), reference) < 2 * ROUNDING
    with pytest.raises(RankFailure, match="KeyError: 'optimizer'"):
        load(ranks, moe(ep=1), directory, *all_but("checkpoint_chained_groups"))
