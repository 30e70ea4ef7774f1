"""What is kept of every switch: one JSON object a line in `switches.jsonl`, one readable line, TensorBoard values."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from megatron_dynatrain.errors import StateError

FILE_NAME = "switches.jsonl"
"""Name of the file in the directory of `--dynamic-parallelism-dir`."""

Outcome = Literal["committed", "aborted", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRecord:
    """One switch, as rank 0 writes it.

    Args:
        iteration: Completed iterations at the boundary.
        source: The layout before (`from` in the file), as `ParallelLayout.describe()` gives it.
        target: The layout asked for (`to` in the file).
        trigger: What asked for it, e.g. `at_iteration: 100`.
        outcome: Whether the job trains under the target now; a refused one moved nothing, an aborted one was rolled
            back.
        error: Why not, where it didn't commit.
        ahead_s: Seconds of preparation in the background while training went on, on the rank that writes; 0 without.
        prepare_s: Seconds of preparation on the rank that writes for which training stood; part of the stall.
        stall_s: Seconds from the end of the last step under the old layout to the start of the first under the new.
        transfer_s: Seconds in which bytes moved, on the rank that writes.
        moved_bytes: Bytes that crossed between ranks, of all ranks.
        minimum_bytes: The least that had to: bytes whose target rank didn't hold them.
        local_bytes: Bytes copied inside ranks, of all ranks.
        max_send_bytes: Bytes sent by the rank that sent most.
        max_recv_bytes: Bytes received by the rank that received most.
        windows: Number of windows of the plan, the same on every rank.
        peak_bytes: State of both layouts and staging, by arithmetic, of the rank that needs most.
        peak_step_bytes: State and gradients of the layout before, by arithmetic, of the rank that holds most.
        memory_mode: `safe` or `lean`.
        verify: `off`, `digest` or `full`.
        number: Number of the switch among those committed, from 1; one that wasn't committed has that of the next.
        streams: Where the random streams come from: `kept by coordinate`, or `new:` with the base seed.
    """

    iteration: int
    source: str = field(metadata={"key": "from"})
    target: str = field(metadata={"key": "to"})
    trigger: str
    outcome: Outcome
    error: str | None = None
    ahead_s: float | None = None
    prepare_s: float | None = None
    stall_s: float | None = None
    transfer_s: float | None = None
    moved_bytes: int | None = None
    minimum_bytes: int | None = None
    local_bytes: int | None = None
    max_send_bytes: int | None = None
    max_recv_bytes: int | None = None
    windows: int | None = None
    peak_bytes: int | None = None
    peak_step_bytes: int | None = None
    memory_mode: str | None = None
    verify: str | None = None
    number: int | None = None
    streams: str | None = None

    def as_json(self) -> dict[str, object]:
        """Return the object of the file, with its keys in the order of the documentation."""
        return {key: getattr(self, name) for key, name in _KEYS.items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SwitchRecord:
        """Return the record of an object of the file; keys of later versions are passed over.

        Raises:
            StateError: A key that every record has is missing.
        """
        missing = [key for key in _REQUIRED if key not in data]
        if missing:
            raise StateError("a record of a switch lacks keys", expected=", ".join(_REQUIRED), got=", ".join(data))
        return cls(**{name: data[key] for key, name in _KEYS.items() if key in data})


_KEYS = {item.metadata.get("key", item.name): item.name for item in fields(SwitchRecord)}
"""Key in the file to field name; `from` is a word of Python."""

_REQUIRED = ("iteration", "from", "to", "trigger", "outcome")

RECORD_KEYS: tuple[str, ...] = tuple(_KEYS)
"""The keys of an object of the file."""


def append_record(directory: str | os.PathLike[str], record: SwitchRecord) -> Path:
    """Append one record to `switches.jsonl` in a directory, which is made where it is missing; rank 0 only.

    The line goes out in one write and is on disk when this returns, so that a reader (or a job killed right after)
    sees a whole line or none. A line that an earlier kill cut short is closed first.

    Raises:
        OSError: The file can't be written.
    """
    path = Path(directory) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record.as_json(), ensure_ascii=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def read_records(path: str | os.PathLike[str]) -> tuple[SwitchRecord, ...]:
    """Read the records of a `switches.jsonl`, or of the directory that holds it.

    The beginning of an object, cut short by a kill (the last line, or one before a restart), is passed over.

    Raises:
        OSError: The file can't be read.
        StateError: A line that is anything else than a record or the beginning of one, named by its number.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    records = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError:
            if line.startswith(b"{"):
                continue
            raise StateError("a line is not a JSON object", subject=f"{file}:{number}", got=line[:80]) from None
        if not isinstance(data, dict):
            raise StateError("a line is not a JSON object", subject=f"{file}:{number}", got=line[:80])
        records.append(SwitchRecord.from_json(data))
    return tuple(records)


def format_line(record: SwitchRecord) -> str:
    """Return the record as one readable line, e.g. for rank 0's log."""
    head = f"switch at iteration {record.iteration}: {record.source} -> {record.target} {record.outcome}"
    parts = [head]
    if record.stall_s is not None:
        parts.append(f"stall {record.stall_s:.3f} s")
    if record.moved_bytes is not None:
        moved = f"moved {format_bytes(record.moved_bytes)}"
        if record.minimum_bytes is not None:
            moved += f" (minimum {format_bytes(record.minimum_bytes)})"
        parts.append(moved)
    if record.windows is not None:
        parts.append(f"{record.windows} {'window' if record.windows == 1 else 'windows'}")
    if record.peak_bytes is not None:
        parts.append(f"peak {format_bytes(record.peak_bytes)}")
    if record.memory_mode is not None:
        parts.append(record.memory_mode)
    if record.verify is not None:
        parts.append(f"verify {record.verify}")
    text = ", ".join(parts)
    return f"{text}: {' '.join(record.error.split())}" if record.error else text


def format_bytes(count: int) -> str:
    """Return a number of bytes with a binary unit, e.g. `1.5 MiB`."""
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def tensorboard_scalars(record: SwitchRecord) -> dict[str, float]:
    """Return what is known of the switch as TensorBoard scalars: tag to value."""
    values = {
        "stall-seconds": record.stall_s,
        "ahead-seconds": record.ahead_s,
        "prepare-seconds": record.prepare_s,
        "transfer-seconds": record.transfer_s,
        "moved-bytes": record.moved_bytes,
        "minimum-bytes": record.minimum_bytes,
        "peak-bytes": record.peak_bytes,
    }
    scalars = {f"dynamic-parallelism/{tag}": float(value) for tag, value in values.items() if value is not None}
    scalars["dynamic-parallelism/committed"] = float(record.outcome == "committed")
    return scalars


def tensorboard_text(record: SwitchRecord) -> dict[str, str]:
    """Return the switch as TensorBoard text: tag to text; the layout is the one trained under afterwards."""
    layout = record.target if record.outcome == "committed" else record.source
    return {"dynamic-parallelism/layout": layout, "dynamic-parallelism/switch": format_line(record)}
