"""What preparing in the background gives and costs: the same switches, prepared and unprepared, in one training run.

4 gloo ranks, the model of `--size`; ends with one JSON line. Times are of rank 0, in seconds, medians over the
switches of one direction. Run it on a machine that does nothing else: `python -m benchmarks.elastic`.
"""

from __future__ import annotations

import functools
import json
import statistics
from contextlib import closing
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.clocks import clocked, note_begins
from tests.ranks.dynamic import SwitchedRun, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.hooks import dynamic
from tests.ranks.pool import RankPool

SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 4, "hidden": 64, "seq": 64, "global_batch": 8},
    "60m": {"layers": 8, "hidden": 512, "heads": 8, "seq": 64, "global_batch": 4},
}
EVERY = 12  # steps between two switches
AHEAD = 8  # steps before a switch at which its preparation begins
WARM = 2  # switches that are not counted: the first of each direction


def excess(begins: list[float], spans: list[tuple[float, float]], switches: int) -> list[float]:
    """Return, per preparation, by how much the steps beside it were longer than the median of undisturbed ones."""
    boundaries = {EVERY * (number + 1) for number in range(switches)}
    steps = [(a, b) for index, (a, b) in enumerate(pairwise(begins), start=1) if index not in boundaries]
    beside = [[(a, b) for a, b in steps if b > began and a < ended] for began, ended in spans]
    disturbed = {step for group in beside for step in group}
    median = statistics.median(b - a for a, b in steps[1:] if (a, b) not in disturbed)
    return [sum(b - a - median for a, b in group) for group in beside]


def measure(pool: RankPool, size: str, there: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Go there and back, `rounds` times prepared and as often not; return the figures."""
    prepared = [False] * WARM + [index % 4 < 2 for index in range(4 * rounds)]
    argv = gpt_args(tp=2, **SIZES[size], train_iters=EVERY * (len(prepared) + 1))
    layouts = [layout_keys(**there), layout_keys(tp=2)]
    switches = {EVERY * (n + 1): layouts[n % 2] for n in range(len(prepared))}
    hook = functools.partial(clocked, prepared=prepared)
    run: SwitchedRun = run_switched(pool, 4, argv, switches, hooks=(hook,), ahead=AHEAD, limit=1500)
    assert all(record.outcome == "committed" for record in run.switches), run.switches
    extra = run.ranks[0].extra
    cost = iter(excess(extra["begins"], extra["spans"], len(prepared)))
    rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for index, (record, ahead) in enumerate(zip(run.switches, prepared, strict=True)):
        steps = next(cost) if ahead else 0.0
        if index >= WARM:
            rows[ahead].append({"stall_s": record.stall_s, "steps_s": steps, "transfer_s": record.transfer_s})
    middle = {
        kind: {key: statistics.median(row[key] for row in found) for key in found[0]} for kind, found in rows.items()
    }
    with_it, without = middle[True], middle[False]
    return {
        "size": size,
        "stall_s": with_it["stall_s"],
        "stall_unprepared_s": without["stall_s"],
        "stall_ratio": with_it["stall_s"] / without["stall_s"],
        "steps_excess_s": with_it["steps_s"],
        "cost_ratio": (with_it["steps_s"] + with_it["stall_s"]) / without["stall_s"],
        "transfer_s": with_it["transfer_s"],
        "swap_ms": 1e3 * max(max(record.extra["swaps"][WARM:]) for record in run.ranks),
    }


def plain_steps(pool: RankPool, size: str, steps: int) -> float:
    """Return the ratio of the median step with the plugin, far from any switch, to that without it."""
    argv = gpt_args(tp=2, **SIZES[size], train_iters=steps + 2)
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(4):  # in turns, because the machine is not equally fast all the time
        plugged = turn % 2 == 1
        hooks = (dynamic, note_begins) if plugged else (note_begins,)
        flags = ["--dynamic-parallelism", "--dynamic-parallelism-dir", str(pool.scratch("plain"))] if plugged else []
        records = pool.pretrain(4, [*argv, *flags], hooks=hooks, timeout=600)
        times[plugged] += [b - a for a, b in pairwise(records[0].extra["begins"])][2:]
    return statistics.median(times[True]) / statistics.median(times[False])


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "small",
    rounds: Annotated[int, typer.Option(help="Times there and back, prepared and unprepared each.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of the comparison without switches; 0 leaves it out.")] = 100,
) -> None:
    """Measure, show a table, and print one JSON line last."""
    console = Console(stderr=True)
    with closing(RankPool()) as pool:
        found = {"tp2 dp2 <-> pp2 dp2": measure(pool, size, {"pp": 2}, rounds)}
        found["tp2 dp2 <-> dp4"] = measure(pool, size, {}, rounds)
        plugin = plain_steps(pool, size, steps) if steps else None
    table = Table("figure", *found)
    for key in next(iter(found.values())):
        cells = [row[key] for row in found.values()]
        table.add_row(key, *(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)
    print(json.dumps({"switches": found, "step_ratio_without_switch": plugin}))


if __name__ == "__main__":
    typer.run(main)
