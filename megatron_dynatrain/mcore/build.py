"""Build a target model without storage for its parameters: hollow tensors that DDP replaces by its own buffers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

_NOT_WRITES = frozenset(("requires_grad_", "detach_", "share_memory_"))
"""Methods that end in an underscore and write no element."""


def _unwrapped(function: Callable[..., object]) -> Callable[..., object]:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def is_hollow(tensor: object) -> bool:
    """Return whether a tensor has more than one element in a storage of one element."""
    return isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and not any(tensor.stride())


class Hollow(TorchFunctionMode):
    """Make `torch.empty` return one element expanded to the shape, and let nobody write to it.

    Such a tensor has the right shape, dtype and device and no bytes. `torch.device("meta")` does not do it: Megatron's
    layers name their device, and DDP needs parameters of the real device. Thread-local.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if _unwrapped(func) is _EMPTY:
            shape = tuple(kwargs.pop("size", ())) or (
                args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            )
            kwargs.pop("memory_format", None)
            return func((), **kwargs).expand(*shape) if len(shape) else func((), **kwargs)
        written = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes its tensor by name
        if _writes(func) and is_hollow(written):
            return written
        return func(*args, **kwargs)


_EMPTY = _unwrapped(torch.empty)


def _writes(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITES


@contextmanager
def hollow_build() -> Iterator[None]:
    """Build Megatron modules inside the block without storage, without a collective and without drawing random numbers.

    Random streams (Python, NumPy, torch, CUDA and Megatron's tracker) are put back at the end of the block. The
    all-reduce by which a tied output layer fetches its first values is left out: the values come with the switch.
    From the first DDP on, tensors are real: its buffers and the optimizer's shards are what the switch fills.
    """
    setup, wrap = LanguageModule.setup_embeddings_and_output_layer, DistributedDataParallel.__init__
    mode = Hollow()

    def wrap_for_real(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        mode.active = False
        wrap(self, *args, **kwargs)

    def setup_without_collective(self: LanguageModule) -> None:
        before = self.config.init_model_with_meta_device
        self.config.init_model_with_meta_device = True
        try:
            setup(self)
        finally:
            self.config.init_model_with_meta_device = before

    with untouched_random_streams():
        LanguageModule.setup_embeddings_and_output_layer = setup_without_collective
        DistributedDataParallel.__init__ = wrap_for_real
        try:
            with mode:
                yield
        finally:
            LanguageModule.setup_embeddings_and_output_layer = setup
            DistributedDataParallel.__init__ = wrap


@contextmanager
def untouched_random_streams() -> Iterator[None]:
    """Put every random stream of the process back to where it was before the block."""
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    initialized = megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED
    tracker = megatron_random.get_cuda_rng_tracker() if initialized else None
    states = {name: state.clone() for name, state in tracker.get_states().items()} if tracker is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        if tracker is not None and states is not None:
            tracker.set_states(states)


def materialize(chunks: Sequence[torch.nn.Module]) -> None:
    """Give storage to the parameters that no DDP buffer holds: frozen ones; local, values are not set."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            if is_hollow(parameter):
                parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
