"""Let go of an old world: after this nothing keeps its modules, buffers, hooks or groups alive.

What held on, each found by counting live modules and threads after a switch: the DDP's grad accumulators (a hook closes
over the DDP), `main_grad` and `main_param` attributes of parameters, the distributed optimizer's shard lists (in fp32 a
shard's grad_fn reaches the model), the inner optimizer's state, module attributes that hold process groups, method
caches of module classes, and the launch optimizer itself, which `pretrain()` holds to its end.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

_SHARD_LISTS = (
    "model_float16_groups",
    "model_fp32_groups",
    "shard_float16_groups",
    "shard_fp32_groups",
    "shard_fp32_from_float16_groups",
)
_PARAMETER_ATTRIBUTES = ("main_grad", "main_param", "grad_added_to_main_grad")


def release_optimizer(optimizer: object) -> None:
    """Empty a Megatron (chained) distributed optimizer, if there is one; local, it is unusable afterwards."""
    if optimizer is None:
        return
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name in _SHARD_LISTS:
            groups = getattr(inner, name, None)
            if groups is not None:
                groups.clear()
        if getattr(inner, "optimizer", None) is not None:
            inner.optimizer.state.clear()
            inner.optimizer.param_groups.clear()
    vars(optimizer).clear()


def release_model(chunks: Sequence[torch.nn.Module]) -> None:
    """Empty Megatron DDP chunks and free the storage of their buffers; local, the chunks are unusable afterwards."""
    for chunk in chunks:
        chunk.grad_accs.clear()
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for data in (buffer.param_data, buffer.grad_data):
                # Where somebody called `numpy()` on a parameter, the memory goes with the last reference to it.
                if data is not None and data.untyped_storage().resizable():
                    data.untyped_storage().resize_(0)
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is not None:
                dispatcher.__dict__.clear()
        for kind in {type(module) for module in chunk.modules()}:
            _clear_caches(kind)
        for parameter in chunk.parameters():
            for name in _PARAMETER_ATTRIBUTES:
                if hasattr(parameter, name):
                    delattr(parameter, name)
        for name in ("bucket_groups", "expert_parallel_bucket_groups", "buffers", "expert_parallel_buffers"):
            getattr(chunk, name).clear()
        chunk.param_to_bucket_group.clear()


def _clear_caches(kind: type) -> None:
    """Empty the method caches of a class: rotary embeddings keep every instance by one. What is needed comes back."""
    for name in dir(kind):
        clear = getattr(getattr(kind, name, None), "cache_clear", None)
        if callable(clear):
            clear()


def release_trackers() -> None:
    """Empty Megatron's process-wide trackers of expert and multi-token-prediction metrics; local.

    They keep process groups beside the figures. A pipeline stage without experts reduces over what it finds there, so a
    group of the old world would fail or hang. The figures themselves are reported, and zero, once a step is logged.
    """
    get_moe_metrics_tracker()._metrics.clear()
    for name in ("reduce_group", "avg_group"):
        MTPLossLoggingHelper.tracker.pop(name, None)


def collect() -> None:
    """Collect the cycles that an old world leaves behind; once per switch, after everything was released."""
    gc.collect()


def live_modules() -> int:
    """Return how many torch modules this process holds, for leak tests."""
    return sum(1 for item in gc.get_objects() if isinstance(item, torch.nn.Module))
