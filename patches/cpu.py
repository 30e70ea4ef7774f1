"""Megatron on CPU and gloo: everything that a process without a GPU needs before it imports Megatron.

What: calls that name a CUDA device, stream, event or generator are answered by the CPU (`cpu_tensors`, `cpu_cuda_api`);
gloo gets the collectives it lacks (`cpu_collectives`); data loaders leave the random state alone (`cpu_data`); two
asserts of the modules without Transformer Engine are lifted (`cpu_modules`); `pretrain()` starts without a GPU
(`cpu_training`).
Why: Megatron has no device abstraction; `torch.cuda.*` is called throughout. A `TorchFunctionMode` would be neater but
is thread-local, and Megatron builds its data sets in threads (`--num-dataset-builder-threads`): the patches are global.
Versions: megatron-core 0.19.x with torch 2.14.
Can go: when Megatron runs on `--device cpu` by itself.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import torch

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.patches import cpu_collectives, cpu_cuda_api, cpu_data, cpu_tensors

_installed = False


def install(*, force: bool = False) -> bool:
    """Make this process run Megatron on its CPU; return whether it does so now.

    Does nothing where a CUDA device is present, and nothing the second time. Runs in each process by itself, and before
    the first import of `megatron.core`. Not collective.

    Args:
        force: Use the CPU although a CUDA device is present; only in a process that has not touched the device yet.

    Raises:
        StateError: Megatron was imported before, or `force` comes after CUDA was initialised.
    """
    global _installed
    if _installed:
        return True
    if torch.cuda.is_available() and not force:
        return False
    _check_order()
    cpu_tensors.install()
    cpu_cuda_api.install()
    cpu_collectives.install()
    cpu_data.install()
    _installed = True
    install_megatron()
    return True


def install_megatron() -> None:
    """Apply the parts that change Megatron's own modules; `install` calls it.

    Raises:
        StateError: Called without `install`.
    """
    if not _installed:
        raise StateError("the CPU patches of Megatron need those of torch first", hint="call install()")
    from megatron_dynatrain.patches import cpu_modules

    cpu_modules.install()
    if importlib.util.find_spec("megatron.training") is not None:
        from megatron_dynatrain.patches import cpu_training

        cpu_training.install()


def installed() -> bool:
    """Return whether this process runs Megatron on its CPU."""
    return _installed


def _check_order() -> None:
    if torch.cuda.is_initialized():
        raise StateError("the CPU patches came after CUDA was initialised", hint="install them first")
    if "megatron.core.jit" in sys.modules:
        raise StateError(
            "Megatron was imported before the CPU patches, so its fused functions are already compiled ones",
            subject="megatron.core",
            hint="call megatron_dynatrain.patches.cpu.install() before importing megatron",
        )
    # Megatron asserts the variable for some flags; on a CPU it changes nothing.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
