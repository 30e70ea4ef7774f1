"""Requests to a running job and its answers, as files in its report directory; imports neither torch nor Megatron.

`requests/ID.json` is what somebody asks for, `requests/ID.reply.json` the job's answer, `status.json` where the job is.
Every file is replaced as a whole, so that a reader never sees half of one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_dynatrain.errors import StateError

STATUS_NAME = "status.json"
FOLDER = "requests"
HEARTBEAT_S = 1.0
"""Seconds between two writings of the status."""
DEAD_AFTER_S = 30.0
"""Seconds without a heartbeat after which a job counts as dead; one process writes it, beside the training thread."""

PHASES = ("fit", "memory", "groups", "build", "plan", "pairs")
"""Parts of a preparation in the background, in order."""

_KEPT_REPLIES = 100
_LARGEST_BYTES = 64 * 1024
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.json")

Stage = Literal["accepted", "preparing", "switching", "committed", "refused", "aborted"]
FINAL: tuple[Stage, ...] = ("committed", "refused", "aborted")
"""Stages after which nothing changes any more."""


class _File(BaseModel):
    """A file; keys of later versions are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class LayoutRequest(BaseModel):
    """What somebody asks for; a key that is not known is refused, since it may be what was meant.

    Args:
        to: Name of a layout of the job's schedule, or a layout's keys as a schedule has them.
        by: Who asks, for the log.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    to: str | dict[str, Any]
    by: str = ""


class Preparing(_File):
    """What is being prepared, and how far.

    Args:
        to: The layout.
        trigger: What it is prepared for: a planned switch or a request.
        phase: Part of the preparation that runs, one of `PHASES`.
        step: Its number, from 1.
        of: Number of parts.
        done: Whether all is prepared, and only its boundary is waited for.
    """

    to: str
    trigger: str
    phase: str
    step: int
    of: int = len(PHASES)
    done: bool = False


class Reply(_File):
    """The job's answer to a request, replaced at each stage.

    Args:
        id: The request.
        stage: How far it is.
        to: The layout asked for in full, once it is known.
        detail: What it waits for, or where it happened.
        error: Why not.
        preparing: How far its preparation is.
        iteration: Completed iterations at the boundary of the switch, once it is done.
    """

    id: str
    stage: Stage
    to: str | None = None
    detail: str | None = None
    error: str | None = None
    preparing: Preparing | None = None
    iteration: int | None = None


class JobStatus(_File):
    """Where a job is, as its leader writes it about once a second.

    Args:
        state: `ended` where `train()` has returned or raised.
        failure: The error with which it ended, in one line; None where it ended well or goes on.
        host: Where the leader runs.
        pid: Its process.
        heartbeat: Seconds since the epoch at which this was written.
        layout: What it trains under.
        ranks: Global ranks in the order of the layout.
        micro_batch_size: Samples per micro-batch.
        global_batch_size: Samples per iteration.
        iteration: Completed iterations.
        train_iters: Iterations of the whole training.
        preparing: What is being prepared; None where nothing is.
        next_planned: The next switch of the schedule.
        requests: Requests that are not answered for good, in order: id to stage.
        trouble: Why requests are not served, where they aren't.
    """

    state: Literal["running", "ended"] = "running"
    failure: str | None = None
    host: str
    pid: int
    heartbeat: float
    layout: str
    ranks: tuple[int, ...]
    micro_batch_size: int
    global_batch_size: int | None = None
    iteration: int
    train_iters: int | None = None
    preparing: Preparing | None = None
    next_planned: str | None = None
    requests: dict[str, str] = {}
    trouble: str | None = None


class Spool:
    """The requests in a report directory; one job answers them, any number of people ask.

    Args:
        directory: The job's report directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.folder = self.directory / FOLDER

    # --- who asks -----------------------------------------------------------------------------------------------------

    def submit(self, request: LayoutRequest) -> str:
        """Put a request there and return its id.

        Raises:
            OSError: It can't be written.
        """
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self._request(name), request.model_dump_json())
        return name

    def withdraw(self, name: str) -> bool:
        """Take a request back and return True, unless the job has taken it up."""
        try:
            self._request(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def reply(self, name: str) -> Reply | None:
        """Return the job's answer so far; None where there is none."""
        try:
            return Reply.model_validate_json(self._reply(name).read_bytes())
        except FileNotFoundError:
            return None

    # --- the job ------------------------------------------------------------------------------------------------------

    def arrivals(self) -> list[str]:
        """Return the requests that were not taken up, in order of arrival as the file system saw it."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                with contextlib.suppress(FileNotFoundError):  # withdrawn meanwhile
                    if match is not None and entry.is_file():
                        found.append((entry.stat().st_mtime_ns, match[1]))
        return [name for _, name in sorted(found)]

    def claim(self, name: str) -> LayoutRequest:
        """Take a request up, so that it can't be withdrawn any more.

        Raises:
            FileNotFoundError: It was withdrawn.
            StateError: It is not a request.
        """
        claimed = self._claimed(name)
        self._request(name).replace(claimed)
        with claimed.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        try:
            if len(content) > _LARGEST_BYTES:
                raise ValueError(f"more than {_LARGEST_BYTES} bytes")
            return LayoutRequest.model_validate_json(content)
        except ValueError as error:
            raise StateError("the file is not a request", subject=f"{name}.json", got=_short(error)) from None

    def answer(self, reply: Reply) -> None:
        """Replace the answer to a request; the request itself goes with the last one.

        Raises:
            OSError: It can't be written.
        """
        _replace(self._reply(reply.id), reply.model_dump_json())
        if reply.stage in FINAL:
            for path in (self._request(reply.id), self._claimed(reply.id)):
                path.unlink(missing_ok=True)
            self._forget_old()

    def left_over(self) -> list[str]:
        """Return every request that has no final answer, taken up or not."""
        with contextlib.suppress(FileNotFoundError):
            claimed = [path.name.removesuffix(".claimed") for path in self.folder.glob("*.claimed")]
            return [*sorted(claimed), *self.arrivals()]
        return []

    def _forget_old(self) -> None:
        """Keep the last answers only: a job may serve requests for months."""
        replies = list(self.folder.glob("*.reply.json"))
        if len(replies) > _KEPT_REPLIES:
            by_age = sorted(replies, key=lambda path: path.stat().st_mtime_ns)
            for path in by_age[:-_KEPT_REPLIES]:
                path.unlink(missing_ok=True)

    def _request(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _claimed(self, name: str) -> Path:
        return self.folder / f"{name}.claimed"

    def _reply(self, name: str) -> Path:
        return self.folder / f"{name}.reply.json"


# --- the status -------------------------------------------------------------------------------------------------------


def write_status(directory: Path, status: JobStatus) -> None:
    """Replace the status of a job; its leader only.

    Raises:
        OSError: It can't be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / STATUS_NAME, status.model_dump_json())


def read_status(directory: str | os.PathLike[str]) -> JobStatus:
    """Return the status of the job that reports to a directory, whether it lives or not.

    Raises:
        StateError: No job has reported there, or the file is not a status.
    """
    path = Path(directory) / STATUS_NAME
    try:
        return JobStatus.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise StateError(
            "no job there",
            subject=str(directory),
            expected=f"{STATUS_NAME}, which a job writes from its first step on",
            got="no such file",
            hint="give that of --dynamic-parallelism-dir; its default is `dynatrain` under --save, or ./dynatrain",
        ) from None
    except (OSError, ValidationError) as error:
        raise StateError("the status can't be read", subject=str(path), got=_short(error)) from None


def why_dead(status: JobStatus, now: float | None = None) -> str | None:
    """Return why nobody will answer a request to a job, or None where it lives.

    Args:
        status: What it wrote last.
        now: Seconds since the epoch; the clock of this machine where None.
    """
    if status.state == "ended" and status.failure is not None:
        return f"the training ended in an error after iteration {status.iteration}: {status.failure}"
    if status.state == "ended":
        return f"the training has ended, after iteration {status.iteration}"
    if status.host == socket.gethostname() and not _is_alive(status.pid):
        return f"the job is dead: its process {status.pid} on {status.host} is gone"
    age = (time.time() if now is None else now) - status.heartbeat
    if age > DEAD_AFTER_S:
        return (
            f"the job is dead or stopped: its last sign of life is {age:.0f} s old (process {status.pid} on "
            f"{status.host})"
        )
    return None


class Heartbeat:
    """A thread that writes the status of a job again and again; the leader's process only.

    Args:
        directory: The report directory.
        status: Returns the status of now; called in the thread.
        failed: Called with the first error; later ones are passed over, as a disk may be full for hours.
    """

    def __init__(self, directory: Path, status: Callable[[], JobStatus], failed: Callable[[Exception], None]) -> None:
        self._directory = directory
        self._status = status
        self._failed = failed
        self._told = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain-status", daemon=True)

    def start(self) -> None:
        """Write the first status, then go on in the thread."""
        self._write()
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread and write a last status."""
        self._stop.set()
        self._thread.join(seconds)
        self._write()

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        try:
            write_status(self._directory, self._status())
        except Exception as error:  # a status that can't be told must not end the job
            if not self._told:
                self._told = True
                self._failed(error)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(path: Path, text: str) -> None:
    """Write a file so that readers see the old one or the new one, whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else str(first["msg"])
    return str(error)
