"""The test process's side of the pool: start the fork server once, hand it cases, raise what went wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.ranks.child import log_path
from tests.ranks.protocol import Job, Report, receive, send

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT = 180.0  # seconds: importing torch and Megatron on a busy machine
_ANSWER_GRACE = 15.0  # seconds over a case's own timeout until the server itself counts as stuck
_STOP_TIMEOUT = 5.0
_LOG_LINES = 40


class RankFailure(Exception):  # noqa: N818 - reads as what it is in a test's output
    """A case that failed on some rank.

    Attributes:
        rank: The first rank with an error that is not the echo of another rank's.
        errors: rank -> "Type: message", of every rank that failed.
        timed_out: Whether the case ran past its timeout.
    """

    def __init__(self, message: str, *, rank: int, errors: dict[int, str], timed_out: bool) -> None:
        super().__init__(message)
        self.rank = rank
        self.errors = errors
        self.timed_out = timed_out


class RankPool:
    """Runs functions on freshly forked ranks that have imported torch and Megatron already.

    The server starts with the first case. Functions travel by reference (module and name), so they are defined at the
    top of a module; arguments and records by pickle.

    Args:
        preload: Module whose `import_all` the server calls first; None for cases without torch.
    """

    def __init__(self, preload: str | None = "tests.ranks.warm") -> None:
        self._preload = preload
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._directory: Path | None = None
        self._numbers = itertools.count()

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        init_group: bool = True,
        may_die: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(context, *args, **kwargs)` on each rank and return its records, by rank.

        Args:
            world: Number of ranks.
            function: Importable by name; its first argument is the `RankContext`.
            timeout: Seconds until all ranks are killed.
            init_group: Make the default group over gloo first.
            may_die: Ranks whose death is part of the test; their record is None.

        Raises:
            RankFailure: A rank raised, died or gave no answer in time.
        """
        directory = self.scratch("case")
        job = Job(
            world=world,
            call=pickle.dumps((function, args, kwargs)),
            timeout=timeout,
            directory=str(directory),
            sys_path=(str(ROOT), *(path for path in sys.path if path and path != str(ROOT))),
            init_group=init_group,
            may_die=frozenset(may_die),
        )
        report = self._ask(job)
        cause = report.cause()
        if cause is not None:
            raise _failure(job, report)
        shutil.rmtree(directory, ignore_errors=True)
        return [None if outcome.record is None else pickle.loads(outcome.record) for outcome in report.outcomes]

    def pretrain(
        self, world: int, argv: Sequence[str], *, hooks: Sequence[Callable[..., None]] = (), timeout: float = 120.0
    ) -> list[Any]:
        """Run Megatron's `pretrain()` on each rank and return a `PretrainRecord` per rank.

        Args:
            world: Number of ranks.
            argv: Megatron's flags, see `gpt_args`.
            hooks: Called as `hook(run)` in each rank before it starts, see `tests.ranks.pretrain.PretrainRun`.
            timeout: Seconds until all ranks are killed.

        Raises:
            RankFailure: See `run`.
        """
        from tests.ranks import jobs

        return self.run(world, jobs.pretrain, tuple(argv), tuple(hooks), timeout=timeout)

    def scratch(self, name: str) -> Path:
        """Return a new directory, in memory where the machine has such, that lives as long as the pool."""
        path = self._root() / f"{name}.{next(self._numbers)}"
        path.mkdir()
        return path

    def _root(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ranks.", dir=_memory_directory()))
        return self._directory

    def close(self) -> None:
        """Stop the server with all of its ranks, and remove the directories."""
        self._stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _ask(self, job: Job) -> Report:
        connection = self._connect()
        try:
            send(connection, job)
            if not connection.poll(job.timeout + _ANSWER_GRACE):
                raise TimeoutError(f"the fork server gave no answer {_ANSWER_GRACE} s after the case's own timeout")
            report = receive(connection)
        except BaseException as error:  # a test's own timeout or Ctrl-C too: an answer to come would fit no question
            self._stop()
            if isinstance(error, EOFError | OSError):
                raise RuntimeError("the fork server is gone; see its output above") from error
            raise
        assert isinstance(report, Report)
        return report

    def _connect(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-W", "ignore", "-m", "tests.ranks.server", str(theirs.fileno())]
            command += [str(self._root())]
            command += [self._preload] if self._preload else []
            self._server = subprocess.Popen(command, cwd=ROOT, env=_environment(), pass_fds=[theirs.fileno()])
            theirs.close()
            self._connection = Connection(ours.detach())
            try:
                if not self._connection.poll(_START_TIMEOUT):
                    raise TimeoutError(f"the fork server did not start in {_START_TIMEOUT} s")
                receive(self._connection)
            except BaseException as error:
                self._stop()
                if isinstance(error, EOFError):
                    raise RuntimeError("the fork server failed while importing; see its output above") from error
                raise
        return self._connection

    def _stop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                send(self._connection, None)
            self._connection.close()
            self._connection = None
        if self._server is not None:
            try:
                self._server.wait(_STOP_TIMEOUT)  # it kills the ranks of a running case with all they started
            except subprocess.TimeoutExpired:
                self._server.kill()  # and the kernel kills the ranks with it
                self._server.wait()
            self._server = None


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {**os.environ, **fixed, "PYTHONPATH": path}


def _memory_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _failure(job: Job, report: Report) -> RankFailure:
    cause = report.cause()
    assert cause is not None
    assert cause.error is not None
    errors = {outcome.rank: outcome.error for outcome in report.outcomes if outcome.error is not None}
    lines = [f"rank {cause.rank} of {job.world}: {cause.error}"]
    lines += [f"  rank {rank}: {error.splitlines()[0]}" for rank, error in errors.items() if rank != cause.rank]
    if cause.traceback:
        lines += ["", cause.traceback.rstrip()]
    shown = sorted(errors) if report.timed_out else [cause.rank]
    for rank in shown:
        lines += ["", f"--- output of rank {rank}", *_tail(log_path(job.directory, rank))]
    return RankFailure("\n".join(lines), rank=cause.rank, errors=errors, timed_out=report.timed_out)


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return ["(none)"]
