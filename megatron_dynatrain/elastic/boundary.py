"""Agreed boundaries: every rank does the same thing between the same two steps, without a collective in each step.

The leader proposes a boundary that is still to come; every rank's watcher thread votes yes if its training thread has
not passed it. Looking and promising are one act under a lock that the training thread takes at each boundary, so a rank
that said yes can't slip through: it waits at the boundary for the verdict, which is the same on every rank.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore

from megatron_dynatrain.elastic.control import ControlPlane
from megatron_dynatrain.elastic.groups import delete_keys
from megatron_dynatrain.errors import AgreementError

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)

_FIRST_MARGIN = 2
"""Steps between where the leader is and the first boundary it proposes: one whole step for the votes."""
_LAST_MARGIN = 64
_PAUSES_S = (0.05, 1.0)
"""Seconds between two proposals, growing from the first to the second."""
_WAIT = timedelta(days=1)
"""A watcher is woken and need not look; torch.distributed logs each wait that ran out."""


class BoundaryPassed(AgreementError):  # noqa: N818 (nothing is wrong)
    """A rank can't promise a boundary: it has passed it, has promised another one, or trains no more."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Something to do at a boundary.

    Args:
        number: Counts the proposals of the job.
        boundary: Completed iterations.
        action: What to do; picklable.
    """

    number: int
    boundary: int
    action: object


class BoundaryGate:
    """Where the training thread of this process is, and what it has promised; local, for two threads.

    Args:
        reached: Completed iterations at the start.
    """

    def __init__(self, reached: int) -> None:
        self._changed = threading.Condition()
        self._reached = reached
        self._promised: Proposal | None = None
        self._verdict: bool | None = None
        self.closed = False

    @property
    def reached(self) -> int:
        """The last boundary at which the training thread was."""
        return self._reached

    def promise(self, proposal: Proposal) -> bool:
        """Promise to wait at a boundary, unless it is passed, another one is promised, or the training is over."""
        with self._changed:
            if self.closed or self._promised is not None or self._reached >= proposal.boundary:
                return False
            self._promised, self._verdict = proposal, None
            return True

    def settle(self, proposal: Proposal, agreed: bool) -> None:
        """Say what all ranks decided; a promise that was not agreed to is void."""
        with self._changed:
            if self._promised is proposal:
                self._verdict = agreed
                if not agreed:
                    self._promised = None
                self._changed.notify_all()

    def arrive(self, iteration: int, seconds: float) -> object | None:
        """Return what all ranks do at this boundary, if anything; called by the training thread at every boundary.

        Waits only where this boundary is promised and not yet decided. Costs microseconds otherwise.

        Args:
            iteration: Completed iterations; boundaries may be left out, the same on every rank.
            seconds: Longest wait for the verdict; longer than a vote takes, so it runs out only where the watcher died.
        """
        with self._changed:
            self._reached = iteration
            promised = self._promised
            if promised is None or iteration < promised.boundary:
                return None
            self._changed.wait_for(lambda: self._promised is not promised or self._verdict is not None, seconds)
            agreed = self._promised is promised and self._verdict
            if self._promised is promised:
                self._promised = None
                if self._verdict is None:
                    logger.error("no verdict on what to do after iteration %d in %g s: nothing is", iteration, seconds)
            self._changed.notify_all()
            return promised.action if agreed else None

    def wait_free(self, seconds: float) -> bool:
        """Wait until nothing is promised, and return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._promised is None or self.closed, seconds)

    def close(self) -> None:
        """Promise nothing any more: the training is over."""
        with self._changed:
            self.closed = True
            self._promised = None
            self._changed.notify_all()


class BoundaryAgreement:
    """The votes of all ranks on boundaries, for one watcher thread in each process.

    The first of the ranks leads: its thread calls `propose`; the threads of the others call `attend` in a loop. Keys of
    the store don't pile up: whoever reads a proposal deletes it, and a vote deletes what the one before has left.

    Args:
        store: A client of the shared store for this thread alone: its waits block the client.
        ranks: Global ranks that act together.
        rank: This process's global rank.
        tag: Prefix of the keys, unique per store for ever.
        gate: Where the training thread of this process is.
        seconds: Longest wait for the vote of another rank, in seconds.
    """

    def __init__(
        self, store: Store, *, ranks: Sequence[int], rank: int, tag: str, gate: BoundaryGate, seconds: float
    ) -> None:
        self._tag = tag
        self._mail = PrefixStore(f"{tag}/mail", store)
        self._control = ControlPlane(store, ranks=ranks, rank=rank, tag=f"{tag}/control")
        self._others = tuple(ranks[1:])
        self._rank = rank
        self._gate = gate
        self._seconds = seconds
        self._number = 0
        self._voting: int | None = None
        self._left = threading.Event()

    def propose(self, action: object) -> int | None:
        """Return the boundary at which every rank does it, or None where the training ends first; the leader only.

        Raises:
            DynaTrainError: The ranks could not decide, such as one that doesn't answer; the same on every rank.
        """
        margin, pause = _FIRST_MARGIN, _PAUSES_S[0]
        while not self._gate.closed:
            if not self._gate.wait_free(1.0):
                continue
            proposal = Proposal(self._number, self._gate.reached + margin, action)
            content = pickle.dumps(proposal)
            for rank in self._others:
                self._mail.set(f"{rank}/{proposal.number}", content)
            self._number += 1
            if self._agreed(proposal):
                return proposal.boundary
            margin = min(2 * margin, _LAST_MARGIN)
            self._left.wait(pause)
            pause = min(2 * pause, _PAUSES_S[1])
        return None

    def attend(self) -> bool:
        """Wait for a proposal of the leader and vote on it; return False once this rank has left.

        Raises:
            DynaTrainError: The ranks could not decide; the same on every rank.
        """
        if self._gate.closed:
            return False
        key = f"{self._rank}/{self._number}"
        try:
            self._mail.wait([key], _WAIT)
        except RuntimeError:  # every store raises a RuntimeError of its own kind when the time is up
            if not self._mail.check([key]):
                return True
        proposal = pickle.loads(self._mail.get(key))
        self._number += 1
        delete_keys(self._mail, [key])
        if proposal is None:
            return False
        self._agreed(proposal)
        return True

    def _agreed(self, proposal: Proposal) -> bool:
        """Vote on a proposal and return whether all ranks agreed; collective."""
        error = None
        self._voting = proposal.number  # before looking whether the gate is closed: see leave
        if not self._gate.promise(proposal):
            error = BoundaryPassed("the boundary can't be promised", rank=self._rank, got=proposal.boundary)
        agreed = False
        try:
            self._control.decide(str(proposal.number), error, phase="prepare", seconds=self._seconds)
            agreed = True
        except BoundaryPassed:
            logger.debug("boundary %d is too near", proposal.boundary)
        finally:
            self._gate.settle(proposal, agreed)
            self._voting = None
        return agreed

    def leave(self, store: Store) -> None:
        """Close the gate and let `propose` or `attend` of the watcher return; called by the training thread, local.

        Args:
            store: The shared store as the training thread uses it.
        """
        self._gate.close()
        self._left.set()
        if self._rank != self._control.ranks[0]:
            mail = PrefixStore(f"{self._tag}/mail", store)
            mail.set(f"{self._rank}/{self._number}", pickle.dumps(None))
        voting = self._voting
        if voting is not None:  # others may have left already, and will never vote
            control = ControlPlane(store, ranks=self._control.ranks, rank=self._rank, tag=f"{self._tag}/control")
            control.refuse(str(voting), BoundaryPassed("the training is over", rank=self._rank, phase="prepare"))

    def forget(self) -> None:
        """Delete what was written for this rank alone; after the watcher has ended. Local."""
        delete_keys(self._mail, [f"{self._rank}/{self._number}"])
