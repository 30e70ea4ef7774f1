"""What other threads may ask of the job: reads of single attributes, and checks of what somebody asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_dynatrain.errors import StateError, UnsupportedError
from megatron_dynatrain.requests import PHASES, LayoutRequest, Preparing
from megatron_dynatrain.schedule.ask import check_asked, read_asked
from megatron_dynatrain.schedule.check import ModelSizes
from megatron_dynatrain.schedule.clock import Clock
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.schedule.schema import Schedule
from megatron_dynatrain.training.data import check_provider

if TYPE_CHECKING:
    from megatron_dynatrain.training.job import DynamicJob


class JobFront:
    """The job as the threads that serve requests see it; nothing here changes it.

    Args:
        job: The job.
        schedule: Its schedule, for the named layouts.
        model: Sizes of its model and batches at launch; the arguments may change under a reading thread.
        start: The boundary at which this run starts.
    """

    def __init__(self, job: DynamicJob, schedule: Schedule | None, model: ModelSizes, start: Clock) -> None:
        self._job = job
        self._schedule = schedule
        self._model = model
        self._start = start

    def read(self, name: str, request: LayoutRequest) -> Schedule:
        """Return what is asked for, once its form is right.

        Raises:
            ScheduleError: With the nearest valid name, key or value.
        """
        return read_asked(request.to, name, self._schedule)

    def check(self, asked: object) -> tuple[PlannedSwitch, int]:
        """Return the switch in full, and the changes of the layout before it.

        Raises:
            DynaTrainError: It doesn't fit this job as it is now.
        """
        if not isinstance(asked, Schedule):
            raise StateError("what is asked for was not read", got=type(asked).__name__)
        if self._job.switcher.refusal is not None:
            raise self._job.switcher.refusal
        current = self._job.current
        outside = sorted(set(self._job.switcher.processes) - set(current.target.layout.ranks))
        if outside:
            raise UnsupportedError(
                "requests are not served while ranks are outside of the layout",
                phase="check",
                subject=f"ranks {outside}",
                hint="let the schedule bring them back first",
            )
        switch = check_asked(asked, current.target, self._model, *self._batches_to_come())
        check_provider(self._job.provider, [switch.target.layout.vpp])
        return switch, current.version

    def _batches_to_come(self) -> tuple[Clock | None, int | None]:
        """Return now, and the samples at the next planned switch or the end; None where layouts set the batch size."""
        if self._start.batches.fixed:
            return None, None
        now = self._start.at(self._job.completed)  # the schedule counts alike under every layout
        planned = next(iter(self._job.pending), None)
        after = now.at(max(now.iteration, self._job.train_iters)) if planned is None else now.after(planned)
        return now, after.samples

    def in_the_way(self) -> str | None:
        """Return the planned switch that is being prepared or done; None where there is none."""
        for what in (self._job.ahead, self._job.due):
            if isinstance(what, PlannedSwitch) and self._job.is_planned(what):
                return f"the planned switch {what.trigger}"
        return None

    def current(self) -> Target:
        """Return what the job trains under, with the batch size of the next iteration."""
        target = self._job.current.target
        now, _ = self._batches_to_come()
        return target if now is None else replace(target, global_batch_size=now.global_batch_size)

    def completed(self) -> int:
        """Return the completed iterations."""
        return self._job.completed

    def train_iters(self) -> int:
        """Return the iterations of the whole training."""
        return self._job.train_iters

    def next_planned(self) -> str | None:
        """Return the next switch of the schedule as a reader sees it."""
        planned = next(iter(self._job.pending), None)
        return None if planned is None else f"{planned.trigger} -> {planned.target.describe()}"

    def preparing(self) -> Preparing | None:
        """Return how far the preparation in the background is; None where there is none."""
        ahead, preparation = self._job.ahead, self._job.switcher.preparing
        if ahead is None or preparation is None:
            return None
        switch = ahead if isinstance(ahead, PlannedSwitch) else ahead.switch
        return self._job.progress.preparing(switch.target.describe(), str(switch.trigger), done=preparation.done)


class Progress:
    """How far the preparation in the background is; written by its thread, read by others."""

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self._phases = tuple(phases)
        self._step = 0

    def begin(self) -> None:
        """Start anew."""
        self._step = 0

    def note(self, name: str) -> None:
        """Note that a part has begun: `prepare/groups` or the like; unknown ones are passed over."""
        phase = name.removeprefix("prepare/")
        if phase in self._phases:
            self._step = self._phases.index(phase)

    def preparing(self, to: str, trigger: str, *, done: bool) -> Preparing:
        """Return it as the status shows it."""
        step = len(self._phases) - 1 if done else self._step
        return Preparing(to=to, trigger=trigger, phase=self._phases[step], step=step + 1, done=done)
