"""Collectives and arguments that gloo does not take.

What: `device_id` and `device_ids` are dropped; `all_to_all_single` takes its split sizes as tensors; `all_gather` and
`reduce_scatter` take tensors of different lengths.
Why: Megatron binds the default group to a GPU; MoE hands over split sizes as CPU tensors, and with expert tensor
parallelism gathers uneven token counts, which NCCL does and gloo refuses.
Versions: megatron-core 0.19.x with torch 2.14. Can go: when gloo takes uneven sizes, and see `cpu`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Replace the functions in `torch.distributed`; each process once."""
    module: Any = dist
    module.barrier = _without(dist.barrier, "device_ids")
    module.init_process_group = _without(dist.init_process_group, "device_id")
    module.all_to_all_single = _all_to_all_single(dist.all_to_all_single)
    module.all_gather = _all_gather(dist.all_gather)
    module.reduce_scatter = _reduce_scatter(dist.reduce_scatter)


class _Done:
    """The handle of a collective that is complete."""

    def wait(self, _timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _without(function: Any, name: str) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(name, None)
        return function(*args, **kwargs)

    return wrapped


def _all_to_all_single(original: Any) -> Any:
    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's own name, given by keyword
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        splits = (_as_list(output_split_sizes), _as_list(input_split_sizes))
        return original(output, input, *splits, group=group, async_op=async_op)

    return all_to_all_single


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _all_gather(original: Any) -> Any:
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        lengths = [part.shape[0] if part.dim() else 0 for part in tensor_list]
        if len(set(lengths)) <= 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        shape = (max(lengths), *tensor.shape[1:])
        source = tensor.new_zeros(shape)
        source[: tensor.shape[0]] = tensor
        padded = [tensor.new_zeros(shape) for _ in tensor_list]
        original(padded, source, group=group)
        for part, whole in zip(tensor_list, padded, strict=True):
            part.copy_(whole[: part.shape[0]])
        return _Done() if async_op else None

    return all_gather


def _reduce_scatter(original: Any) -> Any:
    @functools.wraps(original)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in input_list}) <= 1:
            return original(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat(input_list, 0)
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([part.shape[0] for part in input_list])[dist.get_rank(group)])
        return _Done() if async_op else None

    return reduce_scatter
