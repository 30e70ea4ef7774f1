"""Iterations and samples of a job whose global batch size changes, at switches or by a schedule of its own (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dynatrain.schedule.batches import BatchSchedule
from megatron_dynatrain.schedule.resolve import PlannedSwitch
from megatron_dynatrain.schedule.triggers import Trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A boundary between two iterations, and the size of those that follow.

    Args:
        iteration: Completed iterations.
        samples: Consumed training samples.
        batches: Samples per iteration from here on.
    """

    iteration: int
    samples: int
    batches: BatchSchedule

    @property
    def global_batch_size(self) -> int:
        """Samples of the next iteration."""
        return self.batches.size_at(self.samples)

    def boundary(self, trigger: Trigger) -> int:
        """Return the completed iterations at which a trigger is due, if no switch changes the batch sizes."""
        return trigger.boundary(self.iteration, self.samples, self.batches)

    def samples_at(self, iteration: int) -> int:
        """Return the samples consumed after an iteration, if no switch changes the batch sizes."""
        return self.batches.samples_after(self.samples, iteration - self.iteration)

    def amount(self, kind: str, iteration: int) -> int:
        """Return a boundary as a trigger of a kind counts it: iterations or samples."""
        return iteration if kind == "at_iteration" else self.samples_at(iteration)

    def after(self, switch: PlannedSwitch) -> Clock:
        """Return the clock just after a switch; one that is overdue happens at the next boundary."""
        return self.at(max(self.boundary(switch.trigger), self.iteration + 1), switch.target.global_batch_size)

    def at(self, iteration: int, global_batch_size: int | None = None) -> Clock:
        """Return the clock at a boundary from which the batch size is another one; None for the same.

        Megatron's own schedule of batch sizes goes on whatever a switch says.
        """
        batches = self.batches
        if global_batch_size is not None and batches.fixed:
            batches = BatchSchedule.constant(global_batch_size)
        return Clock(iteration=iteration, samples=self.samples_at(iteration), batches=batches)

    def last_iteration(self, train_samples: int) -> int:
        """Return the iterations completed at the end of `train_samples`, if no switch changes the batch sizes.

        By Megatron's rules: no whole iteration is left; with a schedule of batch sizes no sample is left, so that the
        last iteration may have more samples than were left for it.
        """
        if not self.batches.fixed:
            return self.boundary(Trigger("at_samples", train_samples))
        return self.iteration + max(0, train_samples - self.samples) // self.global_batch_size


def walk(start: Clock, switches: Iterable[PlannedSwitch]) -> tuple[Clock, ...]:
    """Return the clock just after each of the switches, which stand in the order in which they happen."""
    clocks = []
    for switch in switches:
        start = start.after(switch)
        clocks.append(start)
    return tuple(clocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """How long a training is, from its first iteration to its last.

    Args:
        iterations: Completed iterations at its end.
        samples: Training samples that its data set must hold.
    """

    iterations: int
    samples: int


def run_length(
    start: Clock, switches: Iterable[PlannedSwitch], *, train_iters: int | None, train_samples: int | None
) -> RunLength:
    """Return the length of a training whose batch size may change.

    Without a change it is Megatron's own: `train_iters` x global batch samples, or `train_samples` // global batch
    iterations; with a schedule of batch sizes as many iterations as use up `train_samples`. Source:
    `get_train_valid_test_num_samples` and `update_train_iters` in `megatron/training/training.py` of 0.19, with the
    batch sizes of the switches.

    Args:
        start: Where this run starts: the beginning, or the boundary of the checkpoint it resumes from.
        switches: The switches after it, in order.
        train_iters: Iterations of the whole training, unless it is given in samples.
        train_samples: Samples of the whole training; it wins, as in Megatron.

    Raises:
        ValueError: Neither is given.
    """
    if not train_samples and train_iters is None:
        raise ValueError("a training ends after train_iters or train_samples")
    clock = start
    for following in walk(start, switches):
        if following.iteration >= _end(clock, train_iters, train_samples):
            break
        clock = following
    end = _end(clock, train_iters, train_samples)
    return RunLength(iterations=end, samples=train_samples or clock.samples_at(end))


def _end(clock: Clock, train_iters: int | None, train_samples: int | None) -> int:
    return clock.last_iteration(train_samples) if train_samples else train_iters or 0
