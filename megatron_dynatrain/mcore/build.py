"""Build a target world without storage: hollow tensors in modules, DDP buffers and optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

from megatron_dynatrain.errors import UnsupportedError
from megatron_dynatrain.mcore.thread_world import builds_apart

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
    """Let big tensors have one element of storage: right shape, dtype and device, no bytes, and nobody writes to them.

    The factories in `factories` give such tensors. Copies and casts of hollow tensors are hollow, in-place calls on
    them do nothing. `torch.device("meta")` does not do it: Megatron's layers name their device, and DDP and optimizer
    need tensors of the real one. Thread-local.
    """

    def __init__(self, *, draws: bool = True) -> None:
        super().__init__()
        self.factories = frozenset((_EMPTY,))
        self._draws = draws

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _unwrapped(func) in self.factories:
            shape = _shape(args, kwargs)
            kwargs.pop("memory_format", None)
            return func((), **kwargs).expand(*shape) if shape else func((), **kwargs)
        first = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes its tensor by name
        name = getattr(func, "__name__", "")
        if name in _FILLS and isinstance(first, torch.Tensor) and first.numel() <= 1:
            return first  # of one element, which can't be hollow; the switch sets it
        if not self._draws and (name in _DRAWS or (name in _FILLS and not is_hollow(first))):
            raise UnsupportedError(
                "random numbers are drawn while a target is built, which would change those of the running steps",
                subject=f"torch.{name}",
                hint="set --dynamic-parallelism-prepare-ahead 0, or draw in an init_method only",
            )
        if not is_hollow(first):
            return func(*args, **kwargs)
        if _writes(func):
            return first
        if name in _COPIES:
            return _of_one_element(func, args, kwargs)
        return func(*args, **kwargs)


_EMPTY, _ZEROS = _unwrapped(torch.empty), _unwrapped(torch.zeros)
_FILLS = frozenset(
    (
        "normal_",
        "uniform_",
        "random_",
        "trunc_normal_",
        "kaiming_uniform_",
        "kaiming_normal_",
        "xavier_uniform_",
        "xavier_normal_",
        "bernoulli_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
        "orthogonal_",
    )
)
"""Fillings with random numbers, of tensors and of torch.nn.init."""
_DRAWS = frozenset(
    (
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal",
        "bernoulli",
        "multinomial",
        "poisson",
        "dropout",
        "alpha_dropout",
        "rrelu",
        "gumbel_softmax",
        "manual_seed",
        "feature_dropout",
    )
)
_COPIES = frozenset(("clone", "contiguous", "to", "float", "half", "bfloat16", "cuda", "cpu", "pin_memory"))


class NoDraws(TorchFunctionMode):
    """Refuse torch's random numbers in this thread, where another one trains and draws from the same streams."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DRAWS or name in _FILLS:
            raise UnsupportedError(
                "random numbers are drawn while data sets are opened, which would change those of the running steps",
                subject=f"torch.{name}",
                hint="set --dynamic-parallelism-prepare-ahead 0, or draw from a generator of your own in NumPy",
            )
        return func(*args, **(kwargs or {}))


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    given = kwargs.pop("size", None)
    if given is None:
        given = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
    return tuple(given)


def _of_one_element(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy or cast the one element that a hollow tensor has, and expand it again."""
    tensor = args[0]
    one = tensor.detach()[(0,) * tensor.dim()]
    result = func(one, *args[1:], **kwargs)
    return result.expand(tensor.shape) if isinstance(result, torch.Tensor) else result


def _writes(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITES


@contextmanager
def hollow_build() -> Iterator[None]:
    """Build Megatron chunks, DDP and optimizer inside the block without storage, collectives or random numbers.

    Random streams (Python, NumPy, torch, CUDA and Megatron's tracker) are put back at the end of the block. Inside
    `thread_world`, where another thread trains meanwhile, drawing from torch's streams is refused instead. The
    all-reduce by which a tied output layer fetches its first values is left out: the values come with the switch.
    DDP's buffers and the optimizer's main parameters are hollow too; `mcore.realize` gives them storage.
    """
    setup, make_buffer = LanguageModule.setup_embeddings_and_output_layer, _ParamAndGradBuffer.__init__
    wrap = DistributedDataParallel.__init__
    apart = builds_apart()
    mode = Hollow(draws=not apart)

    def wrap_with_ddp(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        # The modules are made: what is allocated from here on, such as messages of a gather, is for use. Not only the
        # buffers say so: a stage without trainable parameters has none.
        mode.factories = frozenset()
        wrap(self, *args, **kwargs)

    def make_hollow_buffer(self: _ParamAndGradBuffer, *args: Any, **kwargs: Any) -> None:
        mode.factories = frozenset((_ZEROS,))
        try:
            make_buffer(self, *args, **kwargs)
        finally:
            mode.factories = frozenset()

    def setup_without_collective(self: LanguageModule) -> None:
        before = self.config.init_model_with_meta_device
        self.config.init_model_with_meta_device = True
        try:
            setup(self)
        finally:
            self.config.init_model_with_meta_device = before

    with nullcontext() if apart else untouched_random_streams():
        LanguageModule.setup_embeddings_and_output_layer = setup_without_collective
        _ParamAndGradBuffer.__init__ = make_hollow_buffer
        DistributedDataParallel.__init__ = wrap_with_ddp
        try:
            with mode:
                yield
        finally:
            LanguageModule.setup_embeddings_and_output_layer = setup
            _ParamAndGradBuffer.__init__ = make_buffer
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
