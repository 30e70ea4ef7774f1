"""Give storage to a world that was built hollow: parameters and optimizer state before the transfer, gradients last.

Megatron's objects keep their identity: only what they point to is replaced, so hooks, maps and groups stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.mcore.build import is_hollow
from megatron_dynatrain.mcore.inner_optimizers import realize_inner
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import ModelDescription


def buffers_of(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield every DDP buffer of the chunks with its chunk; local."""
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield chunk, buffer


def realize_state(chunks: Sequence[torch.nn.Module], optimizers: Sequence[DistributedOptimizer]) -> None:
    """Give storage to parameters, main parameters and moments; local, values are not set (padding is zero)."""
    for chunk, buffer in buffers_of(chunks):
        if buffer.param_data is not None and is_hollow(buffer.param_data):
            _realize_parameters(chunk, buffer)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if is_hollow(parameter):  # a frozen parameter: no DDP buffer holds it
                parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    for optimizer in optimizers:
        _realize_optimizer(optimizer)
    for chunk in chunks:
        attributes = ((f"{path}.{name}", v) for path, m in chunk.named_modules() for name, v in vars(m).items())
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers(), *attributes]:
            if is_hollow(tensor):
                raise StateError("a tensor of the target has no storage that the switch could fill", subject=name)


def _realize_parameters(chunk: torch.nn.Module, buffer: Any) -> None:
    data = torch.zeros(buffer.numel, dtype=buffer.param_dtype, device=buffer.param_data.device)
    buffer.param_data = data
    for bucket in buffer.buckets:
        bucket.param_data = data[bucket.offset : bucket.offset + bucket.grad_data.numel()]
    for parameter, (start, end, _) in buffer.param_index_map.items():
        parameter.data = data[start:end].view(parameter.shape)
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        group.cached_param_buffer_shard_list = [None] * len(group.buckets)


def _realize_optimizer(optimizer: DistributedOptimizer) -> None:
    pairs = [*zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True)]
    pairs += zip(optimizer.model_float16_groups, optimizer.shard_float16_groups, strict=True)
    for parameters, shards in pairs:
        for parameter, shard in zip(parameters, shards, strict=True):
            if shard is not None:
                span = optimizer._get_model_param_range_map(parameter)["param"]
                shard.data = parameter.detach().view(-1)[span.start : span.end]
    for mains in optimizer.shard_fp32_from_float16_groups:
        for main in mains:
            if main is not None and is_hollow(main):
                main.data = torch.empty_like(main, memory_format=torch.contiguous_format)
    realize_inner(optimizer)


def realize_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Give zeroed storage to the gradient buffers; local. A no-op where they have it."""
    for chunk, buffer in buffers_of(chunks):
        if not is_hollow(buffer.grad_data):
            continue
        data = torch.zeros(buffer.numel, dtype=buffer.grad_dtype, device=buffer.grad_data.device)
        buffer.grad_data = data
        for bucket in buffer.buckets:
            bucket.grad_data = data[bucket.offset : bucket.offset + bucket.grad_data.numel()]
        for parameter, (start, end, _) in buffer.param_index_map.items():
            view = data[start:end].view(parameter.shape)
            if hasattr(parameter, "main_grad_copy_in_grad_buffer"):
                parameter.main_grad_copy_in_grad_buffer = view
            else:
                parameter.main_grad = view
        _realize_extra_gradients(buffer)
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            group.cached_grad_buffer_shard_list = [None] * len(group.buckets)


def _realize_extra_gradients(buffer: Any) -> None:
    """Give storage to the fp32 copies of gradients that are accumulated apart (they are hollow parameters' own)."""
    buffer.extra_main_grads.clear()
    for parameter in buffer.param_index_map:
        if hasattr(parameter, "main_grad_copy_in_grad_buffer"):
            parameter.main_grad = torch.empty_like(parameter.main_grad, memory_format=torch.contiguous_format)
            buffer.extra_main_grads.append(parameter.main_grad)


def clear_padding(
    description: ModelDescription, placement: Placement, memory: Mapping[str, torch.Tensor], rank: int
) -> None:
    """Fill a rank's tables of the vocabulary with zeros, where only their real rows are moved; local."""
    specs = description.parameters
    tables = {spec.name for spec in specs if any(segment.real_rows is not None for segment in spec.segments)}
    for slab in placement.slabs(rank):
        if slab.parameter in tables and slab.name in memory:
            memory[slab.name].zero_()
