"""Megatron's HybridDeviceOptimizer (`--optimizer-cpu-offload`): parts of a shard list stepped on the host.

It keeps an optimizer per part, and maps each shard to the tensor that a part really steps: a copy on the host, an fp32
copy of a 16-bit shard, or both. A part's state dict and the hybrid's own are one dict under two keys. Which shards are
on the host follows from their order and sizes, so it changes with the layout; a state moves to wherever the target's
optimizer has it. Every function takes a plain optimizer too, which is its only part.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_dynatrain.mcore.build import is_hollow

Optimizer = torch.optim.Optimizer


def is_hybrid(optimizer: Optimizer) -> bool:
    """Return whether an optimizer spreads its parameters over other optimizers."""
    return type(optimizer) is HybridDeviceOptimizer


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that step."""
    return list(optimizer.sub_optimizers) if is_hybrid(optimizer) else [optimizer]


def inner_of(optimizer: Optimizer, shard: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is stepped for a shard."""
    return optimizer.param_to_inner_param[shard] if is_hybrid(optimizer) else shard


def part_with(optimizer: Optimizer, shard: torch.Tensor) -> Optimizer:
    """Return the optimizer that steps a shard."""
    return _place(optimizer, shard)[0] if is_hybrid(optimizer) else optimizer


def group_with(optimizer: Optimizer, shard: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Return the parameter group in which a shard is stepped; `group` is that of a plain optimizer."""
    return _place(optimizer, shard)[1] if is_hybrid(optimizer) else group


def _place(optimizer: Optimizer, shard: torch.Tensor) -> tuple[Optimizer, dict[str, Any]]:
    inner = inner_of(optimizer, shard)
    return next(
        (part, group)
        for part in optimizer.sub_optimizers
        for group in part.param_groups
        if _has(group["params"], inner)
    )


def _has(tensors: list[torch.Tensor], one: torch.Tensor) -> bool:
    return any(tensor is one for tensor in tensors)


def set_state(optimizer: Optimizer, shard: torch.Tensor, state: dict[str, Any]) -> None:
    """Replace the state of a shard: one dict, seen by the optimizer and by the part that steps the shard."""
    optimizer.state[shard] = state
    if is_hybrid(optimizer):
        part_with(optimizer, shard).state[inner_of(optimizer, shard)] = state


def realize(optimizer: Optimizer) -> None:
    """Give storage to hollow copies of shards; local, values are not set."""
    if not is_hybrid(optimizer):
        return
    for inner in optimizer.param_to_inner_param.values():
        if is_hollow(inner):
            inner.data = torch.empty(inner.shape, dtype=inner.dtype, device=inner.device, pin_memory=inner.is_pinned())
