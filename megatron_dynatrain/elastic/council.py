"""What the ranks of one attempt do together: parts of phases that end in a vote, and gathers of small values."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_dynatrain.elastic.control import ControlPlane
from megatron_dynatrain.errors import DynaTrainError, SwitchCancelled

logger = logging.getLogger(__name__)


class Council:
    """A control plane with the names, the deadline and the hook of one attempt.

    Used by one thread at a time, on every rank of the control plane in the same order.

    Args:
        control: The control plane; it may serve several councils, one after the other.
        prefix: What tells the names of this council from those of all others on the same control plane.
        seconds: Longest wait for the other ranks in each call, in seconds.
        on_phase: Called with the name of each part as it begins.

    Attributes:
        cancelled: Set from any thread: this rank then votes against the next part, and so ends all of them.
        on_failure: Called where this rank fails, before it says so: others may wait for it in a collective.
    """

    def __init__(self, control: ControlPlane, *, prefix: str, seconds: float, on_phase: Callable[[str], None]) -> None:
        self._control = control
        self._prefix = prefix
        self._seconds = seconds
        self._on_phase = on_phase
        self._vote: str | None = None
        self.cancelled = False
        self.on_failure: Callable[[], None] = _nothing

    @contextmanager
    def phase(self, phase: str, name: str) -> Iterator[None]:
        """Run a part of a phase, then go on or fail together with all ranks; collective.

        Raises:
            DynaTrainError: The first failure of any rank, the same on every rank.
        """
        error: BaseException | None = None
        rank = self._control.rank
        self._vote = f"{self._prefix}/{phase}/{name}"
        try:
            if self.cancelled:
                raise SwitchCancelled("the preparation of a switch was cancelled", rank=rank, phase=phase)
            self._on_phase(f"{phase}/{name}")
            yield
        except Exception as caught:
            logger.debug("rank %d: %s/%s failed", rank, phase, name, exc_info=True)
            error = caught
            traceback.clear_frames(caught.__traceback__)  # their variables would keep groups open
            try:
                self.on_failure()
            except Exception:  # the others wait for the vote, and the first error is the one to tell
                logger.exception("rank %d: could not let go of everything after %s/%s failed", rank, phase, name)
        try:
            self._control.decide(self._vote, error, phase=phase, seconds=self._seconds)
        except DynaTrainError as verdict:
            raise verdict from error
        finally:
            self._vote = None
            del error  # else it and the frames it refers to keep a dropped world alive

    def gather(self, name: str, value: object, *, phase: str = "prepare") -> Mapping[int, Any]:
        """Return a small value of every rank, by rank; collective, once per name, inside a phase."""
        return self._control.gather(
            f"{self._prefix}/{name}", value, phase=phase, seconds=self._seconds, vote=self._vote
        )

    def same(self, name: str, value: object, *, phase: str = "check") -> None:
        """Check that every rank has an equal value; collective, once per name.

        Raises:
            AgreementError: Names the first rank that has another one, the same on every rank.
        """
        with self.phase(phase, f"same {name}"):
            self._control.same(f"{self._prefix}/{name}", value, phase=phase, seconds=self._seconds, vote=self._vote)


def _nothing() -> None:
    """Do nothing."""
