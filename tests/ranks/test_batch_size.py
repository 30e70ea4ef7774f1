"""The global batch size changes inside a run: same samples, losses and learning rates as Megatron's own ways give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megatron_dynatrain.requests import read_status
from tests.ranks.asking import Ask, run_asked
from tests.ranks.context import RankContext
from tests.ranks.dynamic import all_steps, layout_keys, run_switched
from tests.ranks.gpt_args import checkpoint_args, gpt_args
from tests.ranks.hooks import mend_checkpoints
from tests.ranks.pool import RankPool
from tests.ranks.records import StepRecord

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

SEQUENCE = 16
STEPS = f"--step-batch-size-schedule 0:8,{40 * SEQUENCE}:16"
"""Megatron's own: 8 samples an iteration, and 16 from 40 samples on, which is after iteration 5."""

_REPLACED = {"--global-batch-size", "--train-iters", "--lr-warmup-iters", "--lr-decay-iters", "--vocab-size"}


def write_corpus(context: RankContext, prefix: str) -> None:
    """Write 40 documents of 19 bytes: 45 training samples an epoch, so that the shuffle shows how many are used."""
    from build_corpus import write_dataset

    del context
    write_dataset((bytes((17 * number + 5 * place) % 256 for place in range(19)) for number in range(40)), Path(prefix))


@pytest.fixture(scope="module")
def corpus(ranks: RankPool) -> Path:
    prefix = ranks.scratch("batch_size") / "corpus"
    ranks.run(1, write_corpus, str(prefix), init_group=False)
    return prefix


def flags(corpus: Path, batch: str, length: str, **layout: int) -> list[str]:
    """Return flags of a run: `batch` and `length` say how many samples a step and the training have."""
    words = gpt_args(layers=2, hidden=16, seq=SEQUENCE, **layout)
    kept = [word for place, word in enumerate(words) if not {word, words[place - 1]} & _REPLACED]
    kept.remove("--mock-data")
    data = ["--data-path", str(corpus), "--vocab-size", "257", "--data-cache-path", str(corpus.parent / "cache")]
    return [*kept, *data, *batch.split(), *length.split()]


def seen(steps: Sequence[StepRecord]) -> list[tuple[float, ...]]:
    """Return what a step must have in common with another run under the same layout, exactly."""
    return [(step.iteration, step.consumed_samples, step.loss, step.grad_norm, step.lr) for step in steps]


@pytest.fixture(scope="module")
def stepped(ranks: RankPool, corpus: Path) -> list[StepRecord]:
    """Return the steps of Megatron's own step schedule."""
    return all_steps(ranks.pretrain(2, flags(corpus, STEPS, "--train-samples 120 --lr-decay-samples 120")))


def test_a_change_at_samples_is_megatrons_own_step_schedule(
    ranks: RankPool, corpus: Path, stepped: list[StepRecord]
) -> None:
    length = "--train-samples 120 --lr-decay-samples 120"
    run = run_switched(ranks, 2, flags(corpus, "--global-batch-size 8", length), {5: {"global_batch_size": 16}})
    assert [record.outcome for record in run.switches] == ["committed"]
    assert [step.consumed_samples for step in run.steps] == [0, 8, 16, 24, 32, 40, 56, 72, 88, 104]
    assert seen(run.steps) == seen(stepped)


def assert_same_training(steps: Sequence[StepRecord], reference: Sequence[StepRecord]) -> None:
    """Check that steps under other layouts have the samples and rates of a reference, and its losses to rounding."""
    assert [step.iteration for step in steps] == [step.iteration for step in reference]
    assert [step.consumed_samples for step in steps] == [step.consumed_samples for step in reference]
    assert [step.lr for step in steps] == [step.lr for step in reference]
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in reference], rel=1e-6)


def test_layouts_change_under_megatrons_step_schedule_also_after_a_resume(ranks: RankPool, corpus: Path) -> None:
    length = "--train-samples 110 --lr-decay-samples 120"  # the last iteration begins with 104
    reference = all_steps(ranks.pretrain(2, flags(corpus, STEPS, length)))
    assert [step.consumed_samples for step in reference] == [0, 8, 16, 24, 32, 40, 56, 72, 88, 104]
    saved = ranks.scratch("stepped")
    argv = [*flags(corpus, STEPS, length), *checkpoint_args(save=saved, interval=6)]
    run = run_switched(ranks, 2, argv, {3: {"pp": 2}, 7: {"pp": 1}}, hooks=(mend_checkpoints,))
    assert [(record.target, record.outcome) for record in run.switches] == [("pp2", "committed"), ("dp2", "committed")]
    assert_same_training(run.steps, reference)
    # Megatron saves where the batch grows too; a switch alone is no such place
    assert sorted(path.name for path in saved.glob("iter_*")) == [f"iter_{place:07}" for place in (5, 6, 10)]

    argv = [*flags(corpus, STEPS, length, pp=2), *checkpoint_args(load=saved), "--ckpt-step", "6"]
    resumed = run_switched(ranks, 2, argv, {8: {"pp": 1}}, hooks=(mend_checkpoints,))
    assert [(record.target, record.outcome) for record in resumed.switches] == [("dp2", "committed")]
    assert_same_training(resumed.steps, reference[6:])


def test_layouts_change_under_a_step_schedule_of_a_training_in_iterations(
    ranks: RankPool, corpus: Path, stepped: list[StepRecord]
) -> None:
    # Megatron's rates are of 60 iterations of micro-batch x dp = 2 samples; the samples that it asks for are only 20.
    argv = flags(corpus, STEPS, "--train-iters 10 --lr-decay-iters 60")
    run = run_switched(ranks, 2, argv, {3: {"pp": 2}, 5: {"pp": 1}})  # the second at the very step
    assert [(record.target, record.outcome) for record in run.switches] == [("pp2", "committed"), ("dp2", "committed")]
    assert_same_training(run.steps, stepped)


def test_a_length_in_iterations_uses_each_sample_once_also_under_another_layout(ranks: RankPool, corpus: Path) -> None:
    reference = all_steps(ranks.pretrain(2, flags(corpus, STEPS, "--train-samples 120 --lr-decay-samples 80")))
    argv = flags(corpus, "--global-batch-size 8", "--train-iters 10 --lr-decay-iters 10")
    run = run_switched(ranks, 2, argv, {5: layout_keys(pp=2, global_batch_size=16)})
    assert [(record.target, record.outcome) for record in run.switches] == [("pp2", "committed")]
    assert_same_training(run.steps, reference)


def test_a_request_is_checked_for_the_batch_sizes_to_come(ranks: RankPool, corpus: Path) -> None:
    argv = flags(corpus, STEPS, "--train-samples 392 --lr-decay-samples 392")
    asks = [Ask(2, {"micro_batch_size": 8}), Ask(5, {"global_batch_size": 32}), Ask(6, {"micro_batch_size": 8})]
    run = run_asked(ranks, 2, argv, asks)
    assert [reply.stage for reply in run.replies] == ["refused", "refused", "committed"]
    assert "a multiple of micro batch 8 x dp 2 = 16; got: 8 (step 0:8 of" in (run.replies[0].error or "")
    assert "global_batch_size in layouts or --step-batch-size-schedule, not both" in (run.replies[1].error or "")
    assert [step.consumed_samples for step in run.steps] == [*range(0, 40, 8), *range(40, 392, 16)]
    status = read_status(run.directory)
    assert (status.micro_batch_size, status.global_batch_size) == (8, 16)


def test_a_smaller_batch_is_a_relaunch_with_a_smaller_batch(ranks: RankPool, corpus: Path) -> None:
    length = "--train-samples 112 --lr-decay-samples 112"
    saved = ranks.scratch("checkpoint")
    mend = (mend_checkpoints,)
    large = [*flags(corpus, "--global-batch-size 16", length), *checkpoint_args(save=saved, interval=2)]
    first = all_steps(ranks.pretrain(2, [*large, "--exit-interval", "4"], hooks=mend))
    small = [*flags(corpus, "--global-batch-size 8", length), *checkpoint_args(load=saved)]
    second = all_steps(ranks.pretrain(2, [*small, "--exit-interval", "10"], hooks=mend))

    argv = flags(corpus, "--global-batch-size 16", length)
    run = run_switched(ranks, 2, argv, {4: {"global_batch_size": 8}})
    assert seen(run.steps) == seen([*first, *second])
    assert len(run.steps) == 10  # 4 x 16 + 6 x 8 samples

    # 7 x 16 samples of decay; the length is counted from the 32 samples that the checkpoint says are consumed
    length = "--train-iters 10 --lr-decay-iters 7 --override-opt-param-scheduler --ckpt-step 2"
    argv = [*flags(corpus, "--global-batch-size 16", length), *checkpoint_args(load=saved)]
    resumed = run_switched(ranks, 2, argv, {4: {"global_batch_size": 8}})
    assert [(record.outcome, record.error) for record in resumed.switches] == [("committed", None)]
    assert seen(resumed.steps) == seen(run.steps[2:])


def fail_switches(run: PretrainRun) -> None:
    """Let every switch fail while it is planned."""
    from megatron_dynatrain.training.job import DynamicJob

    def bad(phase: str) -> None:
        if phase == "prepare/plan":
            raise ValueError("bad plan")

    started = DynamicJob.__post_init__

    def start(job: DynamicJob) -> None:
        started(job)
        job.switcher.on_phase = bad

    run.record.extra["fault"] = "prepare/plan"
    DynamicJob.__post_init__ = start  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("length", "batch", "steps"),
    [
        ("--train-samples 120 --lr-decay-samples 120", 16, 15),  # 15 x 8 samples, not 5 x 8 + 5 x 16
        ("--train-iters 10 --lr-decay-iters 10", 4, 7),  # no more than 5 x 8 + 5 x 4 = 60 samples were asked for
        ("--train-iters 10 --lr-decay-iters 10", 16, 10),
    ],
)
def test_a_training_whose_batch_could_not_change_ends_with_its_samples(
    ranks: RankPool, corpus: Path, length: str, batch: int, steps: int
) -> None:
    argv = flags(corpus, "--global-batch-size 8", length)
    run = run_switched(ranks, 2, argv, {5: {"global_batch_size": batch}}, hooks=(fail_switches,))
    assert [record.outcome for record in run.switches] == ["refused"]
    assert [step.consumed_samples for step in run.steps] == list(range(0, 8 * steps, 8))


@pytest.mark.parametrize("ahead", [0, 2])
def test_blended_data_are_opened_by_ranks_that_did_not_read_before(ranks: RankPool, corpus: Path, ahead: int) -> None:
    """Megatron opens the parts of a blend in a pool of threads; rank 1 reads under dp2 only."""
    argv = flags(corpus, "--global-batch-size 8", "--train-iters 6", tp=2)
    place = argv.index("--data-path")
    argv[place + 1 : place + 2] = ["0.5", str(corpus), "0.5", str(corpus), "--split", "100,0,0"]
    never = all_steps(ranks.pretrain(2, argv))
    run = run_switched(ranks, 2, argv, {4: layout_keys()}, ahead=ahead)
    assert [(record.outcome, record.error) for record in run.switches] == [("committed", None)]
    assert run.steps[:4] == never[:4]
    assert [step.loss for step in run.steps] == pytest.approx([step.loss for step in never], rel=1e-6)
