"""Imports of the ranks of te-check: the CPU patches first, then Transformer Engine and Megatron as on a GPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any


def import_all() -> None:
    """Import torch, the CPU patches, Transformer Engine and Megatron; one thread may exist afterwards."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        torch.set_num_threads(1)
        from megatron_dynatrain.patches import cpu

        _mamba_without_its_init()
        cpu.install()
        with a_gpu():
            import transformer_engine.pytorch  # noqa: F401

            import tests.te.job  # noqa: F401


def _mamba_without_its_init() -> None:
    """Let `mamba_ssm` be imported without its __init__, which wants a compiled CUDA extension and a model hub.

    Megatron uses two of its Triton operators, and only their forward pass would need a GPU.
    """
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is not None and spec.submodule_search_locations is not None:
        package = types.ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations)
        package.__version__ = importlib.metadata.version("mamba_ssm")  # type: ignore[attr-defined]
        sys.modules["mamba_ssm"] = package


def from_now_on_a_gpu() -> None:
    """Let torch say that a GPU is there, with enough memory."""
    import torch

    cuda: Any = torch.cuda
    cuda.mem_get_info = lambda *_: (2**40, 2**40)
    cuda.is_available, cuda.get_device_capability = (lambda: True), (lambda *_: (9, 0))


@contextlib.contextmanager
def a_gpu() -> Iterator[None]:
    """Let torch say that a GPU is there: Transformer Engine's layers can't be made otherwise."""
    import torch

    cuda: Any = torch.cuda
    kept = cuda.is_available, cuda.get_device_capability
    from_now_on_a_gpu()
    try:
        yield
    finally:
        cuda.is_available, cuda.get_device_capability = kept
