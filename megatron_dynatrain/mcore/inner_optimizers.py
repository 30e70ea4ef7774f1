"""What an inner optimizer keeps per parameter shard, and where: torch's Adam, Transformer Engine's FusedAdam, and
Megatron's HybridDeviceOptimizer, which spreads the shards over optimizers of these kinds (see `offloaded`).

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
from megatron_dynatrain.mcore import offloaded
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
    for optimizer in offloaded.parts_of(inner.optimizer):
        if type(optimizer) not in _TORCH and not is_fused(optimizer):  # a subclass may keep more than they do
            raise UnsupportedError(
                "the inner optimizer is not one whose states are known",
                subject=type(optimizer).__name__,
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


def is_fused(optimizer: object) -> bool:
    """Return whether an optimizer is Transformer Engine's FusedAdam (it is never imported here)."""
    kind = type(optimizer)
    return kind.__name__ == "FusedAdam" and kind.__module__.startswith("transformer_engine.")


def keeps_main(inner: DistributedOptimizer) -> bool:
    """Return whether FusedAdam keeps the main parameters itself (precision-aware optimizer)."""
    return is_fused(inner.optimizer) and bool(inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)


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
    def part(self) -> torch.optim.Optimizer:
        """The optimizer that steps this run: the inner one, or the one of its parts that has it."""
        return offloaded.part_with(self.optimizer.optimizer, self.main)

    @property
    def state(self) -> dict[str, Any]:
        """The inner optimizer's state of this run (live, not a copy)."""
        return self.optimizer.optimizer.state[self.main]

    @property
    def known(self) -> frozenset[str]:
        """Names of the states that it has once a step was made."""
        names = {kind.value for kind in MOMENTS}
        if not is_fused(self.part):
            names.add("step")
        if keeps_main(self.optimizer) or offloaded.is_hybrid(self.optimizer.optimizer):
            names.add("master_param")
        return frozenset(names)

    @property
    def step(self) -> Step | None:
        """Its step count in the optimizer's own type; None before the first step."""
        if not self.state:
            return None
        if is_fused(self.part):
            return offloaded.group_with(self.optimizer.optimizer, self.main, self.group).get("step")
        return self.state.get("step")

    def main_param(self) -> torch.Tensor | None:
        """Return the main parameter as it is stored; None where the inner optimizer has none yet."""
        if self.main.dtype == torch.float32:
            return self.main
        if keeps_main(self.optimizer):
            return self.state.get("master_param")
        return offloaded.inner_of(self.optimizer.optimizer, self.main)

    def copy_of_main(self) -> torch.Tensor | None:
        """Return the copy that the optimizer has of an fp32 main parameter, on the host or its own; None without one.

        It equals the main parameter at every iteration boundary, so it is made from it and not moved.
        """
        if self.main.dtype != torch.float32:
            return None
        if keeps_main(self.optimizer):
            return self.state.get("master_param")
        inner = offloaded.inner_of(self.optimizer.optimizer, self.main)
        return None if inner is self.main else inner

    def create(self) -> None:
        """Make the state entries without values, hollow where the parameter is; `set_step` belongs to it."""
        inner = self.optimizer.optimizer
        state: dict[str, Any] = {} if is_fused(self.part) else {"step": torch.zeros(())}
        held = offloaded.inner_of(inner, self.main)
        for name, dtype in state_dtypes(self.optimizer, self.main.dtype).items():
            state[name] = _like(held, dtype)
        if offloaded.is_hybrid(inner):
            state["master_param"] = held
        offloaded.set_state(inner, self.main, state)

    def set_step(self, step: Step) -> None:
        """Set the step count, copied: one shared tensor would count once per parameter."""
        if is_fused(self.part):
            group = offloaded.group_with(self.optimizer.optimizer, self.main, self.group)
            group["step"] = _tensor(step) if self.optimizer.config.optimizer_cuda_graph else int(step)
        else:
            self.state["step"] = _tensor(step)


def set_group_steps(inner: DistributedOptimizer, step: Step) -> None:
    """Set the step count of FusedAdam's groups that have no parameter on this rank: it counts in those too; local."""
    for part in offloaded.parts_of(inner.optimizer):
        if is_fused(part):
            for group in part.param_groups:
                if not group["params"]:
                    group["step"] = int(step)


def _tensor(step: Step) -> torch.Tensor:
    return step.detach().clone() if isinstance(step, torch.Tensor) else torch.tensor(float(step))


def state_dtypes(inner: DistributedOptimizer, shard_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every per-element state that the inner optimizer makes, by its name there.

    Args:
        inner: The distributed optimizer.
        shard_dtype: Dtype of the shard that the inner optimizer calls the parameter.
    """
    if not keeps_main(inner):
        return {kind.value: torch.float32 for kind in MOMENTS}
    remainders = inner.config.store_param_remainders and shard_dtype == torch.bfloat16
    return {
        "exp_avg": inner.config.exp_avg_dtype,
        "exp_avg_sq": inner.config.exp_avg_sq_dtype,
        "master_param": torch.int16 if remainders else torch.float32,
    }


def realize_inner(inner: DistributedOptimizer) -> None:
    """Give storage to hollow states; local, values are not set."""
    offloaded.realize(inner.optimizer)
    for shard, state in inner.optimizer.state.items():
        if not any(is_hollow(value) for value in state.values()):
            continue
        if keeps_main(inner):
            remainders = inner.config.store_param_remainders and shard.dtype == torch.bfloat16
            state.clear()
            inner.optimizer.initialize_state(shard, remainders)
            continue
        for name, value in state.items():
            if is_hollow(value):
                state[name] = torch.empty_like(value, memory_format=torch.contiguous_format)


def _like(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor of a shard's shape, hollow where the shard is."""
    if is_hollow(shard):
        return torch.empty((), dtype=dtype, device=shard.device).expand(shard.shape)
    return torch.empty_like(shard, dtype=dtype, memory_format=torch.contiguous_format)
