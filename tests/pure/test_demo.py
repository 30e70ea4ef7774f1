"""How the demo launches its two runs and what it does with one that fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from demo import ROOT, SideFailedError, demo_files, log_excerpt, read_flags, run_side, side_command, side_environment

LINE = "iteration {0:8d}/       3 | consumed samples: 8 | lm loss: {1:.6E} | loss scale: 1.0 |"


def run(folder: Path, program: str, timeout: float = 30.0) -> str:
    console = Console(record=True, width=200)
    run_side("side", [sys.executable, "-c", program], folder, console, timeout)
    return console.export_text()


def test_flags_are_split_without_comments(tmp_path: Path) -> None:
    (tmp_path / "flags").write_text("# a comment\n--one 1 --two  # another\n\n--three 'a b'\n")
    assert read_flags(tmp_path / "flags") == ["--one", "1", "--two", "--three", "a b"]


@pytest.mark.parametrize(("name", "output"), [("demo", "demo-out"), ("demo_moe", "demo-moe-out")])
def test_a_demo_is_named_by_its_files(name: str, output: str) -> None:
    files = demo_files(name)
    assert files.flags.is_file()
    assert files.schedule.is_file()
    assert files.output == ROOT / output
    assert f"/{output}/" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.parametrize("name", ["demo", "demo_moe"])
def test_both_runs_have_the_same_flags_but_for_the_plugin(name: str, tmp_path: Path) -> None:
    flags = read_flags(demo_files(name).flags)
    with_plugin = side_command(flags, tmp_path / "corpus", tmp_path, tmp_path / "schedule.yaml")
    without = side_command(flags, tmp_path / "corpus", tmp_path, None)
    assert with_plugin[: len(without)] == without
    assert with_plugin[len(without)] == "--dynamic-parallelism"
    assert not any("dynamic-parallelism" in part for part in without)
    assert with_plugin[with_plugin.index("--dynamic-parallelism-verify") + 1] == "digest"


def test_runs_see_no_gpu() -> None:
    environment = side_environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "1"


def test_progress_and_log(tmp_path: Path) -> None:
    shown = run(tmp_path, f"print({LINE.format(1, 5.5)!r}); print('noise'); print({LINE.format(10, 4.25)!r})")
    assert "side: loss 5.5000  iteration 1/3" in shown
    assert "side: loss 4.2500  iteration 10/3" in shown
    assert "noise" in (tmp_path / "log.txt").read_text()


def test_switches_are_shown_as_they_are_recorded(tmp_path: Path) -> None:
    program = f"""
import json, pathlib
folder = pathlib.Path({str(tmp_path / "dynatrain")!r}); folder.mkdir()
record = dict(iteration=20, outcome="committed", stall_s=0.25, moved_bytes=1500) | {{"from": "tp2 dp2", "to": "dp4"}}
(folder / "switches.jsonl").write_text(json.dumps(record) + "\\n")
print({LINE.format(1, 5.5)!r})
"""
    assert "iteration 20: tp2 dp2 -> dp4 committed, stall 0.250 s, moved 1.50 kB" in run(tmp_path, program)


def test_nothing_of_an_earlier_run_is_left(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.old").write_text("old")
    run(tmp_path, "pass")
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    program = "import sys; print('[rank1]: ValueError: bad plan'); print('x\\n' * 60 + 'summary'); sys.exit(3)"
    with pytest.raises(SideFailedError, match=r"side: exit code 3; see .*log.txt:\n\[rank1\]: ValueError: bad plan$"):
        run(tmp_path, program)


def test_a_log_without_a_reason_shows_its_end() -> None:
    assert log_excerpt([str(number) for number in range(100)], most=3) == ["97", "98", "99"]


def test_a_run_past_its_time_is_killed_with_its_children(tmp_path: Path) -> None:
    program = f"""
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    with pytest.raises(SideFailedError, match="killed after 2 s"):
        run(tmp_path, program, timeout=2.0)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody waited for yet doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
    finally:
        os.sched_yield()
