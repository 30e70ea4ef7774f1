"""Another world for one thread: it builds a target while the training thread goes on with the current world."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state as live
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.distributed import distributed_c10d

from megatron_dynatrain.elastic.redirect import in_family, redirected
from megatron_dynatrain.mcore.parallel_state import ParallelState


def builds_apart() -> bool:
    """Return whether this thread is inside `thread_world`: it must not touch what the process shares."""
    return in_family()


@contextmanager
def thread_world(state: ParallelState, group: object) -> Iterator[None]:
    """Let this thread alone see another parallel state and default group inside the block; local.

    All functions of `megatron.core.parallel_state`, its setters too, answer for `state`. `torch.distributed` without a
    group means `group`. Megatron's random tracker gives this thread no stream of its own to draw from: streams belong
    to the whole process, and what is built here is given its values later.

    Args:
        state: A state that was built apart and is not live.
        group: The default group of this thread; on NCCL a gloo group, as a communicator must not be used by two
            threads at once.
    """
    module = state.module
    functions: dict[types.FunctionType, Callable[..., Any]] = {
        function: getattr(module, name)
        for name, function in vars(live).items()
        if isinstance(function, types.FunctionType) and function.__module__ == live.__name__
    }
    default = type(distributed_c10d._world).default_pg.fget
    functions[default] = lambda _: group
    with redirected(functions), _no_random_streams():
        try:
            yield
        finally:
            state.take_values()


@contextmanager
def _no_random_streams() -> Iterator[None]:
    """Let the tracker's `fork` do nothing in this thread; a class attribute, so that callers can't have bound it."""
    stock = CudaRNGStatesTracker.fork

    def fork(self: CudaRNGStatesTracker, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        if in_family():
            return contextlib.nullcontext()
        return stock(self, *args, **kwargs)

    CudaRNGStatesTracker.fork = fork
    try:
        yield
    finally:
        CudaRNGStatesTracker.fork = stock
