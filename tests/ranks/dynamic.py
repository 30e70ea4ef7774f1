"""Runs whose layout changes, for tests: a schedule file, the flags, the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_dynatrain.records import FILE_NAME, SwitchRecord, read_records
from tests.ranks.hooks import dynamic
from tests.ranks.pool import RankPool
from tests.ranks.records import PretrainRecord, StepRecord, steps_with_loss

Layout = Mapping[str, object]


def layout_keys(*, tp: int = 1, pp: int = 1, sp: bool = False, **others: object) -> dict[str, object]:
    """Return a layout as a schedule writes it; every key named, so that nothing is inherited."""
    return {"tp": tp, "pp": pp, "sequence_parallel": sp, **others}


@dataclass(frozen=True)
class SwitchedRun:
    """What a run left: the records of each rank, its steps in order and its switches."""

    ranks: Sequence[PretrainRecord]
    steps: Sequence[StepRecord]
    switches: Sequence[SwitchRecord]


def all_steps(records: Sequence[PretrainRecord]) -> list[StepRecord]:
    """Return one record per step, with its loss, whichever rank had it: the last stage changes with the layout."""
    found = {step.iteration: step for record in records for step in record.steps if step.loss is not None}
    return [found[iteration] for iteration in sorted(found)]


def dynamic_flags(
    directory: Path,
    switches: Mapping[int, Layout],
    *,
    verify: str = "digest",
    timeout: float = 60,
    ahead: int = 20,
) -> list[str]:
    """Write a schedule into a directory and return the flags that use it."""
    directory.mkdir(parents=True, exist_ok=True)
    schedule = directory / "schedule.yaml"
    entries = [{"at_iteration": iteration, "to": dict(layout)} for iteration, layout in sorted(switches.items())]
    schedule.write_text(yaml.safe_dump({"version": 1, "switches": entries}))
    return [
        "--dynamic-parallelism",
        "--dynamic-parallelism-schedule",
        str(schedule),
        "--dynamic-parallelism-dir",
        str(directory / "reports"),
        "--dynamic-parallelism-verify",
        verify,
        "--dynamic-parallelism-timeout",
        str(timeout),
        "--dynamic-parallelism-prepare-ahead",
        str(ahead),
    ]


def run_switched(
    ranks: RankPool,
    world: int,
    argv: Sequence[str],
    switches: Mapping[int, Layout],
    *,
    hooks: Sequence[Callable[..., None]] = (),
    verify: str = "digest",
    timeout: float = 60,
    ahead: int = 20,
    limit: float = 120,
) -> SwitchedRun:
    """Run `pretrain()` with the plugin and a schedule; hooks run after the plugin is installed.

    `timeout` is that of the waits inside a switch, `limit` that of the whole run, both in seconds; `ahead` are the
    steps before a switch at which its preparation begins.
    """
    directory = ranks.scratch("dynamic")
    flags = dynamic_flags(directory, switches, verify=verify, timeout=timeout, ahead=ahead)
    records = ranks.pretrain(world, [*argv, *flags], hooks=(dynamic, *hooks), timeout=limit)
    reports = directory / "reports"
    switched = read_records(reports) if (reports / FILE_NAME).exists() else ()
    return SwitchedRun(records, all_steps(records), switched)


__all__ = ["SwitchedRun", "all_steps", "dynamic_flags", "layout_keys", "run_switched", "steps_with_loss"]
