"""`pretrain()` on some of its ranks: any may leave, wait, and come back; the others train on as if nothing was."""

from __future__ import annotations

from tests.ranks.dynamic import all_steps, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool

ROUNDING = 1e-6  # relative: fp32, other order of summation
SWITCHES = {
    4: layout_keys(tp=2, ranks=[1, 3]),  # the first rank leaves, and one of the middle
    9: layout_keys(pp=2, ranks=[3, 0, 1, 2]),
    13: layout_keys(ranks=[2, 1]),
    16: layout_keys(tp=2, sp=True, ranks=[0, 2]),  # one leaves and one comes in a single switch
}
ITERATIONS = 20


def _flags(ranks: RankPool) -> list[str]:
    saved = f"--save {ranks.scratch('save')} --save-interval 6 --ckpt-format torch_dist"
    extra = f"--eval-iters 1 --eval-interval 5 {saved} --tensorboard-dir {ranks.scratch('tensorboard')}"
    return gpt_args(tp=2, layers=4, hidden=32, seq=32, global_batch=8, train_iters=ITERATIONS, extra=extra)


def test_ranks_leave_and_come_back_inside_pretrain(ranks: RankPool) -> None:
    never = all_steps(ranks.pretrain(4, _flags(ranks)))
    run = run_switched(ranks, 4, _flags(ranks), SWITCHES, ahead=3)
    assert [(record.outcome, record.error) for record in run.switches] == [("committed", None)] * len(SWITCHES)
    assert [record.iteration for record in run.switches] == list(SWITCHES)
    assert all(record.moved_bytes == record.minimum_bytes for record in run.switches)
    # A rank outside of the last layout ends with code 0, by itself.
    assert [record.exit_code for record in run.ranks] == [None, 0, None, 0]
    trained = [len(record.steps) for record in run.ranks]
    assert trained == [4 + 4 + 4, 4 + 5 + 4 + 3, 4 + 4 + 3 + 4, 4 + 5 + 4]
    assert len(run.steps) == len(never) == ITERATIONS
    for step, reference in zip(run.steps, never, strict=True):
        assert (step.iteration, step.lr, step.consumed_samples, step.adam_steps) == (
            reference.iteration,
            reference.lr,
            reference.consumed_samples,
            reference.adam_steps,
        )
        assert step.loss is not None
        assert reference.loss is not None
        assert abs(step.loss - reference.loss) <= ROUNDING * reference.loss
