"""When to switch: a boundary between two iterations, given as an iteration or as a number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_dynatrain.schedule.batches import BatchSchedule


@dataclass(frozen=True, slots=True)
class Trigger:
    """The boundary at which a switch happens.

    Args:
        kind: `at_iteration` counts completed iterations: 100 is the boundary after iteration 100, so that iteration
            101 is the first under the new layout. `at_samples` counts consumed training samples: the first boundary
            at which at least that many are consumed.
        value: Iterations or samples, at least 1.
    """

    kind: Literal["at_iteration", "at_samples"]
    value: int

    def due(self, iteration: int, consumed_samples: int) -> bool:
        """Return whether the boundary is reached.

        A boundary can be passed without a stop at it (`--iterations-to-skip`); the switch is then due at the next
        one, which is why this is not an equality.

        Args:
            iteration: Completed iterations.
            consumed_samples: Consumed training samples.
        """
        return (iteration if self.kind == "at_iteration" else consumed_samples) >= self.value

    def boundary(self, start_iteration: int, start_samples: int, batches: BatchSchedule) -> int:
        """Return the completed iterations at which it will be due, if no switch changes the batch sizes before.

        Args:
            start_iteration: Completed iterations at the start of this run.
            start_samples: Samples consumed at the start of this run.
            batches: Samples per iteration.
        """
        if self.kind == "at_iteration":
            return self.value
        return start_iteration + batches.iterations_until(start_samples, self.value)

    def __str__(self) -> str:
        """Return it as it is written in a schedule."""
        return f"{self.kind}: {self.value}"
