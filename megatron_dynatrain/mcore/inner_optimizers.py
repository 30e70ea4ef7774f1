"""What an inner optimizer keeps per parameter shard, and where: torch's Adam, Transformer Engine's FusedAdam.

torch's Adam counts steps per parameter, TE's FusedAdam per parameter group. With `--use-precision-aware-optimizer`
FusedAdam also keeps the main parameters, as fp32 or as the 16 bits that the bf16 parameter lacks ("remainders"), and
moments in the dtype that was asked for. Stored bits are moved as they are; dtypes that carry a scale per shard (fp16,
fp8) are refused, because shards of other layouts would need another scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dynatrain.errors import UnsupportedError
from megatron_dynatrain.mcore.build import is_hollow
from megatron_dynatrain.vps.tensor import StateKind

MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
_TORCH = (torch.optim.Adam, torch.optim.AdamW)
_UNSCALED = (torch.float32, torch.bfloat16)
Step = torch.Tensor | int | float


def check_known(inner: DistributedOptimizer) -> None:
    """Check that the states of the inner optimizer are known; local.

    Raises:
        UnsupportedError: By the optimizer's name, or by the flag whose states can't be moved.
    """
    if type(inner.optimizer) in _TORCH:  # a subclass may keep more than they do
        return
    if not is_fused(inner):
        raise UnsupportedError(
            "the inner optimizer is not one whose states are known",
            subject=type(inner.optimizer).__name__,
            expected="torch.optim.Adam, torch.optim.AdamW or Transformer Engine's FusedAdam",
        )
    if not keeps_main(inner):
        return
    for flag, name in (("--exp-avg-dtype", "exp_avg_dtype"), ("--exp-avg-sq-dtype", "exp_avg_sq_dtype")):
        dtype = getattr(inner.config, name)
        if dtype not in _UNSCALED:
            raise UnsupportedError(
                "moments of this dtype have a scale per shard, which can't follow the elements",
                subject=flag,
                expected="fp32 or bf16",
                got=str(dtype).removeprefix("torch."),
            )
    if inner.config.main_params_dtype != torch.float32:
        raise UnsupportedError(
            "main parameters of this dtype have a scale per shard, which can't follow the elements",
            subject="--main-params-dtype",
            expected="fp32",
            got=str(inner.config.main_params_dtype).removeprefix("torch."),
        )


def is_fused(inner: DistributedOptimizer) -> bool:
    """Return whether the inner optimizer is Transformer Engine's FusedAdam (it is never imported here)."""
    kind = type(inner.optimizer)
    return kind.__name__ == "FusedAdam" and kind.__module__.startswith("transformer_engine.")


def keeps_main(inner: DistributedOptimizer) -> bool:
    """Return whether the inner optimizer keeps the main parameters itself (precision-aware optimizer)."""
    return bool(inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)


@dataclass(frozen=True)
class OwnedRun:
    """The part of one parameter whose optimizer state this rank keeps: `[start, stop)` of the flat local parameter.

    Args:
        optimizer: The distributed optimizer that owns it.
        group: The parameter group of the inner optimizer that it is in.
        main: What the inner optimizer calls the parameter: the main parameter, or the shard of the model parameter
            where the inner optimizer keeps the main parameter itself.
        start: First element.
        stop: One behind the last.
    """

    optimizer: DistributedOptimizer
    group: dict[str, Any]
    main: torch.Tensor
    start: int
    stop: int

    @property
    def state(self) -> dict[str, Any]:
        """The inner optimizer's state of this run (live, not a copy)."""
        return self.optimizer.optimizer.state[self.main]

    @property
    def known(self) -> frozenset[str]:
        """Names of the states that it has once a step was made."""
        moments = {kind.value for kind in MOMENTS}
        if not is_fused(self.optimizer):
            return frozenset(moments | {"step"})
        return frozenset(moments | {"master_param"} if keeps_main(self.optimizer) else moments)

    @property
    def step(self) -> Step | None:
        """Its step count in the optimizer's own type; None before the first step."""
        if is_fused(self.optimizer):
            return self.group.get("step") if self.state else None
        return self.state.get("step")

    def main_param(self) -> torch.Tensor | None:
        """Return the main parameter as it is stored; None where the inner optimizer has none yet."""
        if keeps_main(self.optimizer):
            return self.state.get("master_param")
        return self.main

    def create(self, step: Step | None) -> None:
        """Make the state entries without values, hollow where the parameter is.

        Args:
            step: Step count to start from, copied: one shared tensor would count once per parameter.
        """
        state = self.optimizer.optimizer.state[self.main]
        state.clear()
        fused = is_fused(self.optimizer)
        if step is not None and fused:
            self.group["step"] = step.detach().clone() if isinstance(step, torch.Tensor) else step
        elif isinstance(step, torch.Tensor):
            state["step"] = step.detach().clone()
        dtypes = state_dtypes(self.optimizer, self.main.dtype)
        for name, dtype in dtypes.items():
            state[name] = _like(self.main, dtype)


def state_dtypes(inner: DistributedOptimizer, shard_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every per-element state of the inner optimizer, by its name there.

    Args:
        inner: The distributed optimizer.
        shard_dtype: Dtype of the shard that the inner optimizer calls the parameter.
    """
    if not keeps_main(inner):
        return {kind.value: torch.float32 if is_fused(inner) else shard_dtype for kind in MOMENTS}
    remainders = inner.config.store_param_remainders and shard_dtype == torch.bfloat16
    return {
        "exp_avg": inner.config.exp_avg_dtype,
        "exp_avg_sq": inner.config.exp_avg_sq_dtype,
        "master_param": torch.int16 if remainders else torch.float32,
    }


def realize_inner(inner: DistributedOptimizer) -> None:
    """Give storage to hollow states; local, values are not set."""
    for shard, state in inner.optimizer.state.items():
        if not any(is_hollow(value) for value in state.values()):
            continue
        if is_fused(inner):
            remainders = inner.config.store_param_remainders and shard.dtype == torch.bfloat16
            state.clear()
            inner.optimizer.initialize_state(shard, keeps_main(inner) and remainders)
            continue
        for name, value in state.items():
            if is_hollow(value):
                state[name] = torch.empty_like(value, memory_format=torch.contiguous_format)


def _like(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor of a shard's shape, hollow where the shard is."""
    if is_hollow(shard):
        return torch.empty((), dtype=dtype, device=shard.device).expand(shard.shape)
    return torch.empty_like(shard, dtype=dtype, memory_format=torch.contiguous_format)
