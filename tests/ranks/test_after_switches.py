"""What Megatron does outside the training steps still works after three switches: evaluations, saves, logs, the end."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ranks import checkpoint_bits
from tests.ranks.context import RankContext
from tests.ranks.dynamic import SwitchedRun, layout_keys, run_switched
from tests.ranks.gpt_args import checkpoint_args, gpt_args
from tests.ranks.hooks import mend_checkpoints
from tests.ranks.observe import Evaluation, note_evaluations
from tests.ranks.pool import RankPool
from tests.ranks.records import PretrainRecord, losses

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

WORLD, STEPS, SAVED, EVALUATED = 4, 8, 6, 4
ROUNDING = 1e-6  # relative: fp32, other order of summation
EVALUATE = f"--eval-interval {EVALUATED} --eval-iters 2"
LAST = {"tp": 2, "pp": 2, "sp": True}
SWITCHES = {1: layout_keys(pp=2), 2: layout_keys(), 3: layout_keys(**LAST)}


def argv(extra: str = EVALUATE, **layout: object) -> list[str]:
    sizes = {"layers": 2, "hidden": 32, "seq": 16, "train_iters": STEPS, **layout}
    return gpt_args(extra=extra, **sizes)  # type: ignore[arg-type]


def evaluations(records: list[PretrainRecord]) -> list[Evaluation]:
    """Return the evaluations in order; all ranks that have the loss have the same."""
    by_rank = [record.extra["evaluations"] for record in records if record.extra["evaluations"]]
    assert by_rank
    assert all(seen == by_rank[0] for seen in by_rank)
    return list(by_rank[0])


@pytest.fixture(scope="module")
def switched(ranks: RankPool) -> tuple[SwitchedRun, Path]:
    """A run with three switches, then saves, evaluations and logs under the last layout; and its directory."""
    directory = ranks.scratch("after")
    flags = [*argv(tp=2), *checkpoint_args(save=directory / "saved", interval=SAVED)]
    flags += ["--tensorboard-dir", str(directory / "board")]
    run = run_switched(ranks, WORLD, flags, SWITCHES, hooks=(note_evaluations,))
    assert [(record.iteration, record.outcome) for record in run.switches] == [(at, "committed") for at in SWITCHES]
    return run, directory


def test_evaluations_are_those_of_a_run_that_never_switches(
    ranks: RankPool, switched: tuple[SwitchedRun, Path]
) -> None:
    run, _ = switched
    never = ranks.pretrain(WORLD, argv(tp=2), hooks=(note_evaluations,))
    found, expected = evaluations(list(run.ranks)), evaluations(never)
    assert [e.prefix for e in expected] == [
        "iteration 4",
        "iteration 8",
        "iteration 8 on validation set",
        "iteration 8 on test set",
    ]
    assert [(e.prefix, e.samples) for e in found] == [(e.prefix, e.samples) for e in expected]
    assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], rel=ROUNDING)
    assert len({e.loss for e in expected}) == len(expected)  # another set or other samples would be seen
    assert [step.loss for step in run.steps] == pytest.approx(losses(never), rel=ROUNDING)


def test_a_checkpoint_after_the_switches_loads_without_the_plugin(
    ranks: RankPool, switched: tuple[SwitchedRun, Path]
) -> None:
    run, directory = switched
    saved = directory / "saved"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    again = ranks.scratch("again")
    flags = [*argv(**LAST), *checkpoint_args(load=saved, save=again), "--ckpt-step", str(SAVED)]
    plain = ranks.pretrain(WORLD, flags, hooks=(mend_checkpoints, note_evaluations))
    for rank in range(WORLD):
        assert [step.iteration for step in plain[rank].steps] == [6, 7]
        assert plain[rank].steps == run.ranks[rank].steps[SAVED:]
    assert evaluations(plain) == evaluations(list(run.ranks))[1:]
    (final,) = ranks.run(1, checkpoint_bits.compare, saved, again, init_group=False)
    assert not final.different
    assert final.compared["exp_avg"] > 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ImportWarning")
def test_tensorboard_has_every_step_and_every_switch(switched: tuple[SwitchedRun, Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, directory = switched
    board = EventAccumulator(str(directory / "board")).Reload()
    loss = board.Scalars("lm loss")
    assert [event.step for event in loss] == list(range(1, STEPS + 1))
    assert [event.value for event in loss] == pytest.approx([step.loss for step in run.steps], rel=1e-6)
    assert [event.step for event in board.Scalars("lm loss validation")] == [EVALUATED, STEPS, STEPS, STEPS]
    moved = board.Scalars("dynamic-parallelism/moved-bytes")
    assert [(e.step, e.value) for e in moved] == [(record.iteration, record.moved_bytes) for record in run.switches]
    stalls = board.Scalars("dynamic-parallelism/stall-seconds")
    assert [e.step for e in stalls] == [record.iteration for record in run.switches]
    assert all(e.value > 0 for e in stalls)  # by the clock of the rank that writes
    layouts = board.Tensors("dynamic-parallelism/layout/text_summary")
    shown = [event.tensor_proto.string_val[0].decode() for event in layouts]
    assert shown == ["pp2 dp2", "dp4", "tp2 pp2 sp"]


def test_the_process_ends_with_exit_code_0(ranks: RankPool, switched: tuple[SwitchedRun, Path]) -> None:
    run, _ = switched
    assert [record.exit_code for record in run.ranks] == [None] * WORLD  # `pretrain()` came to its end
    saved = ranks.scratch("exit")
    flags = [*argv("--exit-interval 5", layers=2, tp=2), *checkpoint_args(save=saved)]
    early = run_switched(ranks, 2, flags, {1: layout_keys(pp=2), 2: layout_keys(), 3: layout_keys(tp=2)})
    assert [record.outcome for record in early.switches] == ["committed"] * 3
    assert [record.exit_code for record in early.ranks] == [0, 0]
    assert [step.iteration for step in early.steps] == list(range(5))
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_evaluation_follows_the_micro_batch_size_of_the_layout(ranks: RankPool) -> None:
    # With the launch layout's 4 samples per micro-batch, dp 2 would leave no micro-batch to evaluate.
    extra = "--micro-batch-size 4 --eval-interval 2 --eval-iters 1"
    flags = argv(extra, tp=2, global_batch=4, train_iters=2)
    switches = {1: layout_keys(micro_batch_size=1)}
    found = run_switched(ranks, 2, flags, switches, hooks=(note_evaluations,))
    assert [(s.target, s.outcome) for s in found.switches] == [("dp2", "committed")]
    never = ranks.pretrain(2, flags, hooks=(note_evaluations,))
    losses_found = [(e.prefix, e.loss) for e in evaluations(list(found.ranks))]
    assert [prefix for prefix, _ in losses_found] == [e.prefix for e in evaluations(never)]
    assert [loss for _, loss in losses_found] == pytest.approx([e.loss for e in evaluations(never)], rel=ROUNDING)


def keep_log_lines(run: PretrainRun) -> None:
    """Keep what the last rank logs, in `extra["lines"]`."""
    import megatron.training.training as megatron_training
    from megatron.training import get_args

    lines = run.record.extra.setdefault("lines", [])

    def print_rank_last(line: str) -> None:
        args = get_args()
        if args.rank == args.world_size - 1:
            lines.append(line)

    megatron_training.print_rank_last = print_rank_last


def test_the_mean_loss_in_the_log_is_over_all_its_steps_also_where_another_rank_logs(ranks: RankPool) -> None:
    argv = gpt_args(pp=2, layers=2, hidden=32, seq=32, global_batch=4, train_iters=12, extra="--log-interval 4")
    # The first stage has no losses, and logs after the switch.
    run = run_switched(ranks, 2, argv, {6: layout_keys(tp=2, ranks=[1, 0])}, hooks=(keep_log_lines,))
    found = {}
    for record in run.ranks:
        for line in record.extra["lines"]:
            match = re.search(r"iteration +(\d+)/.*lm loss: ([\d.E+-]+)", line)
            if match:
                found[int(match[1])] = (record.rank, float(match[2]))
    assert {iteration: rank for iteration, (rank, _) in found.items()} == {1: 1, 4: 1, 8: 0, 12: 0}
    means = [step.loss for step in run.steps]
    for iteration in (4, 8, 12):  # the line of the first iteration is an extra one
        assert found[iteration][1] == pytest.approx(sum(means[iteration - 4 : iteration]) / 4, rel=1e-5)


def end_with_a_writer(context: RankContext) -> list[str]:
    """Run a script that raises, in a process that has a writer; return what was asked of the writer."""
    import megatron.training.global_vars as megatron_globals

    from megatron_dynatrain import run

    class Writer:
        asked: list[str] = []  # noqa: RUF012

        def close(self) -> None:
            self.asked.append("close")

    megatron_globals._GLOBAL_TENSORBOARD_WRITER = Writer()
    script = context.tmp / "script.py"
    script.write_text("raise SystemExit(0)\n")
    run.install = lambda: None
    with pytest.raises(SystemExit):
        run.main([str(script)])
    return Writer.asked


def test_a_run_ends_with_its_writer_closed(ranks: RankPool) -> None:
    """Torch keeps events back for up to two minutes, and loses them where the process ends before."""
    assert ranks.run(1, end_with_a_writer, init_group=False) == [["close"]]


def test_the_record_says_where_the_random_streams_come_from(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, layers=2, hidden=32, seq=32, global_batch=4, train_iters=6)
    switches = {2: layout_keys(tp=2, ranks=[1, 0]), 4: layout_keys(pp=2)}
    run = run_switched(ranks, 2, argv, switches)
    assert [record.number for record in run.switches] == [1, 2]
    kept, new = (record.streams for record in run.switches)
    assert kept == "kept by coordinate"
    # The hash of the documented rule, computed here by itself.
    digest = int.from_bytes(hashlib.sha256(b"dynatrain:1234:2").digest()[:8], "little")
    assert new == f"new: base seed {1 + digest % (2**31 - 2**24)} of seed 1234 and switch 2"
