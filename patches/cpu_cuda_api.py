"""`torch.cuda` answers for one device that is the CPU.

What: device queries, streams, events, the random generator, nvtx ranges and `torch.compile`.
Why: `device_count()` must be 1, else `megatron.training.initialize` skips the model-parallel groups. There is one
generator, the CPU's, so every CUDA generator call means that one. `torch.compile` is Megatron's `jit_fuser`: compiling
takes longer than the small models it would serve.
Every name gets a function object of its own: torch._dynamo's rule map refuses one object under two names.
Versions: megatron-core 0.19.x with torch 2.14. Can go: see `cpu`.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable
from typing import Any

import torch

_CAPABILITY = (8, 0)


class Event:
    """A point in time on the CPU, with the interface of `torch.cuda.Event`."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._at: float | None = None

    def record(self, *_args: Any, **_kwargs: Any) -> None:
        """Note the current time."""
        self._at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds from this event to the other."""
        if self._at is None or other._at is None:
            raise RuntimeError("both events must be recorded before their elapsed time is asked for")
        return (other._at - self._at) * 1e3

    def query(self) -> bool:
        """Return True: work on the CPU is done when its call returns."""
        return True

    def wait(self, *_args: Any, **_kwargs: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class Stream:
    """The one order in which the CPU works, with the interface of `torch.cuda.Stream`."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def query(self) -> bool:
        """Return True: nothing is ever pending."""
        return True

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record and return the event, a new one where none is given."""
        event = event or Event()
        event.record()
        return event


def install() -> None:
    """Replace the functions; each process once."""
    cuda = torch.cuda
    properties = types.SimpleNamespace(
        major=_CAPABILITY[0], minor=_CAPABILITY[1], name="cpu", total_memory=0, multi_processor_count=1
    )
    _put(cuda, "is_available is_current_stream_capturing", _constant(False))
    _put(cuda, "current_device device_memory_used", _constant(0))
    _put(cuda, "device_count", _constant(1))
    _put(cuda, "set_device synchronize empty_cache set_stream ipc_collect", _constant(None))
    _put(cuda, "current_stream default_stream", _constant(Stream()))
    _put(cuda, "stream", lambda: lambda *_args, **_kwargs: contextlib.nullcontext())
    _put(cuda, "get_device_capability", _constant(_CAPABILITY))
    _put(cuda, "mem_get_info", _constant((0, 0)))
    _put(cuda, "get_device_name", _constant("cpu"))
    _put(cuda, "get_device_properties", _constant(properties))
    _put(cuda, "Stream", lambda: Stream)
    _put(cuda, "Event", lambda: Event)
    for module in (cuda, cuda.random):
        _put(module, "get_rng_state", lambda: lambda *_args, **_kwargs: torch.get_rng_state())
        _put(module, "set_rng_state", lambda: lambda state, *_args, **_kwargs: torch.set_rng_state(state))
        _put(module, "manual_seed manual_seed_all", lambda: _manual_seed())
    _put(cuda.nvtx, "range_push range_pop", _constant(None))
    _put(torch, "compile", lambda: _compile)


def _put(module: Any, names: str, make: Callable[[], Any]) -> None:
    for name in names.split():
        setattr(module, name, make())


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: lambda *_args, **_kwargs: value


def _manual_seed() -> Callable[[int], None]:
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    return manual_seed


def _compile(function: Any = None, **_kwargs: Any) -> Any:
    return function if function is not None else lambda wrapped: wrapped
