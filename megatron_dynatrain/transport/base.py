"""What a transport is, and the deadline that bounds every wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from megatron_dynatrain.errors import DeadlineError

if TYPE_CHECKING:
    import torch


_TICK = 0.001
"""Shortest wait of torch.distributed, in seconds."""


class Deadline:
    """A point in time, on the monotonic clock, until which something may wait.

    Args:
        seconds: From now.
        clock: Seconds of a clock that never goes back; for tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def remaining(self) -> float:
        """Return the seconds left; 0 once it has passed."""
        return max(0.0, self._end - self._clock())

    def passed(self) -> bool:
        """Return whether it has passed, or has too little left to wait once more (waits count whole milliseconds)."""
        return self.remaining() < _TICK

    def wait_limit(self) -> timedelta:
        """Return the time left for a wait of torch.distributed: at least 1 ms, because 0 means no limit there."""
        return timedelta(seconds=max(self.remaining(), _TICK))

    def check(self, phase: str, subject: str, *, rank: int | None = None) -> None:
        """Raise if it has passed.

        Raises:
            DeadlineError: It has passed; names the phase and what was waited for.
        """
        if self.passed():
            raise DeadlineError(
                "the deadline has passed",
                rank=rank,
                phase=phase,
                subject=subject,
                expected=f"done within {self.seconds:g} s",
                hint="see the logs of the other ranks, or raise --dynamic-parallelism-timeout",
            )


class Transport(Protocol):
    """Exchanges the bytes of one window between this rank and its peers."""

    rank: int

    def exchange(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        *,
        deadline: Deadline,
        label: str = "",
    ) -> None:
        """Send and receive messages; return when all of them have arrived.

        Every rank of the plan calls it for the same windows in the same order; a rank without messages may skip the
        call. Sent tensors may be changed, and received ones read, once it has returned (on a GPU: by work queued on
        the current stream after it).

        Args:
            sends: Per peer (global rank), contiguous uint8 tensors, in the order in which the peer receives them.
            receives: Per peer, contiguous uint8 tensors to fill; sizes equal those the peer sends. Empty tensors are
                skipped on both sides.
            deadline: Limit of every wait.
            label: What is exchanged, for errors.

        Raises:
            TransferError: A peer failed or sent something else; names the peer.
            DeadlineError: A peer did not answer in time; names the peer. After either error the transport must not be
                used again.
        """
        ...
