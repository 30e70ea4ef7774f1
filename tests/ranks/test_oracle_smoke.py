"""The main job at its smallest: a run switches twice, each switch commits, the losses are the never-switched ones."""

from __future__ import annotations

from tests.ranks.dynamic import all_steps, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool


def test_two_switches_of_a_small_job(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, layers=2, train_iters=6)
    run = run_switched(ranks, 2, argv, {2: layout_keys(pp=2), 4: layout_keys()})
    assert [(r.iteration, r.source, r.target, r.outcome) for r in run.switches] == [
        (2, "tp2", "pp2", "committed"),
        (4, "pp2", "dp2", "committed"),
    ]
    assert all(r.moved_bytes == r.minimum_bytes > 0 for r in run.switches)
    never = all_steps(ranks.pretrain(2, argv))
    assert len(run.steps) == len(never) == 6
    for step, reference in zip(run.steps, never, strict=True):
        assert step.loss is not None
        assert reference.loss is not None
        assert abs(step.loss - reference.loss) <= 1e-6 * reference.loss
        assert (step.lr, step.consumed_samples, step.adam_steps) == (
            reference.lr,
            reference.consumed_samples,
            reference.adam_steps,
        )
