"""Runs that are asked for another layout while they train: hooks that ask at a step and wait for what becomes of it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dynatrain.records import SwitchRecord, read_records
from megatron_dynatrain.requests import FINAL, LayoutRequest, Reply, Spool
from tests.ranks.dynamic import all_steps
from tests.ranks.hooks import dynamic
from tests.ranks.pool import RankPool
from tests.ranks.records import PretrainRecord, StepRecord

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

_PATIENCE_S = 60


@dataclass(frozen=True)
class Ask:
    """Something that is asked for by rank 0 before a step, which waits until the request has got somewhere.

    Args:
        at: Completed iterations.
        to: The layout.
        until: Stages that are waited for before the step begins; those before a final one need further steps.
    """

    at: int
    to: str | Mapping[str, Any]
    until: tuple[str, ...] = ("accepted", "refused")


@dataclass(frozen=True)
class AskedRun:
    """What a run left: records of each rank, its steps, its switches and the answers in the order of asking."""

    ranks: Sequence[PretrainRecord]
    steps: Sequence[StepRecord]
    switches: Sequence[SwitchRecord]
    replies: Sequence[Reply]
    directory: Path
    names: Sequence[str] = field(default_factory=list)


def ask_at(run: PretrainRun, *, asks: Sequence[Ask], directory: str, hold_from: int) -> None:
    """Ask on rank 0, and hold its steps (with them those of all ranks) as far as a request needs time and no steps."""
    spool = Spool(directory)
    names = run.record.extra.setdefault("names", [])
    if run.context.rank != 0:
        return

    def before_step(*_: Any) -> None:
        from megatron.training import get_args

        done = get_args().curr_iteration
        for ask in asks:
            if ask.at == done:
                name = spool.submit(LayoutRequest(to=ask.to if isinstance(ask.to, str) else dict(ask.to)))
                names.append(name)
                wait_for(lambda name=name, ask=ask: (reply := spool.reply(name)) and reply.stage in ask.until)
        for name in names:
            keep_pace(spool, name, hold=done >= hold_from)

    run.before_step.append(before_step)


def keep_pace(spool: Spool, name: str, *, hold: bool) -> None:
    """Wait while a request is prepared, which needs no steps; step slowly while it needs boundaries to be agreed on."""

    def stage() -> str:
        reply = spool.reply(name)
        return "none" if reply is None else reply.stage

    if hold:
        wait_for(lambda: stage() != "preparing")
    if stage() not in FINAL:
        time.sleep(0.03)


def wait_for(ready: Callable[[], Any]) -> None:
    """Wait until something is so, with a deadline."""
    end = time.monotonic() + _PATIENCE_S
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for did not happen")
        time.sleep(0.01)


def run_asked(
    ranks: RankPool,
    world: int,
    argv: Sequence[str],
    asks: Sequence[Ask],
    *,
    flags: Sequence[str] = (),
    hold_from: int = 0,
    hooks: Sequence[Callable[..., None]] = (),
    timeout: float = 30,
    limit: float = 120,
) -> AskedRun:
    """Run `pretrain()` with the plugin, without a schedule unless `flags` name one, and ask on the way.

    Steps wait for what is prepared, from iteration `hold_from` on.
    """
    directory = ranks.scratch("asked")
    given = ["--dynamic-parallelism", "--dynamic-parallelism-dir", str(directory)]
    given += ["--dynamic-parallelism-timeout", str(timeout)]
    hook = functools.partial(ask_at, asks=tuple(asks), directory=str(directory), hold_from=hold_from)
    records = ranks.pretrain(world, [*argv, *given, *flags], hooks=(dynamic, hook, *hooks), timeout=limit)
    names = records[0].extra["names"]
    spool = Spool(directory)
    replies = [reply for name in names if (reply := spool.reply(name)) is not None]
    switches = read_records(directory) if (directory / "switches.jsonl").exists() else ()
    return AskedRun(records, all_steps(records), switches, replies, directory, names)
