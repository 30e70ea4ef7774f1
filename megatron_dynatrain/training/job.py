"""One pretraining job whose layout changes: decides when, switches, and lets everything of Megatron follow."""

from __future__ import annotations

import dataclasses
import logging
import time
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.training import get_args, get_tensorboard_writer

from megatron_dynatrain.elastic.desk import Event, Order
from megatron_dynatrain.errors import StateError, SwitchFailure
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.follow import model_config, reset_microbatches
from megatron_dynatrain.model_fit import check_model_fit
from megatron_dynatrain.outcome import record_of
from megatron_dynatrain.records import (
    append_record,
    format_line,
    tensorboard_scalars,
    tensorboard_text,
)
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.schedule.schema import Schedule
from megatron_dynatrain.switch import Switcher, SwitchOptions, SwitchReport
from megatron_dynatrain.training.arguments import DynamicOptions, model_sizes
from megatron_dynatrain.training.builder import ModelBuilder
from megatron_dynatrain.training.data import DataIterators, Datasets, Provider, check_provider, rebuild, stock_builder
from megatron_dynatrain.training.front import JobFront, Progress
from megatron_dynatrain.training.live import LiveRequests
from megatron_dynatrain.training.outside import JobState, Outside, progress_of
from megatron_dynatrain.training.schedule import clock_of
from megatron_dynatrain.training.thread_args import ThreadArguments
from megatron_dynatrain.training.world_args import ArgumentChange, values_for
from megatron_dynatrain.training.writers import close_writer, follow_last_rank

logger = logging.getLogger(__name__)


@dataclass
class Roles:
    """What `pretrain()` and `train()` hold beyond the model list, by role: always the current world's."""

    optimizer: Any
    scheduler: Any
    data: DataIterators
    config: Any


@dataclass
class _Pending:
    """A switch that is done but whose stall still lasts: until the first step under the new layout begins."""

    report: SwitchReport
    trigger: str
    iteration: int
    began: float


@dataclass(frozen=True)
class Current:
    """What the job trains under, and how often that has changed; one value, so that threads read both at once."""

    target: Target
    version: int = 0


@dataclass
class DynamicJob:
    """State of the plugin in one process; made at the first entry of `train()`.

    Args:
        options: The checked flags.
        pending: Switches of the schedule that are still to come, in order.
        model: The model list that `pretrain()` holds; its content is replaced.
        roles: What else it holds.
        builder: Builds another layout's chunks and optimizer.
        provider: The job's dataset provider.
        launch: The layout it was launched with.
        schedule: The schedule, whose named layouts can be asked for; None where there is none.

    Attributes:
        ahead: What is being prepared in the background: a planned switch, or an order that all ranks have agreed on.
        due: The switch that is to be done at this boundary.
        completed: Completed iterations.
        train_iters: Iterations of the whole training; Megatron's own argument is set lower for a segment.
    """

    options: DynamicOptions
    pending: list[PlannedSwitch]
    model: list[torch.nn.Module]
    roles: Roles
    builder: ModelBuilder
    provider: Provider
    launch: Target
    schedule: Schedule | None = None
    layout: ParallelLayout = field(init=False)
    current: Current = field(init=False)
    completed: int = field(init=False)
    train_iters: int = field(init=False)
    switcher: Switcher = field(init=False)
    ahead: PlannedSwitch | Order | None = None
    due: PlannedSwitch | None = None
    progress: Progress = field(default_factory=Progress)
    _order: Order | None = None
    _begun: PlannedSwitch | None = None
    _live: LiveRequests = field(init=False)
    _thread_args: ThreadArguments | None = None
    _datasets: Datasets | None = None
    _new_data: DataIterators | None = None
    _stalled: _Pending | None = None
    _boundary: float = 0.0

    def __post_init__(self) -> None:
        args = get_args()
        self.layout = self.launch.layout
        self.current = Current(self.launch)
        self.completed, self.train_iters = args.iteration, args.train_iters
        self.switcher = Switcher(
            layout=self.layout,
            chunks=self.model,
            optimizer=self.roles.optimizer,
            build=self._build,
            options=SwitchOptions(
                memory=self.options.memory,
                verify=self.options.verify,
                timeout=self.options.timeout_s,
                seed=args.seed,
            ),
            model_fits=_check_fit,
            at_boundary=self._place_data,
        )
        self.switcher.same("schedule", [(str(s.trigger), s.target) for s in self.pending])
        options = self.options
        self.switcher.same(
            "options", (options.memory, options.verify, options.timeout_s, options.prepare_ahead, args.seed)
        )
        check_provider(self.provider, [switch.target.layout.vpp for switch in self.pending])
        self.switcher.on_phase = self.progress.note
        self.switcher.note = self._note
        self._live = LiveRequests(
            JobFront(self, self.schedule, model_sizes(args, args.padded_vocab_size), clock_of(args, args.iteration)),
            store=self.switcher.store,
            ranks=self.layout.ranks,
            rank=self.switcher.rank,
            name=self.switcher.name,
            directory=options.directory,
            iteration=args.iteration,
            timeout=options.timeout_s,
        )
        self._live.start()

    # --- when ---------------------------------------------------------------------------------------------------------

    def at_boundary(self, iteration: int, args: Namespace) -> bool:
        """Return whether a switch is to be done at this boundary, or begin to prepare one; alike on every rank.

        A planned switch goes before one that was asked for: what was prepared for the latter is dropped.
        """
        self._boundary = time.perf_counter()  # the last step, with its logging and saving, is over
        order = self._live.arrive(iteration)
        self.due = self._order = None
        if self.pending and self.pending[0].trigger.due(iteration, args.consumed_train_samples):
            self.due = self.pending[0]
            self._drop_asked(iteration)
            if order is not None:
                self._tell(order, "dropped", iteration)
            return True
        if order is not None:
            self._obey(order, iteration)
        if self.due is None:
            self._prepare_planned(iteration, args)
        return self.due is not None

    def is_planned(self, switch: PlannedSwitch) -> bool:
        """Return whether a switch is of the schedule, and not one that was asked for."""
        return any(switch is planned for planned in self.pending)

    def _obey(self, order: Order, iteration: int) -> None:
        """Do what all ranks have agreed on, unless something came between that all ranks know of."""
        ready = isinstance(self.ahead, Order) and self.ahead.attempt == order.attempt
        if order.kind == "prepare":
            self._drop_asked(iteration)  # of a request that was given up
            if self.ahead is None and order.version == self.current.version:
                self._prepare(order.switch.target, order)
                self._tell(order, "begun", iteration)
                return
        elif order.kind == "switch" and ready:
            self.due, self._order = order.switch, order
            return
        elif ready:
            self._drop_asked(iteration)
        self._tell(order, "dropped", iteration)

    def _drop_asked(self, iteration: int) -> None:
        """Let go of what is being prepared because somebody asked for it, if anything is; who asked is told."""
        if isinstance(self.ahead, Order):
            dropped, self.ahead = self.ahead, None
            self.switcher.cancel_preparation()
            self._thread_args = self._datasets = None
            self._tell(dropped, "dropped", iteration)

    def _tell(self, order: Order, what: Any, iteration: int, error: str | None = None) -> None:
        self._live.tell(Event(order.attempt, what, iteration, error))

    def _prepare_planned(self, iteration: int, args: Namespace) -> None:
        """Begin to prepare the next planned switch where its boundary is near; without asking the other ranks."""
        if self.ahead is not None or not self.pending or self.options.prepare_ahead == 0:
            return
        planned = self.pending[0]
        boundary = clock_of(args, iteration).boundary(planned.trigger)
        if 0 < boundary - iteration <= self.options.prepare_ahead:
            self._prepare(planned.target, planned)

    def _prepare(self, target: Target, what: PlannedSwitch | Order) -> None:
        self.progress.begin()
        self._begun = what if isinstance(what, PlannedSwitch) else what.switch
        self._thread_args = ThreadArguments(values_for(target, self.switcher.rank))
        self.switcher.prepare_ahead(target.layout, inside=self._thread_args.seen())
        self.ahead = what

    def end(self, error: BaseException | None = None) -> None:
        """Listen no more and drop what was being prepared: no step follows; local, at one boundary on every rank."""
        self._live.stop(error)
        # After an error others may be gone, and the thread that builds would wait for them until its deadline.
        self.switcher.cancel_preparation(None if error is None else 0.0)
        if not self.switcher.parked:
            self.switcher.dismiss()
        self._thread_args = self._datasets = self.ahead = None

    # --- the switch ---------------------------------------------------------------------------------------------------

    def change_layout(self, iteration: int, context: dict[str, Any]) -> bool:
        """Do the switch that is due; collective. Returns whether the layout changed; the job goes on either way."""
        switch, order = self.due, self._order
        if switch is None:
            raise StateError("no switch is due", rank=self.switcher.rank, got=iteration)
        target = switch.target
        args = get_args()
        change = ArgumentChange(args, values_for(target, self.switcher.rank))
        try:
            report = self.switcher.switch(target.layout)
        except SwitchFailure as failure:
            change.undo()
            self._new_data = self._datasets = self._thread_args = None
            self._write(failure.report, str(switch.trigger), iteration, time.perf_counter() - self._boundary)
            self._over(switch, failure.report, order, iteration)
            return False
        if self.switcher.parked:
            self._leave(target, context)
        else:
            self._follow(target, args, context)
        self._stalled = _Pending(report, str(switch.trigger), iteration, self._boundary)
        self._over(switch, report, order, iteration)
        return True

    def _note(self) -> JobState:
        """Return what a process that comes back must know; on the rank that calls it, between two steps."""
        args = get_args()
        coming = self.due or self._begun
        if coming is None:
            raise StateError("a process is called although no switch is due", rank=self.switcher.rank)
        return JobState(
            target=coming.target,
            progress=progress_of(args),
            trigger=str(coming.trigger),
            num_steps=self.roles.scheduler.num_steps,
            pending=len(self.pending),
            planned=self.is_planned(coming),
            version=self.current.version,
            train_iters=self.train_iters,
        )

    def wait_outside(self, context: dict[str, Any]) -> bool:
        """Wait, in a process that has left, until it is in the layout again; False where the training has ended."""
        args = get_args()

        def prepared(seen: ThreadArguments) -> None:
            self._thread_args = seen

        back = Outside(self.switcher, args, prepared).wait()
        if back is None:
            return False
        report, state = back
        planned = len(self.pending) - state.pending + (1 if state.planned else 0)
        del self.pending[:planned]
        self.current = Current(self.current.target, state.version)
        self.completed, self.train_iters = int(args.iteration), state.train_iters
        self._boundary = time.perf_counter()
        self._follow(state.target, args, context)
        self.roles.scheduler.num_steps = state.num_steps
        self._stalled = _Pending(report, state.trigger, self.completed, self._boundary)
        return True

    def _leave(self, target: Target, context: dict[str, Any]) -> None:
        """Let go of everything of the world that this process has left; local."""
        self.layout = target.layout
        self.current = Current(target, self.current.version + 1)
        self._thread_args = self._datasets = self._new_data = None
        context.clear()
        self.model.clear()
        self.roles.optimizer = self.roles.scheduler.optimizer = self.roles.config = None
        self.roles.data.close()
        self.roles.data = DataIterators(None, None, None)
        close_writer()
        print(f"[dynatrain] rank {self.switcher.rank} has left the layout and waits", flush=True)

    @property
    def shared(self) -> list[Any]:
        """What each rank gave to the last switch by `Switcher.share`, by rank; empty once a step has begun."""
        return [] if self._stalled is None else [value for _, value in sorted(self._stalled.report.shared.items())]

    def _over(self, switch: PlannedSwitch, report: SwitchReport, order: Order | None, iteration: int) -> None:
        """Take a switch off the list, and tell who asked for it."""
        self.pending[:] = [planned for planned in self.pending if planned is not switch]
        self.due = self.ahead = self._order = None
        if order is not None:
            self._tell(order, report.outcome, iteration, report.error)

    def _build(self, layout: ParallelLayout) -> tuple[list[torch.nn.Module], object]:
        """Build the target's chunks, optimizer and data sets: at the boundary, or before it in another thread."""
        chunks, optimizer = self.builder(layout)
        self._datasets = Datasets(self.provider, layout.vpp)
        return chunks, optimizer

    def _place_data(self, layout: ParallelLayout) -> None:
        """Make the target's data iterators at the consumed samples, which are known at the boundary only."""
        if self._datasets is None:
            raise StateError("a target was built without data sets", rank=self.switcher.rank)
        self._new_data = rebuild(stock_builder(), self._datasets.provider(), layout.vpp)

    def _follow(self, target: Target, args: Namespace, context: dict[str, Any]) -> None:
        """Point everything that holds on to the old world at the new one; local."""
        if self._new_data is None:
            raise StateError("a switch was committed without data iterators", rank=self.switcher.rank)
        self.layout = target.layout
        self.current = Current(target, self.current.version + 1)
        if self._thread_args is not None:
            self._thread_args.become(args)
        self._thread_args = self._datasets = None
        context.clear()  # the save strategy keeps the old data-parallel group
        self.model[:] = self.switcher.world.chunks
        self.roles.optimizer = self.switcher.world.optimizer
        self.roles.scheduler.optimizer = self.roles.optimizer
        self.roles.config = model_config(self.model[0])
        self.roles.data.close()
        self.roles.data, self._new_data = self._new_data, None
        follow_last_rank(args)
        reset_microbatches(
            rank=args.rank,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
            consumed_samples=args.consumed_train_samples,
            decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
            step_batch_size_schedule=args.step_batch_size_schedule,
            seq_length=args.seq_length,
        )

    # --- records ------------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Close the record of the last switch: the first step under the new layout begins."""
        if self._stalled is not None:
            done, self._stalled = self._stalled, None
            self._write(done.report, done.trigger, done.iteration, time.perf_counter() - done.began)

    def _write(self, report: SwitchReport, trigger: str, iteration: int, stall: float) -> None:
        record = record_of(report, trigger=trigger, iteration=iteration, stall_s=stall)
        # A rank that has just come back knows nothing of the stall.
        stayed = set(report.source.ranks) & set(self.layout.ranks) or self.layout.ranks
        if self.switcher.rank == min(stayed):
            try:
                append_record(self.options.directory, record)
            except OSError as error:  # the switch is done: a full disk must not end the job
                logger.error("the record of a switch could not be written: %s", error)
            print(f"[dynatrain] {format_line(record)}", flush=True)
        writer = get_tensorboard_writer()
        if writer is not None:
            for tag, value in tensorboard_scalars(record).items():
                writer.add_scalar(tag, value, iteration)
            for tag, text in tensorboard_text(record).items():
                writer.add_text(tag, text, iteration)


def _check_fit(layout: ParallelLayout) -> None:
    """Refuse a layout that the job's model and batches don't fit; local, the target's arguments are live.

    Raises:
        LayoutError: The first misfit, by its flag.
    """
    args = get_args()
    sizes = model_sizes(args, args.padded_vocab_size)
    check_model_fit(layout, micro_batch_size=args.micro_batch_size, **dataclasses.asdict(sizes))
