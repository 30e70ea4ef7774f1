"""Everything of an optimizer that is not a tensor per parameter: step, parameter groups, loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.mcore.states import distributed_optimizers

_OF_LAYOUT = frozenset({"params", "is_expert_parallel", "step"})
"""Keys that tell nothing of a group's identity: experts are in the dense optimizer at ep 1 and in one of their own
above, and a checkpoint leaves a `step` in groups whose parameters have one each."""
_MOVED = ("lr", "weight_decay")
"""Values of a parameter group that the scheduler changes during training; all others come from the configuration."""

GroupIdentity = tuple[tuple[str, str], ...]


def _identity(group: dict[str, object]) -> GroupIdentity:
    """Return what tells a parameter group from the others, whatever the layout and the order."""
    return tuple(
        sorted((key, repr(value)) for key, value in group.items() if key not in _OF_LAYOUT and key not in _MOVED)
    )


@dataclass
class SharedValues:
    """What is the same of an optimizer on every rank: gathered, so that a rank that disagrees stops the switch.

    Megatron 0.19 gives all ranks all parameter groups (`_get_param_groups` aligns them over the world), with no
    parameters where a stage has none, so a rank finds every group of the target at home. What a rank alone can't see
    is that another one has a different learning rate or loss scale, and the switch would spread it.

    Args:
        groups: Group identity to its moved values.
        scaler: State of the loss scaler; None without one.
    """

    groups: dict[GroupIdentity, dict[str, float]]
    scaler: dict[str, Any] | None

    @classmethod
    def of(cls, optimizer: object) -> SharedValues:
        """Return what this rank's optimizer has, on the host; local.

        Raises:
            StateError: Two of its groups with the same settings have other values.
        """
        inners = distributed_optimizers(optimizer)
        parts = []
        for inner in inners:
            scaler = _cloned(inner.grad_scaler.state_dict()) if inner.grad_scaler is not None else None
            for group in inner.optimizer.param_groups:
                parts.append(cls({_identity(group): {key: group[key] for key in _MOVED}}, scaler))
        return cls.merged(parts)

    @classmethod
    def merged(cls, parts: Iterable[SharedValues]) -> SharedValues:
        """Return the union of what all ranks have; pure.

        Raises:
            StateError: Two ranks have other values of the same group or scaler.
        """
        groups: dict[GroupIdentity, dict[str, float]] = {}
        scaler: dict[str, Any] | None = None
        for part in parts:
            for identity, values in part.groups.items():
                _agree(readable(identity), groups.setdefault(identity, values), values)
            if part.scaler is not None:
                scaler = part.scaler if scaler is None else scaler
                _agree("grad_scaler", _plain(scaler), _plain(part.scaler))
        return cls(groups, scaler)

    def carry(self, target: object, *, rank: int) -> None:
        """Set lr and weight decay of each parameter group, and the loss scaler, of another optimizer; local.

        Groups are matched by their settings (weight-decay class, lr multiplier, betas, eps), never by position: the
        number of inner optimizers can differ between layouts, and with it the optimizer that a parameter belongs to.

        Raises:
            StateError: A target group that has no counterpart, by its settings, or a scaler on one side only.
        """
        for inner in distributed_optimizers(target):
            for group in inner.optimizer.param_groups:
                values = self.groups.get(_identity(group))
                if values is None:
                    raise StateError(
                        "a parameter group of the target optimizer has no counterpart",
                        rank=rank,
                        subject=str(dict(_identity(group))),
                        expected="one of " + "; ".join(str(dict(identity)) for identity in self.groups),
                    )
                group.update(values)
            if (inner.grad_scaler is None) != (self.scaler is None):
                raise StateError(
                    "the loss scaler exists on one side only",
                    rank=rank,
                    subject="grad_scaler",
                    expected=self.scaler,
                    got=inner.grad_scaler,
                )
            if inner.grad_scaler is not None and self.scaler is not None:
                inner.grad_scaler.load_state_dict(_cloned(self.scaler))

    def scalars(self) -> dict[str, object]:
        """Return all values as plain numbers, by the names of `scalars()`."""
        result: dict[str, object] = {
            f"{key} of {readable(identity)}": float(values[key])
            for identity, values in self.groups.items()
            for key in _MOVED
        }
        return result | {f"grad_scaler.{key}": value for key, value in _plain(self.scaler or {}).items()}


def _agree(subject: str, expected: object, got: object) -> None:
    if expected != got:
        raise StateError(
            "the ranks have different values of the optimizer", subject=subject, expected=expected, got=got
        )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu().clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def scalars(optimizer: object) -> dict[str, object]:
    """Return step, group values and scaler as plain numbers, for comparison and for messages; local."""
    steps = {
        float(s["step"]) for o in distributed_optimizers(optimizer) for s in o.optimizer.state.values() if "step" in s
    }
    return {"step": sorted(steps), **SharedValues.of(optimizer).scalars()}


def readable(identity: GroupIdentity) -> str:
    """Return a name of a parameter group for messages: its settings, those that are off left out."""
    return ", ".join(f"{key}={value}" for key, value in identity if value not in ("None", "False"))
