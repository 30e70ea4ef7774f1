"""The fork server, `python -m tests.ranks.server FD DIRECTORY [MODULE]`: imports once, then forks ranks for each job.

It is a process of its own, started by the first test that needs it, so that the test process stays light and its
threads, captured output and patches never reach a rank. Children are forked, never reused: a used Megatron process
keeps groups and modules alive. Only one thread may exist when forking.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.ranks import child
from tests.ranks.protocol import Job, Outcome, Report, receive, send

_GRACE = 0.5  # seconds that the other ranks have to report after a failure
_ECHO_GRACE = 3.0  # the same after one that only says that a peer is gone: the cause is still to come
_DUMP = 0.5  # seconds that stuck ranks have to write their stacks


def main(descriptor: int, directory: str, preload: str | None = None) -> None:
    """Import everything by `import_all` of the module `preload`, then serve jobs until told to stop.

    Where the test process is gone without a word (killed), the directory of the pool is removed for it.
    """
    client = Connection(descriptor)
    try:
        if preload is not None:
            importlib.import_module(preload).import_all()
        _get_ready_to_fork()
        send(client, "ready")
        while (job := receive(client)) is not None:
            report = _Case(job, client).run()
            if report is not None:
                send(client, report)
    except (EOFError, ConnectionError):
        shutil.rmtree(directory, ignore_errors=True)


def _get_ready_to_fork() -> None:
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads != 1:
        raise RuntimeError(f"the fork server has {threads} threads after its imports; a fork needs exactly 1")
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise touch, and so copy, every page of the parent


class _Case:
    """The ranks of one job."""

    def __init__(self, job: Job, client: Connection) -> None:
        self._job = job
        self._client = client
        self._pids: list[int] = []
        self._pipes: dict[Connection, int] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._failed: list[int] = []

    def run(self) -> Report | None:
        """Return the report; None where the test process wants none any more, or is gone."""
        deadline = time.monotonic() + self._job.timeout
        timed_out = False
        try:
            self._fork()
            while self._pipes:
                left = deadline - time.monotonic()
                if left <= 0:
                    timed_out = not self._failed
                    self._dump_stacks()
                    break
                ready = wait([*self._pipes, self._client], timeout=left)
                if self._client in ready:
                    return None  # it says "stop" or is gone: nothing else is sent during a case
                for pipe in ready:
                    deadline = min(deadline, time.monotonic() + self._read(pipe))
        finally:
            self._kill()
        return self._report(timed_out)

    def _fork(self) -> None:
        port = _free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self._job.world):
            ours, theirs = _pipe()
            pid = os.fork()
            if pid == 0:
                self._client.close()
                child.run(self._job, rank, port, theirs)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # by both sides, as either may be the first
            theirs.close()
            self._pids.append(pid)
            self._pipes[ours] = rank

    def _read(self, pipe: Connection) -> float:
        """Take one outcome; return how many seconds the case may still take after it."""
        rank = self._pipes.pop(pipe)
        try:
            outcome = receive(pipe)
        except EOFError:
            outcome = Outcome(rank=rank, error=f"the process {self._how_it_died(rank)}", died=True)
        pipe.close()
        self._outcomes[rank] = outcome
        if outcome.error is None or (outcome.died and rank in self._job.may_die):
            return self._job.timeout
        self._failed.append(rank)
        return _ECHO_GRACE if outcome.is_echo else _GRACE

    def _how_it_died(self, rank: int) -> str:
        _, status = os.waitpid(self._pids[rank], 0)
        code = os.waitstatus_to_exitcode(status)
        self._pids[rank] = 0
        return f"died by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code} before its record"

    def _dump_stacks(self) -> None:
        for rank in self._pipes.values():
            os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_DUMP)

    def _kill(self) -> None:
        for pid in filter(None, self._pids):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()

    def _report(self, timed_out: bool) -> Report:
        missing = [rank for rank in range(self._job.world) if rank not in self._outcomes]
        text = f"no answer in {self._job.timeout} s" if timed_out else "no answer after another rank failed"
        for rank in missing:
            self._outcomes[rank] = Outcome(rank=rank, error=text)
        outcomes = [self._outcomes[rank] for rank in range(self._job.world)]
        return Report(outcomes=outcomes, failed=self._failed + missing, timed_out=timed_out)


def _pipe() -> tuple[Connection, Connection]:
    read, write = os.pipe()
    return Connection(read, writable=False), Connection(write, readable=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
