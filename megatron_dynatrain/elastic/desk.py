"""Serves the requests to a running job, one at a time in order of arrival: in one thread of the leader's process."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from megatron_dynatrain.elastic.boundary import BoundaryAgreement
from megatron_dynatrain.errors import DynaTrainError
from megatron_dynatrain.requests import FINAL, LayoutRequest, Preparing, Reply, Spool, Stage

logger = logging.getLogger(__name__)

_POLL_S = 0.5
"""Seconds between two looks into the spool."""
_TICK_S = 0.1
"""Seconds between two looks at a preparation."""


class Asked(Protocol):
    """A switch that was asked for, in full; picklable."""

    @property
    def target(self) -> Describes:
        """The layout."""


class Describes(Protocol):
    """Something with a name for logs."""

    def describe(self) -> str:
        """Return it as logs and records show it."""


@dataclass(frozen=True, slots=True)
class Order:
    """What every rank does at a boundary that all have agreed on.

    Args:
        kind: Begin to prepare the switch, or do it, or drop what is prepared.
        attempt: Counts the preparations; an order to switch is void where its own is not there any more.
        switch: The switch.
        version: Changes of the layout so far; an order to prepare is void where there was another one since.
    """

    kind: Literal["prepare", "switch", "drop"]
    attempt: int
    switch: Asked
    version: int


@dataclass(frozen=True, slots=True)
class Event:
    """What the training thread of the leader's process did with an order.

    Args:
        attempt: Of the order.
        what: `dropped` where a planned switch came first, or the order was void.
        iteration: Completed iterations.
        error: Why a switch was not committed.
    """

    attempt: int
    what: Literal["begun", "dropped", "committed", "refused", "aborted"]
    iteration: int
    error: str | None = None


class Job(Protocol):
    """What the desk asks of the job; called in the desk's thread."""

    def read(self, name: str, request: LayoutRequest) -> object:
        """Return the request as `check` takes it, or raise a DynaTrainError where no job could do it."""

    def check(self, asked: object) -> tuple[Asked, int]:
        """Return the switch in full and the changes of the layout before it, or raise a DynaTrainError: no fit now."""

    def in_the_way(self) -> str | None:
        """Return what has to be over first, such as a planned switch that is being prepared."""

    def preparing(self) -> Preparing | None:
        """Return how far the current preparation is."""


class _Over(Exception):  # noqa: N818 (nothing is wrong)
    """The training has ended."""


@dataclass(slots=True)
class _Waiting:
    """A request that was accepted."""

    name: str
    asked: object
    reply: Reply


class RequestDesk:
    """Takes requests in, lets all ranks prepare and switch, and answers.

    Args:
        spool: The requests.
        job: The job.
        agreement: How all ranks agree on a boundary.

    Attributes:
        events: Where the training thread puts what it did.
        trouble: What goes wrong with the spool, such as a full disk.
    """

    def __init__(self, spool: Spool, job: Job, agreement: BoundaryAgreement) -> None:
        self._spool = spool
        self._job = job
        self._agreement = agreement
        self._attempts = 0
        self._waiting: deque[_Waiting] = deque()
        self._stop = threading.Event()
        self._why = ""
        self._begun: Order | None = None
        self._unreadable: set[str] = set()
        self._looked = 0.0
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.trouble: str | None = None

    def stages(self) -> dict[str, str]:
        """Return the stage of every request that is not answered for good, in order; for any thread."""
        return {waiting.name: waiting.reply.stage for waiting in tuple(self._waiting)}

    def stop(self, why: str = "the training ended before the switch") -> None:
        """Let `run` come to its end, and refuse what is left with a reason; called by the training thread."""
        self._why = why
        self._stop.set()

    def refuse_left_over(self) -> None:
        """Answer what was asked of an earlier job in this directory, before this one takes requests."""
        for name in self._spool.left_over():
            self._refuse(name, "left over from before this job's start: ask again")

    def run(self) -> None:
        """Serve until `stop`; then refuse what is left."""
        try:
            while not self._stop.is_set():
                self._look()
                if self._waiting:
                    self._serve(self._waiting[0])
                    self._waiting.popleft()
                else:
                    self._stop.wait(_POLL_S)
        except _Over:
            pass
        why = self._why
        for waiting in self._waiting:
            self._answer(waiting, "refused", error=why)
        self._waiting.clear()
        with self._troubles():
            for name in self._spool.left_over():
                self._refuse(name, why)

    # --- what arrives -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take in what has arrived; a request that nothing stands before is checked at once, others by their form."""
        if time.monotonic() - self._looked < _POLL_S:
            return
        self._looked = time.monotonic()
        with self._troubles():
            for name in self._spool.arrivals():
                if name not in self._unreadable:
                    self._take_in(name)

    def _take_in(self, name: str) -> None:
        try:
            request = self._spool.claim(name)
            asked = self._job.read(name, request)
            before = self._before()
            if before is None:
                self._job.check(asked)
        except FileNotFoundError:  # withdrawn meanwhile
            return
        except Exception as error:  # whatever it is, somebody waits for an answer
            self._refuse(name, _words(error))
            if isinstance(error, OSError):  # it may lie there for ever
                self._unreadable.add(name)
            return
        logger.info("request %s by %s: %s", name, request.by or "somebody", request.to)
        waiting = _Waiting(name, asked, Reply(id=name, stage="accepted"))
        self._answer(waiting, "accepted", detail=None if before is None else f"waits for {before}")
        self._waiting.append(waiting)

    def _before(self) -> str | None:
        return f"request {self._waiting[-1].name}" if self._waiting else self._job.in_the_way()

    def _refuse(self, name: str, why: str) -> None:
        logger.info("request %s is refused: %s", name, why)
        with self._troubles():
            self._spool.answer(Reply(id=name, stage="refused", error=why))

    def _answer(self, waiting: _Waiting, stage: Stage, **fields: object) -> None:
        """Replace the answer to a request, where it is another one than the last."""
        kept = {"id": waiting.name, "to": waiting.reply.to}
        reply = Reply.model_validate({**kept, "stage": stage, **fields})
        if reply == waiting.reply and stage != "accepted":
            return
        waiting.reply = reply
        with self._troubles():
            self._spool.answer(reply)

    # --- one request --------------------------------------------------------------------------------------------------

    def _serve(self, waiting: _Waiting) -> None:
        """Bring one request to its end: as often as a planned switch comes first, it is begun again."""
        try:
            while waiting.reply.stage not in FINAL:
                self._wait_for_way(waiting)
                order = self._prepared(waiting)
                if order is not None:
                    self._switched(waiting, order)
        except _Over:
            raise
        except Exception as error:
            self._answer(waiting, "refused", error=_words(error))
            self._let_go()

    def _let_go(self) -> None:
        """Let all ranks drop what they prepare for a request that is answered; else they keep it for the next one."""
        begun, self._begun = self._begun, None
        if begun is not None:
            try:
                self._propose(Order("drop", begun.attempt, begun.switch, begun.version))
            except DynaTrainError as error:
                logger.warning("what was prepared for a request is kept until the next one: %s", error)

    def _wait_for_way(self, waiting: _Waiting) -> None:
        while (reason := self._job.in_the_way()) is not None:
            self._answer(waiting, "accepted", detail=f"waits for {reason}")
            self._pause()

    def _prepared(self, waiting: _Waiting) -> Order | None:
        """Let all ranks prepare; return the order, or None where a planned switch came first."""
        self._attempts += 1
        switch, version = self._job.check(waiting.asked)
        order = Order("prepare", self._attempts, switch, version)
        boundary = self._propose(order)
        to = switch.target.describe()
        self._answer(waiting, "accepted", to=to, detail=f"its preparation begins after iteration {boundary}")
        if self._event(order).what != "begun":
            return None
        self._begun = order
        while self._event_or_none(order) is None:
            progress = self._job.preparing()
            self._answer(waiting, "preparing", preparing=progress)
            if progress is not None and progress.done:
                return order
        return None

    def _switched(self, waiting: _Waiting, prepared: Order) -> None:
        """Let all ranks switch to what is prepared, and answer; a planned switch may still come first."""
        order = Order("switch", prepared.attempt, prepared.switch, prepared.version)
        boundary = self._propose(order)
        self._answer(waiting, "switching", detail=f"after iteration {boundary}")
        event = self._event(order)
        self._begun = None
        if event.what in FINAL:
            self._answer(waiting, event.what, error=event.error, iteration=event.iteration)

    def _propose(self, order: Order) -> int:
        boundary = self._agreement.propose(order)
        if boundary is None:
            raise _Over
        return boundary

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _event(self, order: Order) -> Event:
        while (event := self._event_or_none(order)) is None:
            pass
        return event

    def _event_or_none(self, order: Order) -> Event | None:
        """Return what happened to an order, waiting a little; None where nothing did."""
        try:
            event = self.events.get(timeout=_TICK_S)
        except queue.Empty:
            self._check_running()
            self._look()
            return None
        return event if event.attempt == order.attempt else None

    def _pause(self) -> None:
        self._stop.wait(_TICK_S)
        self._check_running()
        self._look()

    def _check_running(self) -> None:
        if self._stop.is_set():
            raise _Over

    @contextmanager
    def _troubles(self) -> Iterator[None]:
        """Note what the file system has against the spool: the job must not end for it."""
        try:
            yield
        except OSError as error:
            if self.trouble is None:
                logger.error("requests can't be read or answered: %s", error)
            self.trouble = str(error)


def _words(error: Exception) -> str:
    """Return an error for who asked; one that nobody foresaw is a fault of the plugin."""
    if isinstance(error, DynaTrainError | OSError):
        return str(error)
    logger.error("a request came to nothing", exc_info=error)
    return f"{type(error).__name__}: {error}; hint: see the log of the first rank; this is a fault of the plugin"
