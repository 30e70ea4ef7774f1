"""What the test process and the fork server tell each other."""

from __future__ import annotations

import dataclasses
import pickle
import re
from multiprocessing.connection import Connection
from typing import Any

# What a rank reports because another one is gone; never the cause.
_PEER_GONE = re.compile(
    r"closed by peer|connection reset|connection refused|broken pipe|timed out waiting|recvbytes|sendbytes|"
    r"socket timeout|connect timeout|wait timeout|no answer",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One case: a function run on `world` fresh ranks."""

    world: int
    call: bytes  # pickled (function, arguments); unpickled in the ranks only
    timeout: float  # seconds
    directory: str
    sys_path: tuple[str, ...]
    init_group: bool
    may_die: frozenset[int]


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one rank: a pickled record, or an error."""

    rank: int
    record: bytes | None = None
    error: str | None = None  # "Type: message"
    traceback: str = ""
    died: bool = False

    @property
    def is_echo(self) -> bool:
        """Whether the error only says that a peer is gone."""
        return self.error is not None and bool(_PEER_GONE.search(self.error))


@dataclasses.dataclass(slots=True, kw_only=True)
class Report:
    """The outcomes of one case, by rank, and the ranks in the order in which they failed."""

    outcomes: list[Outcome]
    failed: list[int]
    timed_out: bool

    def cause(self) -> Outcome | None:
        """Return the first error that is not the echo of another, or None where nothing failed."""
        errors = [self.outcomes[rank] for rank in self.failed]
        return next((error for error in errors if not error.is_echo), errors[0] if errors else None)


def send(connection: Connection, message: object) -> None:
    """Send by plain pickle: multiprocessing's own pickler would pass tensors as shared memory of a dying process."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Return the next message; EOFError where the other side is gone."""
    return pickle.loads(connection.recv_bytes())
