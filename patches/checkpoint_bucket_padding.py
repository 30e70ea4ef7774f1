"""A fully reshardable save reads the optimizer state at the right offsets when buckets end in padding.

What: `sharded_param_state_fully_reshardable` sees the gathered state with the padding of every bucket put back.
Why: `get_parameter_state_dp_zero` drops the padding at the end of each bucket, but `param_index_map`, by which the
result is cut into parameters, counts it. With more than one bucket and any padding the saved moments and main
parameters are shifted, without an error.
Versions: megatron-core 0.19.x. Can go: with the release that has NVIDIA/Megatron-LM pull request 5077.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.patches.methods import wrap


def install() -> None:
    """Apply the mend; idempotent, each process by itself."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    wrap(DistributedOptimizer, "sharded_param_state_fully_reshardable", _sharded_param_state)


def _sharded_param_state(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    gather = self.get_parameter_state_dp_zero

    def gather_padded(*gather_args: Any, **gather_kwargs: Any) -> Any:
        state = gather(*gather_args, **gather_kwargs)
        if state is not None:
            for index, buffer in enumerate(self.buffers):
                for tensors in state[index].values():
                    tensors.update({key: _padded(value, buffer) for key, value in tensors.items()})
        return state

    self.get_parameter_state_dp_zero = gather_padded
    try:
        return original(self, *args, **kwargs)
    finally:
        del self.get_parameter_state_dp_zero


def _padded(value: Any, buffer: Any) -> Any:
    """Return a state of `buffer.numel_unpadded` elements in the offsets of the buffer; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    result = value.new_zeros(buffer.numel)
    read = 0
    for bucket in buffer.buckets:
        numel = bucket.numel_unpadded
        result[bucket.offset : bucket.offset + numel] = value[read : read + numel]
        read += numel
    if read != value.numel():
        raise StateError(
            "the gathered optimizer state is not the buckets without their padding; this release needs no mend",
            subject="get_parameter_state_dp_zero",
            expected=f"{read} elements",
            got=f"{value.numel()} elements",
        )
    return result
