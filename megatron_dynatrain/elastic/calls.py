"""How ranks outside of the current world are called to a switch: a queue for each of them, in a store."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed import PrefixStore

from megatron_dynatrain.elastic.groups import delete_keys

if TYPE_CHECKING:
    from torch.distributed import Store

_SLICE_S = 86400.0
"""Seconds of one wait in the store; the rank sleeps in it. torch logs a warning whenever such a wait runs out."""


@dataclass(frozen=True)
class Call:
    """What a rank outside of the world is told; every call says all that the rank must know.

    Args:
        stage: `prepare` and `switch` ask for the same call of the rank; `cancel` drops what was prepared; `end` says
            that there will be no further call.
        attempt: Number of the attempt.
        apart: Whether the attempt is prepared beside training.
        committed: Switches committed so far.
        source: The layout of the current world.
        target: The layout to go to.
        description: The model, as it is under the source.
        lost: Ranks that are gone for good.
        note: What else the caller wants the rank to know; picklable.
    """

    stage: Literal["prepare", "switch", "cancel", "end"]
    attempt: int = 0
    apart: bool = False
    committed: int = 0
    source: Any = None
    target: Any = None
    description: Any = None
    lost: frozenset[int] = frozenset()
    note: Any = None


class Calls:
    """A queue of calls for each rank.

    Args:
        store: Store that all ranks share.
        tag: Prefix of the keys.
        rank: This process's global rank.
    """

    def __init__(self, store: Store, *, tag: str, rank: int) -> None:
        self._store = PrefixStore(f"{tag}/", store)
        self.rank = rank
        self._read = 0

    def send(self, ranks: Iterable[int], call: Call) -> None:
        """Put a call at the end of each rank's queue; local, by one rank of the current world at a time."""
        for rank in ranks:
            number = self._store.add(f"sent/{rank}", 1)
            self._store.set(f"call/{rank}/{number}", pickle.dumps(call))

    def next(self, seconds: float | None = None) -> Call | None:
        """Return the next call for this rank, in order; None where none came in time. Local; asleep while it waits."""
        key = f"call/{self.rank}/{self._read + 1}"
        end = None if seconds is None else time.monotonic() + seconds
        while not self._store.check([key]):
            left = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
            if left <= 0:
                return None
            with contextlib.suppress(RuntimeError):  # every store raises a kind of its own when the time is up
                self._store.wait([key], timedelta(seconds=max(left, 0.01)))
        self._read += 1
        call: Call = pickle.loads(self._store.get(key))
        delete_keys(self._store, [key])
        return call
