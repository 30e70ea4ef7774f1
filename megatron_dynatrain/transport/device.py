"""The one place that knows streams: where staging memory lives and in which order copies and messages run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from megatron_dynatrain.transport.base import Deadline

_POLL = 0.0005
"""Seconds between two looks at a GPU event; a blocking wait on it would know no deadline."""


class Copies(Protocol):
    """Copies between state and staging, ordered against the messages of a transport."""

    device: torch.device

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return staging memory, as flat uint8."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Return the context in which state and staging are copied."""
        ...

    def before_exchange(self, staging: Iterable[torch.Tensor]) -> None:
        """Order what the transport does next after the copies so far; `staging` is what it will read or fill."""
        ...

    def after_exchange(self) -> None:
        """Order the next copies after what the transport has done."""
        ...

    def finish(self, deadline: Deadline, *, rank: int) -> None:
        """Wait until all copies are done."""
        ...


class HostCopies:
    """On a CPU everything is done when the call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return staging memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copying(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def before_exchange(self, staging: Iterable[torch.Tensor]) -> None:
        """Do nothing."""

    def after_exchange(self) -> None:
        """Do nothing."""

    def finish(self, deadline: Deadline, *, rank: int) -> None:
        """Do nothing."""


class CudaCopies:
    """Copies on a side stream; the transport works on the current stream. No host wait except in `finish`.

    Args:
        device: GPU of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What training has queued on the state comes first.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return staging memory, allocated for the side stream."""
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copying(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to the side stream."""
        return torch.cuda.stream(self._stream)

    def before_exchange(self, staging: Iterable[torch.Tensor]) -> None:
        """Let the current stream wait for the copies, and keep the allocator from reusing staging under it."""
        current = torch.cuda.current_stream(self.device)
        for tensor in staging:
            tensor.record_stream(current)
        current.wait_stream(self._stream)

    def after_exchange(self) -> None:
        """Let the side stream wait for what the transport queued on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def finish(self, deadline: Deadline, *, rank: int) -> None:
        """Wait for the side stream, and order the current stream after it."""
        done = self._stream.record_event()
        while not done.query():
            deadline.check("transfer", "copies on the GPU", rank=rank)
            time.sleep(_POLL)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)


def copies_for(*memories: Mapping[str, torch.Tensor]) -> Copies:
    """Return how to copy for the device that the memories are on; the CPU where they have nothing on a GPU."""
    on_gpu = (t.device for memory in memories for t in memory.values() if t.device.type == "cuda")
    device = next(on_gpu, None)
    return HostCopies() if device is None else CudaCopies(device)


def current_gpu() -> int | None:
    """Return the index of this thread's GPU; None on the CPU. Local."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def use_gpu(index: int | None) -> None:
    """Let this thread use a GPU, as the thread that asked `current_gpu`: CUDA keeps the device per thread. Local."""
    if index is not None:
        torch.cuda.set_device(index)
