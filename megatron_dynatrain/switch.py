"""One switch of a running job from its layout to another, as a transaction: prepare, transfer, verify, commit or abort.

Works on Megatron chunks and optimizers alone; `megatron.training` is not needed. `training/` stands on top of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_dynatrain.attempt import Attempt
from megatron_dynatrain.elastic.control import ControlPlane
from megatron_dynatrain.elastic.council import Council
from megatron_dynatrain.elastic.groups import WorldGroups, make_default
from megatron_dynatrain.errors import (
    DynaTrainError,
    PlacementError,
    StateError,
    SwitchAborted,
    SwitchRefused,
    TransferError,
    UnsupportedError,
)
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore import states, teardown
from megatron_dynatrain.mcore.describe import describe_local, facts_of, merge, with_state_dtypes
from megatron_dynatrain.mcore.parallel_state import ParallelState
from megatron_dynatrain.mcore.states import LiveState
from megatron_dynatrain.preparation import Preparation
from megatron_dynatrain.switch_types import BuildTarget, SwitchOptions, SwitchReport, Vocabulary, World
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import ModelDescription

logger = logging.getLogger(__name__)

__all__ = ["SwitchOptions", "SwitchReport", "Switcher", "Vocabulary", "World"]


class Switcher:
    """Changes the layout of a running job between two steps.

    Made once per process, on every rank, after the model and the optimizer. `world` is always the current one.

    Args:
        layout: Layout that the job runs on now.
        chunks: Model chunks in Megatron's DDP.
        optimizer: Megatron's distributed optimizer.
        build: Builds the target; see `BuildTarget`.
        options: Settings, equal on every rank.
        store: Store that all ranks share; the default group's where None.
        name: Name of the job on that store, unique per Switcher of a process group.
        model_fits: Refuses a layout that the model can't take, by raising a DynaTrainError; the same on every rank.
        vocabulary: The vocabulary, where `build` pads it differently for different layouts; None where every layout
            has tables of the same size.
        at_boundary: What else of the target is to be built, but only at the boundary, such as data iterators; called
            with the target's parallel state live.

    Attributes:
        world: The current world.
        committed: Number of switches committed so far.
        refusal: Why no switch of this job is possible, by the name of a state that nobody can move. Every switch is
            then refused with it, and the job trains on. None in a healthy job.
        on_phase: Called with the name of each phase as it begins, for tests and for progress.
    """

    def __init__(
        self,
        *,
        layout: ParallelLayout,
        chunks: Sequence[torch.nn.Module],
        optimizer: object,
        build: BuildTarget,
        options: SwitchOptions | None = None,
        store: dist.Store | None = None,
        name: str = "dynatrain",
        model_fits: Callable[[ParallelLayout], None] | None = None,
        vocabulary: Vocabulary | None = None,
        at_boundary: Callable[[ParallelLayout], None] | None = None,
    ) -> None:
        self.options = options or SwitchOptions()
        self.rank = dist.get_rank()
        self.name = name
        self.store = store if store is not None else distributed_c10d._get_default_store()
        self.backend = str(dist.get_backend())
        self._launch_group, self._launch_order = dist.group.WORLD, tuple(range(dist.get_world_size()))
        self.world = World(layout, list(chunks), optimizer, ParallelState.capture())
        self.committed = 0
        self.on_phase: Callable[[str], None] = _nothing
        self.build = build
        self.model_fits = model_fits or _nothing
        self.at_boundary = at_boundary or _nothing
        self.vocabulary = vocabulary
        self._attempts = 0
        self._ahead: Preparation | None = None
        self._given_up: Preparation | None = None
        self._apart_store: dist.Store = self.store
        self._apart_control: ControlPlane | None = None
        self._control = ControlPlane(self.store, ranks=layout.ranks, rank=self.rank, tag=f"{name}/control")
        self._description: ModelDescription | None = None
        self.refusal: DynaTrainError | None = None
        try:
            self._description = self._describe()
        except (UnsupportedError, PlacementError, StateError) as error:
            self.refusal = error
            if self.rank == layout.ranks[0]:
                logger.error("no switch of this job is possible: %s", error)

    @property
    def description(self) -> ModelDescription:
        """The model, free of any layout.

        Raises:
            DynaTrainError: The model has a state that can't be moved; the same on every rank.
        """
        if self._description is None:
            raise self.refusal or StateError("the model was not described", rank=self.rank)
        return self._description

    def description_at(self, layout: ParallelLayout) -> ModelDescription:
        """Return the model as `build` makes it for a layout: its tables of the vocabulary may have other rows; pure."""
        if self.vocabulary is None:
            return self.description
        return self.description.padded_to(self.vocabulary.padded(layout))

    def _describe(self) -> ModelDescription:
        """Describe the whole model from every rank's real objects, and check its placement on them; collective."""
        world = self.world
        council = self.council()
        with council.phase("check", "describe"):
            real_rows = self.vocabulary.size if self.vocabulary is not None else None
            live = LiveState(world.chunks, world.optimizer, rank=self.rank)
            local = describe_local(world.chunks, world.layout, real_rows=real_rows), live.state_dtypes()
            parts = [part for _, part in sorted(council.gather("specs", local, phase="check").items())]
        with council.phase("check", "placement"):
            description = merge([specs for specs, _ in parts], facts_of(world.chunks))
            description = with_state_dtypes(description, [dtypes for _, dtypes in parts])
            live.check(Placement(description, world.layout, live.buffer_policy()), moments=bool(live.steps()))
        return description

    # --- a switch -----------------------------------------------------------------------------------------------------

    def prepare_ahead(self, layout: ParallelLayout, *, inside: AbstractContextManager[object] | None = None) -> None:
        """Begin to build another layout in a background thread while training goes on.

        Called by every rank at the same iteration boundary; returns at once. A `switch` to an equal layout uses what
        was built, and waits for what is not yet; a `switch` to another one, or `cancel_preparation`, drops it. What
        goes wrong is raised by that `switch`. The thread touches nothing of the current world: it has process groups,
        a store connection and a parallel state of its own.

        Args:
            layout: The layout to go to.
            inside: Entered by the thread for as long as it builds; what `build` reads can be set there for it alone.

        Raises:
            StateError: A layout is being prepared already.
        """
        if self._ahead is not None:
            raise StateError("a layout is being prepared already", rank=self.rank, got=self._ahead.layout.describe())
        self._attempts += 1
        report = SwitchReport(self.world.layout, layout, verify=self.options.verify)
        self._ahead = Preparation(Attempt(self, layout, report, apart=True), layout, report, inside, self._given_up)
        self._given_up = None

    @property
    def preparing(self) -> Preparation | None:
        """What is being prepared, or waits for its switch; None where nothing is."""
        return self._ahead

    def cancel_preparation(self) -> None:
        """Drop what `prepare_ahead` has begun, if anything; called by every rank at the same iteration boundary."""
        preparation, self._ahead = self._ahead, None
        if preparation is not None:
            preparation.cancel(self.options.timeout)
            self._keep_if_running(preparation)

    def _keep_if_running(self, preparation: Preparation) -> None:
        """Remember a preparation that was given up but whose thread goes on: the next one has to wait for it."""
        if not preparation.done:
            self._given_up = preparation

    def _attempt(self, layout: ParallelLayout) -> tuple[Attempt, Preparation | None]:
        """Return the attempt that was prepared for this layout, else a new one."""
        if self._ahead is not None and self._ahead.layout != layout:
            self.cancel_preparation()
        preparation, self._ahead = self._ahead, None
        if preparation is not None:
            return preparation.attempt, preparation
        self._attempts += 1
        report = SwitchReport(self.world.layout, layout, verify=self.options.verify)
        return Attempt(self, layout, report), None

    def switch(self, layout: ParallelLayout) -> SwitchReport:
        """Move the job to another layout; collective, called by every rank at an iteration boundary.

        Raises:
            SwitchRefused: Before anything moved.
            SwitchAborted: After something moved; the old world is as it was.
                Both carry the report as `report` and the first error as `__cause__`.
        """
        attempt, preparation = self._attempt(layout)
        report = attempt.report
        report.number = self.committed + 1
        try:
            with _timed(report, "prepare_s"):
                if preparation is not None:
                    with self.council().phase("prepare", "ahead"):
                        preparation.join(self.options.timeout)
                else:
                    attempt.begin()
                    attempt.build_ahead()
                attempt.take_over()
            with _timed(report, "transfer_s"):
                attempt.transfer()
            with _timed(report, "verify_s"):
                attempt.verify()
        except Exception as caught:
            error = caught if isinstance(caught, DynaTrainError) else _unexpected(caught, self.rank)
            (preparation or attempt).abort()
            if preparation is not None:
                self._keep_if_running(preparation)
            report.outcome = "aborted" if attempt.moved else "refused"
            report.error = str(error)
            raise _failure(report, error) from error
        with _timed(report, "commit_s"):
            self._commit(attempt)
        report.outcome = "committed"
        return report

    def _commit(self, attempt: Attempt) -> None:
        """Make the target current and let go of the old world; local, every rank has agreed to it."""
        before, self.world = self.world, attempt.world()
        self.world.parallel_state.swap_in()
        same_as_launch = self.world.layout.ranks == self._launch_order
        make_default(self._launch_group if same_as_launch else attempt.world_group())
        self.committed += 1
        self._description = attempt.description
        attempt.close()
        teardown.release_optimizer(before.optimizer)
        teardown.release_model(before.chunks)
        before.parallel_state.destroy()
        before.chunks.clear()
        before.optimizer = None
        teardown.release_trackers()
        teardown.collect()
        states.restore_gradients(self.world.chunks)

    # --- all ranks together -------------------------------------------------------------------------------------------

    def council(self, *, apart: bool = False) -> Council:
        """Return what the ranks of the current attempt decide with: in the training thread, or in one beside it."""
        if apart and self._apart_control is None:
            # A wait on a store's client blocks its other users, so the background thread has a client of its own.
            self._apart_store = self.store.clone()
            self._apart_control = ControlPlane(
                self._apart_store, ranks=self.world.layout.ranks, rank=self.rank, tag=f"{self.name}/apart"
            )
        return Council(
            self._apart_control if apart and self._apart_control is not None else self._control,
            prefix=str(self._attempts),
            seconds=self.options.timeout,
            on_phase=lambda name: self.on_phase(name),
        )

    def same(self, name: str, value: object) -> None:
        """Check that every rank has an equal value; collective, outside of attempts, once per name.

        Raises:
            AgreementError: Names the first rank that has another one, the same on every rank.
        """
        self.council().same(name, value)

    def groups(self, kind: str, ranks: Sequence[int], *, apart: bool = False) -> WorldGroups:
        """Return a maker of process groups for this attempt."""
        return WorldGroups(
            self._apart_store if apart else self.store,
            ranks=ranks,
            rank=self.rank,
            tag=f"{self.name}/{self._attempts}/{kind}",
            backend=self.backend,
            timeout=self.options.timeout,
            numbering=self.world.layout.ranks,
        )


def _unexpected(error: Exception, rank: int) -> DynaTrainError:
    """Return an error that no part of the switch foresaw as one that says where it was."""
    return TransferError(
        f"{type(error).__name__}: {error}", rank=rank, hint=f"see the log of rank {rank}; this is a fault of the plugin"
    )


def _nothing(_: object) -> None:
    """Do nothing: the default of hooks."""


@contextmanager
def _timed(report: SwitchReport, name: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        setattr(report, name, time.perf_counter() - began)


def _failure(report: SwitchReport, error: DynaTrainError) -> SwitchRefused | SwitchAborted:
    kind = SwitchAborted if report.outcome == "aborted" else SwitchRefused
    failure = kind(
        f"the switch from {report.source.describe()} to {report.target.describe()} was {report.outcome}; "
        f"training goes on with {report.source.describe()}: {error}"
    )
    failure.report = report
    return failure
