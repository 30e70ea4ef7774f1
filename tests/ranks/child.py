"""One forked rank: from the fork to its record."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from tests.ranks.context import RankContext
from tests.ranks.protocol import Job, Outcome, send

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent is gone, so that nothing outlives the test process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(job: Job, rank: int, port: int, results: Connection) -> NoReturn:
    """Run the job as one rank, send the outcome, and wait to be killed.

    A rank that is done stays until the server has heard from all: its sockets close only when nobody needs them.
    """
    outcome = Outcome(rank=rank)
    try:
        context = _prepare(job, rank, port)
        function, args, kwargs = pickle.loads(job.call)
        if job.init_group:
            context.init_process_group()
        outcome.record = pickle.dumps(function(context, *args, **kwargs))
    except BaseException as error:  # everything a rank can raise is told to the test, SystemExit too
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.traceback = traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    send(results, outcome)
    while True:
        signal.pause()


def _prepare(job: Job, rank: int, port: int) -> RankContext:
    os.setpgid(0, 0)  # so that whatever the rank starts is killed with it
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(log_path(job.directory, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world),
        LOCAL_WORLD_SIZE=str(job.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.path[:] = job.sys_path
    random.seed(rank)
    return RankContext(rank=rank, world=job.world, tmp=Path(job.directory), timeout=job.timeout)


def log_path(directory: str, rank: int) -> Path:
    """Return where the output of a rank goes."""
    return Path(directory) / f"log.{rank}"
