"""Tensors asked for on a CUDA device are made on the CPU.

What: the `device=` and `pin_memory=` arguments of torch's factories, `Tensor.to`, `.cuda()`, `.pin_memory()`,
`.record_stream()` and `.type()`. Other devices (`meta`) pass unchanged.
Why: Megatron writes `device=torch.cuda.current_device()` (an int) and `.cuda()`, and compares `Tensor.type()` with
`torch.cuda.FloatTensor` to decide which parameters form a buffer.
Versions: megatron-core 0.19.x with torch 2.14. Can go: see `cpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
# fmt: off
_FACTORIES = (
    "tensor", "as_tensor", "scalar_tensor", "zeros", "ones", "empty", "empty_strided", "full", "eye", "arange",
    "linspace", "rand", "randn", "randint", "randperm",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
)
# fmt: on
_METHODS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")


def install() -> None:
    """Replace the functions; each process once."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    tensor: Any = torch.Tensor
    tensor.to = _to(torch.Tensor.to)
    tensor.type = _type(torch.Tensor.type)
    tensor.cuda = lambda self, *_args, **_kwargs: self
    tensor.pin_memory = lambda self, *_args, **_kwargs: self
    tensor.record_stream = lambda _self, *_args, **_kwargs: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_args, **_kwargs: self


def without_cuda(device: Any) -> Any:
    """Return the CPU for any spelling of a CUDA device (`0`, `"cuda:0"`, a `torch.device`), else the value itself."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = without_cuda(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapped


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (without_cuda(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = without_cuda(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and ".cuda." not in result:
            return result.replace("torch.", "torch.cuda.")
        return result

    return type_
