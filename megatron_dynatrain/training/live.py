"""Requests to the running job, in this process: one watcher thread, and on the leader the desk and the status."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_dynatrain.elastic.boundary import BoundaryAgreement, BoundaryGate
from megatron_dynatrain.elastic.desk import Event, Job, Order, RequestDesk
from megatron_dynatrain.errors import DynaTrainError
from megatron_dynatrain.requests import Heartbeat, JobStatus, Spool
from megatron_dynatrain.schedule.resolve import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

logger = logging.getLogger(__name__)

THREAD = "dynatrain-requests"
_GRACE_S = 5.0
"""Seconds over the timeout of a vote, and for a thread to end that was told to."""


class LiveJob(Job, Protocol):
    """What is served and told of the job; read by other threads than the one that trains."""

    def current(self) -> Target:
        """Return what it trains under."""

    def completed(self) -> int:
        """Return the completed iterations."""

    def train_iters(self) -> int:
        """Return the iterations of the whole training."""

    def next_planned(self) -> str | None:
        """Return the next switch of the schedule as a reader sees it."""


class LiveRequests:
    """Listens to requests from the first step to the last; made by every rank at the same boundary, local.

    The leader's process has the desk, which looks into the spool. The threads of the others sleep in a wait on the
    store until the leader proposes something. A step without a request costs a lock.

    Args:
        job: The job.
        store: The store that all ranks share.
        ranks: Global ranks of the world; the first leads for as long as this lives, whatever their order is later.
        rank: This process's global rank.
        name: Name of the job on the store.
        directory: The report directory.
        iteration: Completed iterations.
        timeout: Longest wait for another rank, in seconds.
    """

    def __init__(
        self,
        job: LiveJob,
        *,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        name: str,
        directory: Path,
        iteration: int,
        timeout: float,
    ) -> None:
        self._job = job
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._ended = False
        self._failure: str | None = None
        self._trouble: str | None = None
        self._gate = BoundaryGate(iteration)
        # A wait on a store's client blocks its other users, so the watcher has a client of its own.
        self._agreement = BoundaryAgreement(
            store.clone(), ranks=ranks, rank=rank, tag=f"{name}/requests", gate=self._gate, seconds=timeout
        )
        self._desk: RequestDesk | None = None
        self._heartbeat: Heartbeat | None = None
        if rank == ranks[0]:
            self._desk = RequestDesk(Spool(directory), job, self._agreement)
            self._heartbeat = Heartbeat(directory, self._status, self._tell_trouble)
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        if self._desk is not None:
            try:
                self._desk.refuse_left_over()
            except OSError as error:
                self._tell_trouble(error)
        if self._heartbeat is not None:
            self._heartbeat.start()
        self._thread.start()

    def arrive(self, iteration: int) -> Order | None:
        """Return what all ranks have agreed to do at this boundary, if anything; called at every boundary."""
        order = self._gate.arrive(iteration, self._timeout + _GRACE_S)
        return order if isinstance(order, Order) else None

    def tell(self, event: Event) -> None:
        """Tell the desk what was done with an order; a no-op on other ranks."""
        if self._desk is not None:
            self._desk.events.put(event)

    def stop(self, error: BaseException | None = None) -> None:
        """Stop listening: answer what is left, end all threads; local, called where no step follows.

        Args:
            error: That which ends the training; None where it ends well.
        """
        if error is not None and not isinstance(error, SystemExit):
            self._failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if self._desk is not None:
            self._desk.stop("the training ended before the switch" + (f": {self._failure}" if self._failure else ""))
        try:
            self._agreement.leave(self._store)
            if self._thread.ident is not None:
                self._thread.join(_GRACE_S)
                if self._thread.is_alive():
                    logger.error("rank %d: the thread that listens to requests does not end", self._rank)
            self._agreement.forget()
        except RuntimeError as error:  # the store went first, as where the job ends in an error
            logger.debug("rank %d: requests end without the store: %s", self._rank, error)
        self._ended = True
        if self._heartbeat is not None:
            self._heartbeat.stop(_GRACE_S)

    def _run(self) -> None:
        if self._desk is not None:
            self._desk.run()
            return
        while True:
            try:
                if not self._agreement.attend():
                    return
            except DynaTrainError as error:  # the leader answers with it
                logger.warning("rank %d: a request came to nothing: %s", self._rank, error)
            except RuntimeError:  # the store is gone, and with it the leader or the job
                logger.debug("rank %d hears no requests any more", self._rank, exc_info=True)
                return

    # --- status -------------------------------------------------------------------------------------------------------

    def _tell_trouble(self, error: Exception) -> None:
        self._trouble = f"{type(error).__name__}: {error}"
        logger.error(
            "nothing can be written to the directory of --dynamic-parallelism-dir (%s): no status, no answers to "
            "requests, no switches.jsonl; the training goes on",
            error,
        )

    def _status(self) -> JobStatus:
        job, current = self._job, self._job.current()
        return JobStatus(
            state="ended" if self._ended else "running",
            failure=self._failure,
            host=socket.gethostname(),
            pid=os.getpid(),
            heartbeat=time.time(),
            layout=current.layout.describe(),
            ranks=current.layout.ranks,
            micro_batch_size=current.micro_batch_size,
            global_batch_size=current.global_batch_size,
            iteration=job.completed(),
            train_iters=job.train_iters(),
            preparing=None if self._ended else job.preparing(),
            next_planned=job.next_planned(),
            requests={} if self._desk is None else self._desk.stages(),
            trouble=self._trouble or (None if self._desk is None else self._desk.trouble),
        )
