"""Everything of an optimizer that is not a tensor per parameter: step, parameter groups, loss scale."""

from __future__ import annotations

import torch

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.mcore.states import distributed_optimizers

_OF_LAYOUT = frozenset({"params", "is_expert_parallel"})
"""Keys that follow the layout: experts are in the dense optimizer at ep 1 and in one of their own above."""
_MOVED = ("lr", "weight_decay")
"""Values of a parameter group that the scheduler changes during training; all others come from the configuration."""

GroupIdentity = tuple[tuple[str, str], ...]


def _identity(group: dict[str, object]) -> GroupIdentity:
    """Return what tells a parameter group from the others, whatever the layout and the order."""
    return tuple(
        sorted((key, repr(value)) for key, value in group.items() if key not in _OF_LAYOUT and key not in _MOVED)
    )


def carry_groups(source: object, target: object, *, rank: int) -> None:
    """Copy lr and weight decay of each parameter group to the group of the same identity; local.

    Groups are matched by their settings (weight-decay class, lr multiplier, betas, eps), never by position: the number
    of inner optimizers can differ between layouts, and with it the optimizer that a parameter belongs to.

    Raises:
        StateError: A target group that has no counterpart; names its settings.
    """
    known = {}
    for optimizer in distributed_optimizers(source):
        for group in optimizer.optimizer.param_groups:
            known[_identity(group)] = {key: group[key] for key in _MOVED}
    for optimizer in distributed_optimizers(target):
        for group in optimizer.optimizer.param_groups:
            values = known.get(_identity(group))
            if values is None:
                raise StateError(
                    "a parameter group of the target optimizer has no counterpart",
                    rank=rank,
                    subject=str(dict(_identity(group))),
                    expected=f"one of {len(known)} known groups",
                )
            group.update(values)


def carry_scaler(source: object, target: object, *, rank: int) -> None:
    """Copy the loss scaler (scale, growth and hysteresis trackers); local, equal on every rank.

    Raises:
        StateError: One optimizer has a scaler and the other has none.
    """
    before = [o.grad_scaler for o in distributed_optimizers(source)]
    after = [o.grad_scaler for o in distributed_optimizers(target)]
    states = [scaler.state_dict() for scaler in before if scaler is not None]
    if bool(states) != any(scaler is not None for scaler in after):
        raise StateError(
            "the loss scaler exists on one side only", rank=rank, subject="grad_scaler", expected=before, got=after
        )
    for scaler in after:
        if scaler is not None:
            scaler.load_state_dict(_cloned(states[0]))


def _cloned(state: dict[str, object]) -> dict[str, object]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def scalars(optimizer: object) -> dict[str, object]:
    """Return step, group values and scaler as plain numbers, for comparison and for messages; local."""
    result: dict[str, object] = {}
    for inner in distributed_optimizers(optimizer):
        steps = sorted({float(s["step"]) for s in inner.optimizer.state.values() if "step" in s})
        result.setdefault("step", set()).update(steps)  # type: ignore[attr-defined]
        for group in inner.optimizer.param_groups:
            for key in _MOVED:
                result[f"{key} of {hash_free(_identity(group))}"] = float(group[key])
        if inner.grad_scaler is not None:
            for key, value in inner.grad_scaler.state_dict().items():
                result[f"grad_scaler.{key}"] = float(value) if isinstance(value, torch.Tensor) else value
    result["step"] = sorted(result.get("step", ()))  # type: ignore[call-overload]
    return result


def hash_free(identity: GroupIdentity) -> str:
    """Return a readable name of a parameter group that is the same in every process."""
    short = {k: v for k, v in identity if k in ("wd_mult", "lr_mult", "is_decoupled_lr")}
    return ", ".join(f"{key}={value}" for key, value in short.items()) or "all parameters"
