"""What a run of `pretrain()` leaves behind; imports neither torch nor Megatron."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step as one rank saw it; floats are exact.

    Attributes:
        iteration: Zero-based iteration that was run.
        loss: The logged loss; None on ranks that don't hold the last pipeline stage.
        grad_norm: Global gradient norm before clipping.
        lr: Learning rate with which the step was done.
        consumed_samples: Samples consumed before the step.
        adam_steps: The distinct values of the optimizer's `step` after the step, ascending.
    """

    iteration: int
    loss: float | None
    grad_norm: float | None
    lr: float
    consumed_samples: int
    adam_steps: tuple[int, ...]


@dataclasses.dataclass(slots=True, kw_only=True)
class PretrainRecord:
    """One rank's run.

    Attributes:
        steps: In order.
        exit_code: What `pretrain()` gave to `sys.exit`; None where it returned.
        extra: What hooks put there.
    """

    rank: int
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    exit_code: int | str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def steps_with_loss(records: Sequence[PretrainRecord]) -> list[StepRecord]:
    """Return the steps of the last rank that saw the loss."""
    for record in reversed(records):
        if record.steps and record.steps[0].loss is not None:
            return record.steps
    raise AssertionError("no rank recorded a loss")


def losses(records: Sequence[PretrainRecord]) -> list[float]:
    """Return the loss of every step."""
    return [step.loss for step in steps_with_loss(records) if step.loss is not None]
