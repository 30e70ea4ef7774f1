"""A switch that fails on one rank fails on all of them, says where and why, and leaves the job as it was."""

from __future__ import annotations

import functools

from tests.ranks import attempts
from tests.ranks.attempts import Attempted, attempted
from tests.ranks.dynamic import SwitchedRun, all_steps, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool

_REFUSED = ["fit", "memory", "groups", "build", "plan", "pairs", "optimizer", "allocate"]
_ABORTED = [
    "transfer/bytes",
    "transfer/window 2",
    "transfer/scalars",
    "verify/streams",
    "verify/digest",
    "verify/return",
    "verify/compare",
]
_WINDOW = 2**17  # bytes; the model moves in several windows of them


def check_unharmed(
    run: SwitchedRun, ranks: RankPool, world: int, argv: list[str], failed: int, *, rounding: float = 1e-6
) -> None:
    """Check that each failed attempt changed nothing, and that the losses are those of a run without any.

    Bit for bit until the attempt that succeeds, `rounding` relative after it: the layouts round in other places.
    """
    for record in run.ranks:
        assert [attempt.changed for attempt in record.extra["attempts"]] == [()] * len(record.extra["attempts"])
    never = all_steps(ranks.pretrain(world, argv))
    assert run.steps[: failed + 1] == never[: failed + 1]  # one step before the first attempt
    for step, reference in zip(run.steps[failed + 1 :], never[failed + 1 :], strict=True):
        assert step.loss is not None
        assert reference.loss is not None
        assert abs(step.loss - reference.loss) <= rounding * reference.loss


def everywhere(run: SwitchedRun) -> list[Attempted]:
    """Return the attempts, after checking that all ranks saw the same."""
    seen = [[(a.kind, a.error) for a in record.extra["attempts"]] for record in run.ranks]
    assert all(of_rank == seen[0] for of_rank in seen)
    assert [record.error is None for record in run.switches] == [kind is None for kind, _ in seen[0]]
    return list(run.ranks[0].extra["attempts"])


def test_an_error_of_one_rank_in_any_phase_is_told_on_every_rank_and_harms_nothing(ranks: RankPool) -> None:
    phases = [f"prepare/{name}" for name in _REFUSED] + _ABORTED
    acts = [functools.partial(attempts.fail_in, phase=phase, rank=1, budget=_WINDOW) for phase in phases]
    argv = gpt_args(tp=2, layers=2, hidden=32, seq=64, global_batch=2, train_iters=len(phases) + 3)
    switches = {number + 1: layout_keys(pp=2) for number in range(len(phases) + 1)}
    run = run_switched(
        ranks,
        2,
        argv,
        switches,
        hooks=(functools.partial(attempted, acts=(*acts, None)),),
        verify="full",
        timeout=4,
        ahead=0,
    )
    *failed, retried = everywhere(run)
    for phase, attempt in zip(phases, failed, strict=True):
        part = phase.split("/")[0]
        assert attempt.kind == ("SwitchRefused" if part == "prepare" else "SwitchAborted")
        assert attempt.error is not None
        assert f"[rank 1, phase {part}]" in attempt.error
        assert f"ValueError: bad plan in {phase}" in attempt.error
    assert retried.kind is None
    check_unharmed(run, ranks, 2, argv, len(phases))


def test_a_rank_that_does_not_come_is_named_within_the_limit_and_harms_nothing(ranks: RankPool) -> None:
    phases = ["prepare/build", "transfer/bytes", "transfer/scalars", "verify/compare"]
    meeting = ranks.scratch("late")
    acts = [
        functools.partial(attempts.late_in, phase=phase, rank=1, meeting=meeting / str(i))
        for i, phase in enumerate(phases)
    ]
    argv = gpt_args(layers=3, hidden=32, seq=64, global_batch=3, train_iters=len(phases) + 3, extra="--vocab-size 95")
    switches = {number + 1: layout_keys(pp=3) for number in range(len(phases) + 1)}
    run = run_switched(
        ranks, 3, argv, switches, hooks=(functools.partial(attempted, acts=(*acts, None)),), timeout=3, ahead=0
    )
    *failed, retried = everywhere(run)
    for phase, attempt in zip(phases, failed, strict=True):
        assert attempt.error is not None
        assert "ranks [1]" in attempt.error, attempt.error
        assert f"phase {phase.split('/')[0]}" in attempt.error
    assert not list(meeting.glob("*/in vain")), "the others were not told within the limit and 10 seconds"
    assert len(list(meeting.glob("*/[012]"))) == 3 * len(phases)
    assert retried.kind is None
    check_unharmed(run, ranks, 3, argv, len(phases))
