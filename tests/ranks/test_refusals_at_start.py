"""A job that can't do what its flags and its schedule say stops before the first step: one message, exit code 1."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path

import pytest

from tests.ranks.context import RankContext
from tests.ranks.gpt_args import checkpoint_args, gpt_args
from tests.ranks.pool import ROOT, RankPool

_SMALL = {"layers": 3, "heads": 3, "hidden": 48, "seq": 32, "global_batch": 4}


@dataclasses.dataclass(frozen=True)
class Stopped:
    """How a process ended: its exit code and what it said on standard error, without its rank."""

    code: object
    error: str


def main(context: RankContext, argv: list[str]) -> Stopped:
    """Run the pretraining script as `python -m megatron_dynatrain.run` does."""
    from megatron_dynatrain import run

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = run.main([str(ROOT / "scripts" / "pretrain_gpt.py"), *argv])
        except SystemExit as end:  # Megatron's own, of --exit-interval
            code = end.code
    lines = [line for line in said.getvalue().splitlines() if "rror" in line or "Traceback" in line]
    mine = f"[dynatrain] rank {context.rank}: "
    assert [line for line in lines if line.startswith("[dynatrain]")] == [
        line for line in lines if line.startswith(mine)
    ]
    return Stopped(code, said.getvalue().replace(mine, ""))


def _stopped(ranks: RankPool, argv: list[str]) -> str:
    """Run on two ranks; return the message after checking that both say the same and end in the same way."""
    first, second = ranks.run(2, main, argv, init_group=False)
    assert first == second
    assert first.code == 1
    assert "Traceback" not in first.error
    return first.error


def _flags(directory: Path, text: str) -> list[str]:
    file = directory / "schedule.yaml"
    file.write_text(text)
    flags = ["--dynamic-parallelism", "--dynamic-parallelism-schedule", str(file)]
    return [*flags, "--dynamic-parallelism-dir", str(directory / "reports")]


def _switch(layout: str, at: str = "at_iteration: 2") -> str:
    return f"version: 1\nswitches:\n  - {{{at}, to: {{{layout}}}}}\n"


_SCHEDULES = {
    "layout_not_dividing_the_world": (
        _switch("tp: 3"),
        ("schedule.yaml:3", "tp 3 x cp 1 x pp 1 = 3 doesn't divide the world size 2"),
    ),
    "heads": (_switch("tp: 2"), ("schedule.yaml:3", "num_attention_heads", "multiple of tp 2", "got: 3")),
    "layers": (_switch("pp: 2"), ("schedule.yaml:3", "3 layers", "pp 2")),
    "batch": (
        _switch("micro_batch_size: 4"),
        ("schedule.yaml:3", "global_batch_size", "micro batch 4 x dp 2", "got: 4"),
    ),
    "unknown_key": (_switch("tp: 1, tensor: 2"), ("schedule.yaml:3", "tensor")),
    "switch_in_the_past": (_switch("tp: 1", at="at_iteration: 0"), ("schedule.yaml:3", "at_iteration", "got: 0")),
    "switch_after_the_end": (_switch("tp: 1", at="at_iteration: 9"), ("schedule.yaml:3", "at_iteration", "got: 9")),
}


@pytest.mark.parametrize("name", _SCHEDULES)
def test_a_schedule_that_does_not_fit_is_refused(ranks: RankPool, tmp_path: Path, name: str) -> None:
    text, words = _SCHEDULES[name]
    message = _stopped(ranks, [*gpt_args(train_iters=4, **_SMALL), *_flags(tmp_path, text)])
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


def test_query_groups_that_no_tensor_parallel_size_divides_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    argv = gpt_args(layers=2, heads=6, gqa=3, hidden=48, global_batch=4, train_iters=4)
    message = _stopped(ranks, [*argv, *_flags(tmp_path, _switch("tp: 2"))])
    assert "schedule.yaml:3" in message
    assert "num_query_groups" in message
    assert "got: 3" in message


def test_all_that_is_wrong_is_told_at_once(ranks: RankPool, tmp_path: Path) -> None:
    text = "version: 1\nswitches:\n  - {at_iteration: 1, to: {tp: 2}}\n  - {at_iteration: 2, to: {pp: 2, tp: 1}}\n"
    message = _stopped(ranks, [*gpt_args(train_iters=4, **_SMALL), *_flags(tmp_path, text)])
    assert "schedule.yaml:3" in message
    assert "schedule.yaml:4" in message


_OPTIONS = {
    "--use-distributed-optimizer": ("", "--use-distributed-optimizer"),
    "--use-megatron-fsdp": ("--use-megatron-fsdp", ""),
    "--use-torch-fsdp2": ("--use-torch-fsdp2", ""),
    "--dataloader-type": ("--dataloader-type external", ""),
}


@pytest.mark.parametrize("flag", _OPTIONS)
def test_an_option_that_cannot_follow_a_switch_is_refused_by_its_name(
    ranks: RankPool, tmp_path: Path, flag: str
) -> None:
    added, dropped = _OPTIONS[flag]
    argv = [word for word in gpt_args(train_iters=4, extra=added, **_SMALL) if word != dropped]
    message = _stopped(ranks, [*argv, *_flags(tmp_path, _switch("pp: 2, first: 1"))])
    assert message.startswith("UnsupportedError: ")
    assert f"{flag} doesn't work with --dynamic-parallelism" in message or f"\n  {flag}: " in message


def test_a_switch_before_the_checkpoint_that_is_loaded_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    argv = gpt_args(train_iters=4, **_SMALL)
    first = ranks.run(2, main, [*argv, *checkpoint_args(save=tmp_path), "--exit-interval", "3"], init_group=False)
    assert [stopped.code for stopped in first] == [0, 0]
    flags = _flags(tmp_path, _switch("pp: 2, first: 1"))
    message = _stopped(ranks, [*argv, *checkpoint_args(load=tmp_path), *flags])
    for word in ("schedule.yaml:3", "the switch is in the past", "more than 3", "got: 2"):
        assert word in message


def test_without_a_switch_nothing_is_refused(ranks: RankPool) -> None:
    assert [stopped.code for stopped in ranks.run(2, main, gpt_args(train_iters=1, **_SMALL), init_group=False)] == [
        0,
        0,
    ]
