"""Train a small GPT on 4 CPU ranks through changes of layout, then without, and compare: `make demo`, `make demo-moe`.

A demo is a name: its flags are `configs/models/NAME.args`, its schedule is `configs/schedules/NAME.yaml`.
Both runs go through the plugin's runner with the same flags; only the second has no `--dynamic-parallelism`. Exits
with 0 only if every switch committed and checked, no byte crossed needlessly and the losses agree.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import demo_report

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) .*?lm loss: ([-+.\deEnaif]+)")
REASON = re.compile(r"^(\[rank\d+\]: )?[\w.]*(Error|Exception)\b|\[dynatrain\]")


class SideFailedError(Exception):
    """One of the two runs did not end with exit code 0."""


class DemoFiles(NamedTuple):
    """Where a demo's flags and schedule are, and where it writes."""

    flags: Path
    schedule: Path
    output: Path


def demo_files(name: str) -> DemoFiles:
    """Return the files of a demo by its name."""
    configs = ROOT / "configs"
    return DemoFiles(
        configs / "models" / f"{name}.args",
        configs / "schedules" / f"{name}.yaml",
        ROOT / f"{name.replace('_', '-')}-out",
    )


def read_flags(path: Path) -> list[str]:
    """Return the flags of a file of flags; `#` starts a comment."""
    return shlex.split(path.read_text(encoding="utf-8"), comments=True)


def side_command(flags: Sequence[str], corpus: Path, directory: Path, schedule: Path | None) -> list[str]:
    """Return the launch line of one run; without a schedule the plugin stays off."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "megatron_dynatrain.run", str(ROOT / "scripts" / "pretrain_gpt.py"), *flags]
    command += ["--data-path", str(corpus), "--data-cache-path", str(corpus.parent / "cache")]
    command += ["--save", str(directory / "checkpoints"), "--tensorboard-dir", str(directory / "tensorboard")]
    if schedule is not None:
        command += ["--dynamic-parallelism", "--dynamic-parallelism-schedule", str(schedule)]
        command += ["--dynamic-parallelism-verify", "digest", "--dynamic-parallelism-dir", str(directory / "dynatrain")]
    return command


def side_environment() -> dict[str, str]:
    """Return the environment of a run: CPU only, one thread a rank, gloo over loopback."""
    fixed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **fixed}


def run_side(name: str, command: Sequence[str], directory: Path, console: Console, timeout: float) -> float:
    """Run one side in a fresh directory while its progress is shown; returns its seconds.

    Args:
        name: How the progress line calls it.
        command: Launch line.
        directory: Emptied first, so that no old event file or record can be taken for a new one. Gets `log.txt`.
        console: Where progress goes: a bar on a terminal, else a line every tenth iteration.
        timeout: Seconds after which the run is killed.

    Raises:
        SideFailedError: It failed or ran out of time; with the end of its log.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    started = time.monotonic()
    log = directory / "log.txt"
    with log.open("w", encoding="utf-8") as out, _process(command, timeout) as (process, timed_out):
        watch(process, out, name, directory / "dynatrain" / "switches.jsonl", console)
        code = process.wait()
    if timed_out.is_set() or code != 0:
        what = f"killed after {timeout:.0f} s" if timed_out.is_set() else f"exit code {code}"
        why = "\n".join(log_excerpt(log.read_text(encoding="utf-8", errors="replace").splitlines()))
        raise SideFailedError(f"{name}: {what}; see {log}:\n{why}")
    return time.monotonic() - started


def log_excerpt(lines: Sequence[str], most: int = 12) -> list[str]:
    """Return the lines that say why a run failed: errors and messages of the plugin, else the end of the log.

    The end alone is the launcher's summary, which names the rank and not the reason.
    """
    telling = [line for line in lines if REASON.search(line) and "ChildFailedError" not in line]
    return telling[-most:] or list(lines[-most:])


@contextmanager
def _process(command: Sequence[str], timeout: float) -> Iterator[tuple[subprocess.Popen[str], threading.Event]]:
    """Start the command in a process group of its own, which is gone on exit from the block, whatever happened."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=side_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timed_out = threading.Event()

    def kill() -> None:
        timed_out.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    try:
        yield process, timed_out
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def watch(process: subprocess.Popen[str], out: TextIO, name: str, records: Path, console: Console) -> None:
    """Copy the run's output to its log and show where it is, until it closes its output."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    seen = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{name}: starting {RANKS} ranks", total=None)
        for line in process.stdout or ():
            out.write(line)
            out.flush()
            found = ITERATION.search(line)
            if found is None:
                continue
            for record in demo_report.read_switches(records)[seen:]:
                seen += 1
                progress.console.print(f"  {demo_report.switch_line(record)}", highlight=False, markup=False)
            step, total = int(found[1]), int(found[2])
            text = f"{name}: loss {float(found[3]):.4f}"
            progress.update(task, description=text, completed=step, total=total)
            if not console.is_terminal and (step == 1 or step % 10 == 0):
                console.print(f"{text}  iteration {step}/{total}", highlight=False)


def build_corpus(prefix: Path, console: Console) -> None:
    """Build the corpus in a process of its own: this one has no need of torch."""
    console.print("building the corpus from the standard library's source files", highlight=False)
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_corpus.py"), "--output", str(prefix)],
        check=True,
        stderr=subprocess.DEVNULL if console.is_terminal else None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare a run that changes its layout with one that does not.")
    parser.add_argument("name", nargs="?", default="demo", help="names the files of flags and schedule, and the output")
    parser.add_argument("--output", type=Path, help="folder for everything written; default: NAME-out")
    parser.add_argument("--schedule", type=Path, help="default: configs/schedules/NAME.yaml")
    parser.add_argument("--flags", type=Path, help="Megatron flags; default: configs/models/NAME.args")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each of the two runs")
    options = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # leave through the blocks that end the ranks
        signal.signal(number, lambda *_: sys.exit(1))
    files = demo_files(options.name)
    schedule_file = (options.schedule or files.schedule).resolve()
    console = Console(soft_wrap=True)
    output = (options.output or files.output).resolve()
    corpus = output / "corpus" / "stdlib"
    try:
        build_corpus(corpus, console)
        flags = read_flags(options.flags or files.flags)
        for name, schedule in (("switched", schedule_file), ("unchanged", None)):
            command = side_command(flags, corpus, output / name, schedule)
            seconds = run_side(name, command, output / name, console, options.timeout)
            console.print(f"{name}: done in {seconds:.0f} s, log in {output / name / 'log.txt'}", highlight=False)
        return demo_report.report(output, schedule_file, console)
    except (SideFailedError, demo_report.ReportError, subprocess.CalledProcessError) as error:
        console.print(f"[bold red]FAILED[/] {rich_escape(str(error))}", highlight=False)
        return 1


def rich_escape(text: str) -> str:
    """Return text that rich prints as it is."""
    return text.replace("[", r"\[")


if __name__ == "__main__":
    raise SystemExit(main())
