"""What `make demo` concludes from two finished runs: table of switches, curves, verdict.

Reads only what the runs wrote (event files, `switches.jsonl`) and imports nothing of the project, so that it can't
repeat a mistake of it.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

TOLERANCE = 1e-5
"""Largest relative difference of two fp32 losses that is rounding; a lost or misplaced value changes them far more."""

TRAIN_TAG = "lm loss"
VALIDATION_TAG = "lm loss validation"


class ReportError(Exception):
    """The runs did not leave what a comparison needs."""


Series = Mapping[tuple[int, int], float]
"""(iteration, how many values were logged for it before) to value: the end of a run evaluates several times."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of one run, as exact as the float32 that Megatron logged."""

    train: Series
    validation: Series = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Largest relative difference of two runs and the iteration where it is; `values` were compared."""

    worst: float
    iteration: int
    values: int


def read_losses(directory: Path) -> Losses:
    """Read training and validation losses from TensorBoard's event files.

    Raises:
        ReportError: There are none, or an iteration was trained twice.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    if TRAIN_TAG not in tags:
        raise ReportError(f"no scalar {TRAIN_TAG!r} under {directory}; found {tags}")

    def series(tag: str) -> dict[tuple[int, int], float]:
        values: dict[tuple[int, int], float] = {}
        count: Counter[int] = Counter()
        for event in events.Scalars(tag) if tag in tags else ():
            values[event.step, count[event.step]] = event.value
            count[event.step] += 1
        return values

    train = series(TRAIN_TAG)
    repeated = [iteration for iteration, before in train if before]
    if repeated:
        raise ReportError(f"{TRAIN_TAG!r} was logged more than once at iterations {repeated[:10]} under {directory}")
    return Losses(train, series(VALIDATION_TAG))


def read_switches(path: Path) -> list[dict[str, Any]]:
    """Return the records of `switches.jsonl`, none where there is no file; an unfinished last line is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]


def compare(one: Series, other: Series) -> Comparison:
    """Compare the losses of two runs at every iteration.

    Raises:
        ReportError: They don't have the same iterations, or there are none.
    """
    if not one or one.keys() != other.keys():
        apart = sorted({iteration for iteration, _ in one.keys() ^ other.keys()})
        raise ReportError(
            f"the runs logged different iterations: {len(one)} and {len(other)}, not shared: {apart[:10]}"
        )

    worst = max(one, key=lambda key: relative_difference(one[key], other[key]))
    return Comparison(relative_difference(one[worst], other[worst]), worst[0], len(one))


def relative_difference(value: float, reference: float) -> float:
    """Return |value - reference| / |reference|, infinite where that is no number."""
    difference = abs(value - reference) / max(abs(reference), 1e-30)
    return difference if math.isfinite(difference) else math.inf


def failures(switches: Sequence[Mapping[str, Any]], expected: int, differences: Mapping[str, Comparison]) -> list[str]:
    """Return why the demo failed, one sentence each; none where it succeeded."""
    found = []
    if len(switches) != expected:
        found.append(f"the schedule has {expected} switches, {len(switches)} were recorded")
    for record in switches:
        name = f"switch at iteration {record.get('iteration')}"
        if record.get("outcome") != "committed":
            found.append(f"{name} was {record.get('outcome')}: {record.get('error')}")
        if record.get("error"):
            found.append(f"{name} has an error: {record['error']}")
        # A digest that disagrees aborts the switch, so a committed one with this mode has agreed.
        if record.get("verify") not in ("digest", "full"):
            found.append(f"{name} was not checked: verify is {record.get('verify')!r}")
        moved, minimum = record.get("moved_bytes"), record.get("minimum_bytes")
        if moved is None or moved != minimum:
            found.append(f"{name} moved {moved} bytes, the minimum is {minimum}")
    for name, difference in differences.items():
        if not difference.worst <= TOLERANCE:
            found.append(
                f"{name} losses differ by {difference.worst:.2e} relative at iteration {difference.iteration}, "
                f"more than {TOLERANCE:.0e}"
            )
    return found


def size(value: object) -> str:
    """Return bytes for a reader: `1.5 MB`."""
    if not isinstance(value, int | float):
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def seconds(value: object) -> str:
    """Return seconds for a reader."""
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def switch_line(record: Mapping[str, Any]) -> str:
    """Return one switch as one line for the progress display."""
    return (
        f"iteration {record.get('iteration')}: {record.get('from')} -> {record.get('to')} {record.get('outcome')}, "
        f"stall {seconds(record.get('stall_s'))} s, moved {size(record.get('moved_bytes'))}"
    )


def switch_table(switches: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of switches; narrow enough for 80 columns."""
    table = Table(title="switches", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("at", "from", "to"):
        table.add_column(heading)
    table.add_column("outcome", no_wrap=True)
    for heading in ("prepare\nseconds", "stall\nseconds", "moved", "least\npossible", "verify"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in switches:
        table.add_row(
            str(record.get("iteration")),
            str(record.get("from")),
            str(record.get("to")),
            str(record.get("outcome")),
            seconds(record.get("prepare_s")),
            seconds(record.get("stall_s")),
            size(record.get("moved_bytes")),
            size(record.get("minimum_bytes")),
            str(record.get("verify")),
        )
    return table


def plot(switched: Losses, unchanged: Losses, switches: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw both curves, the switches as vertical lines with the layouts between them, and the difference below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 6.5), height_ratios=(3, 1))
    keys = sorted(switched.train)
    steps = [iteration for iteration, _ in keys]
    above.plot(steps, [unchanged.train[key] for key in keys], color="0.6", linewidth=5, label="never switched")
    above.plot(steps, [switched.train[key] for key in keys], color="tab:red", linewidth=1.3, label="switched")
    evaluated = sorted(key for key in switched.validation if key[1] == 0)
    if evaluated:
        values = [switched.validation[key] for key in evaluated]
        above.plot([iteration for iteration, _ in evaluated], values, "k^", label="switched, validation")
    difference = [relative_difference(switched.train[key], unchanged.train[key]) for key in keys]
    below.plot(steps, difference, color="tab:red", linewidth=1)
    below.axhline(TOLERANCE, color="0.4", linestyle=":", label=f"limit {TOLERANCE:.0e}")
    below.set_yscale("symlog", linthresh=1e-8)
    below.set_ylim(0, TOLERANCE * 10)
    for axes in (above, below):
        for record in switches:
            axes.axvline(record["iteration"] + 0.5, color="tab:blue", linestyle="--", linewidth=1)
        axes.legend(loc="upper right", fontsize=8)
    borders = [steps[0], *(record["iteration"] + 0.5 for record in switches), steps[-1]]
    layouts = [switches[0]["from"], *(record["to"] for record in switches)] if switches else []
    for layout, left, right in zip(layouts, borders, borders[1:], strict=False):
        above.text(
            (left + right) / 2,
            1.02,
            textwrap.fill(layout, 90 // len(layouts)),
            ha="center",
            fontsize=9,
            color="tab:blue",
            transform=above.get_xaxis_transform(),
        )
    above.set_ylabel("lm loss")
    below.set_ylabel("relative difference")
    below.set_xlabel("iteration")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def report(output: Path, schedule: Path, console: Console) -> int:
    """Compare `output/switched` with `output/unchanged`, show what came out, and return the exit code.

    Raises:
        ReportError: A run did not leave what the comparison needs.
    """
    switched, unchanged = (read_losses(output / side / "tensorboard") for side in ("switched", "unchanged"))
    switches = read_switches(output / "switched" / "dynatrain" / "switches.jsonl")
    expected = len(yaml.safe_load(schedule.read_text(encoding="utf-8"))["switches"])
    differences = {
        "training": compare(switched.train, unchanged.train),
        "validation": compare(switched.validation, unchanged.validation),
    }
    picture = output / "losses.png"
    plot(switched, unchanged, switches, picture)
    console.print(switch_table(switches), soft_wrap=False)
    for name, difference in differences.items():
        console.print(
            f"{name} losses: {difference.values} compared, largest relative difference {difference.worst:.2e} "
            f"at iteration {difference.iteration}",
            highlight=False,
        )
    console.print(f"curves: {picture}", highlight=False)
    found = failures(switches, expected, differences)
    for reason in found:
        console.print(f"  {reason}", style="red", highlight=False, markup=False)
    if found:
        console.print("[bold red]FAILED[/] the switched run is not the same training as the unchanged one")
        return 1
    console.print(
        f"[bold green]OK[/] {len(switches)} switches committed and checked, bytes moved are the minimum, "
        f"losses agree within {TOLERANCE:.0e}",
        highlight=False,
    )
    return 0
