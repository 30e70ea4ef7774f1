"""The commands that talk to a running job: `dynatrain request` and `dynatrain status`."""

from __future__ import annotations

import getpass
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from megatron_dynatrain.errors import DynaTrainError, StateError
from megatron_dynatrain.records import SwitchRecord, format_line, read_records
from megatron_dynatrain.requests import (
    FINAL,
    PHASES,
    JobStatus,
    LayoutRequest,
    Preparing,
    Reply,
    Spool,
    read_status,
    why_dead,
)

REFUSED = 1
"""Exit code of a command that was understood and refused, or failed."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Directory = Annotated[
    Path, typer.Option("--dir", file_okay=False, help="The job's report directory (--dynamic-parallelism-dir).")
]

_POLL_S = 0.1
_LOOK_AT_JOB_S = 2.0
_SWITCHES = 5
_STEPS = len(PHASES) + 2
"""Steps of the progress bar: the parts of the preparation, the wait for its boundary, the switch."""


def request(
    to: Annotated[
        str,
        typer.Option(
            help="A layout's name in the job's schedule, or its keys: tp=2,pp=2 (or YAML: '{tp: 2, vpp: null}')."
        ),
    ],
    directory: Directory = Path("dynatrain"),
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the switch is done, with a progress bar.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Longest wait for the job's answer, in seconds.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Ask a running job to change its layout at the next boundary after preparing it.

    Returns once the job has accepted or refused; with --wait once the switch is committed, refused or aborted.
    """
    asked = LayoutRequest(to=read_layout(to), by=_who())
    try:
        with _problems_of_files():
            dead = why_dead(read_status(directory))
            if dead is not None:
                raise StateError(dead, subject=str(directory))
            spool = Spool(directory)
            name = spool.submit(asked)
            reply = _answer(spool, name, timeout, final=wait, show=wait and not as_json)
    except DynaTrainError as error:
        if as_json:
            typer.echo(json.dumps({"ok": False, "request": None, "error": error.render()}))
        else:
            _say("nothing is changed", error.render())
        raise typer.Exit(REFUSED) from None
    ok = reply.stage in (("committed",) if wait else ("committed", "accepted", "preparing", "switching"))
    if as_json:
        typer.echo(json.dumps({"ok": ok, "request": name, "error": reply.error, "reply": reply.model_dump()}))
    else:
        _show_reply(reply)
    if not ok:
        raise typer.Exit(REFUSED)


def read_layout(text: str) -> str | dict[str, Any]:
    """Return what `--to` says: a name, or keys with their values; the job is the judge of them.

    Raises:
        typer.BadParameter: It is neither.
    """
    text = text.strip()
    try:
        if text.startswith("{"):
            value = yaml.safe_load(text)
        elif "=" in text:
            pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
            if any(not sign for _, sign, _ in pairs):
                raise typer.BadParameter(f"a key without a value in {text!r}", param_hint="--to")
            value = {key.strip(): yaml.safe_load(written) for key, _, written in pairs}
        else:
            value = text
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{text!r} is neither a name nor keys: {error}", param_hint="--to") from None
    if not value or not (isinstance(value, str) or all(isinstance(key, str) for key in value)):
        raise typer.BadParameter("give the name of a layout, or keys such as tp=2,pp=2", param_hint="--to")
    return value


def _answer(spool: Spool, name: str, timeout: float, *, final: bool, show: bool) -> Reply:
    """Wait for the job's first or final answer.

    Raises:
        StateError: The job gave none in time, or died meanwhile.
    """
    end = time.monotonic() + timeout
    look = time.monotonic() + _LOOK_AT_JOB_S
    with _bar(show) as (bar, task):
        while True:
            reply = spool.reply(name)
            _advance(bar, task, reply)
            if reply is not None and (reply.stage in FINAL or not final):
                return reply
            now = time.monotonic()
            if now >= look:
                look = now + _LOOK_AT_JOB_S
                dead = why_dead(read_status(spool.directory))
                if dead is not None and spool.reply(name) == reply:
                    spool.withdraw(name)
                    raise StateError(dead, subject=f"request {name}")
            if now >= end:
                raise _late(spool, name, timeout)
            time.sleep(_POLL_S)


def _late(spool: Spool, name: str, timeout: float) -> StateError:
    if spool.withdraw(name):
        return StateError(
            f"the job did not take the request up in {timeout:g} s: it is taken back", subject=f"request {name}"
        )
    reply = spool.reply(name)
    return StateError(
        f"no final answer in {timeout:g} s: the job goes on with the request",
        subject=f"request {name}",
        got="no answer" if reply is None else reply.stage,
        hint="look at `dynatrain status`",
    )


@contextmanager
def _bar(show: bool) -> Iterator[tuple[Progress, TaskID]]:
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as bar:
        yield bar, bar.add_task("asked", total=_STEPS, what="")


def _advance(bar: Progress, task: TaskID, reply: Reply | None) -> None:
    if reply is None:
        return
    done, what = 0, reply.detail or ""
    if reply.preparing is not None:
        done, what = reply.preparing.step - 1, f"{reply.preparing.phase} ({reply.to})"
    if reply.stage == "switching":
        done = len(PHASES) + 1
    if reply.stage == "committed":
        done = _STEPS
    bar.update(task, completed=done, description=reply.stage, what=what)


def _show_reply(reply: Reply) -> None:
    if reply.stage == "committed":
        typer.echo(f"committed: {reply.to} since the boundary after iteration {reply.iteration} (request {reply.id})")
    elif reply.stage in FINAL:
        _say(f"request {reply.id} is {reply.stage}", reply.error or "")
    else:
        typer.echo(f"{reply.stage}{f', {reply.detail}' if reply.detail else ''}: request {reply.id}")


def status(directory: Directory = Path("dynatrain"), as_json: Json = False) -> None:
    """Show where a job is: layout, ranks, iteration, what is being prepared and how far, its last switches."""
    try:
        with _problems_of_files():
            found, switches = read_status(directory), _last_switches(directory)
    except DynaTrainError as error:
        if as_json:
            typer.echo(json.dumps({"ok": False, "error": error.render(), "status": None, "switches": []}))
        else:
            _say("no status", error.render())
        raise typer.Exit(REFUSED) from None
    dead = why_dead(found)
    if as_json:
        rows = [record.as_json() for record in switches]
        typer.echo(json.dumps({"ok": dead is None, "error": dead, "status": found.model_dump(), "switches": rows}))
    else:
        if dead is not None:
            _say("this job runs no more", dead)
        for line in _lines(found, switches):
            typer.echo(line)
    if dead is not None:
        raise typer.Exit(REFUSED)


def _last_switches(directory: Path) -> tuple[SwitchRecord, ...]:
    try:
        return read_records(directory)[-_SWITCHES:]
    except FileNotFoundError:
        return ()


def _lines(found: JobStatus, switches: tuple[SwitchRecord, ...]) -> list[str]:
    of = f" of {found.train_iters}" if found.train_iters else ""
    lines = [
        f"layout     {found.layout}, micro batch {found.micro_batch_size}, global batch {found.global_batch_size}",
        f"ranks      {' '.join(map(str, found.ranks))}",
        f"iteration  {found.iteration}{of}",
        f"leader     process {found.pid} on {found.host}",
        f"preparing  {_preparing(found.preparing)}",
        f"planned    {found.next_planned or 'no further switch'}",
    ]
    lines += [f"request    {name}: {stage}" for name, stage in found.requests.items()]
    lines += [f"trouble    {found.trouble}"] if found.trouble else []
    return [*lines, *(format_line(record) for record in switches)]


def _preparing(preparing: Preparing | None) -> str:
    if preparing is None:
        return "nothing"
    how_far = "done" if preparing.done else f"{preparing.phase} ({preparing.step} of {preparing.of})"
    return f"{preparing.to} for {preparing.trigger}: {how_far}"


@contextmanager
def _problems_of_files() -> Iterator[None]:
    """Say what a file system has against it as every other problem."""
    try:
        yield
    except OSError as error:
        raise StateError(
            "the report directory can't be used", subject=str(error.filename), got=error.strerror or str(error)
        ) from None


def _say(what: str, why: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text(what, style="bold red"))
    console.print(Text(why))


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container without a name for its user
        return socket.gethostname()
