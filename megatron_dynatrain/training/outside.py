"""A process that is outside of the current layout: what it must know to come back, and its wait."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from megatron_dynatrain.elastic.calls import Call
from megatron_dynatrain.schedule.resolve import Target
from megatron_dynatrain.switch import Switcher, SwitchReport
from megatron_dynatrain.training.thread_args import ThreadArguments
from megatron_dynatrain.training.world_args import ArgumentChange, values_for

_PROGRESS = (
    "iteration",
    "curr_iteration",
    "train_iters",
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "num_floating_point_operations_so_far",
    "do_train",
    "do_valid",
    "do_test",
)
"""Arguments in which Megatron counts how far the training is."""


@dataclass(frozen=True)
class JobState:
    """How far a job is, as the rank that calls others tells them.

    Args:
        target: What is switched to, with its batch sizes.
        progress: Megatron's counting arguments, by name.
        trigger: What asked for it.
        num_steps: What the scheduler of learning rate and weight decay has counted, in samples.
        pending: Planned switches still to come, this one among them.
        planned: Whether this one is of the schedule.
        version: How often the job's layout has changed.
        train_iters: Iterations of the whole training.
    """

    target: Target
    progress: dict[str, object]
    trigger: str
    num_steps: int
    pending: int
    planned: bool
    version: int
    train_iters: int


def progress_of(args: Namespace) -> dict[str, object]:
    """Return the arguments that count, as they are; local."""
    return {name: getattr(args, name) for name in _PROGRESS if hasattr(args, name)}


class Outside:
    """The wait of one process that is parked, inside `train()`.

    Args:
        switcher: The job's switcher.
        args: Megatron's arguments of this process.
        prepared: Told what the thread that builds a target sees as arguments.
    """

    def __init__(self, switcher: Switcher, args: Namespace, prepared: Callable[[ThreadArguments], None]) -> None:
        self._switcher = switcher
        self._args = args
        self._prepared = prepared
        self._state: JobState | None = None

    def wait(self) -> tuple[SwitchReport, JobState] | None:
        """Wait until a switch has brought this process back; None where the training has ended."""
        report = self._switcher.join_next(inside=self._inside, around=self._around)
        if report is None or self._state is None:
            return None
        return report, self._state

    def _inside(self, call: Call) -> AbstractContextManager[object]:
        """Return what the thread that builds the target is inside of: the target's arguments."""
        seen = ThreadArguments({**call.note.progress, **values_for(call.note.target, self._switcher.rank)})
        self._prepared(seen)
        return seen.seen()

    @contextmanager
    def _around(self, call: Call) -> Iterator[None]:
        """Set the arguments to the job's progress and the target's layout; back again where the switch fails."""
        self._state = call.note
        values = {**call.note.progress, **values_for(call.note.target, self._switcher.rank)}
        change = ArgumentChange(self._args, values)
        try:
            yield
        except BaseException:
            change.undo()
            raise
