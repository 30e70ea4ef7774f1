"""One switch of a running job from its layout to another, as a transaction: prepare, transfer, verify, commit or abort.

Works on Megatron chunks and optimizers alone; `megatron.training` is not needed. `training/` stands on top of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_dynatrain.attempt import Attempt
from megatron_dynatrain.elastic.calls import Call, Calls
from megatron_dynatrain.elastic.control import ControlPlane
from megatron_dynatrain.elastic.council import Council
from megatron_dynatrain.elastic.groups import WorldGroups, make_default
from megatron_dynatrain.errors import (
    DynaTrainError,
    PlacementError,
    StateError,
    UnsupportedError,
)
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore import states, teardown
from megatron_dynatrain.mcore.describe import describe_local, facts_of, merge, with_state_dtypes
from megatron_dynatrain.mcore.parallel_state import ParallelState
from megatron_dynatrain.mcore.states import LiveState
from megatron_dynatrain.membership import members_of
from megatron_dynatrain.outcome import failure, timed, unexpected
from megatron_dynatrain.parking import OnCall, join_next
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
        share: Gives something small and picklable of this rank that all ranks get with the report of a switch.
        note: Gives what the processes that are called into the world are told besides; see `elastic.calls.Call`.
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
        self.device = next((parameter.device for chunk in chunks for parameter in chunk.parameters()), None)
        self.committed = 0
        self.note: Callable[[], object] = lambda: None
        self.share: Callable[[], object] = lambda: None
        self.on_phase: Callable[[str], None] = _nothing
        self.build = build
        self.model_fits = model_fits or _nothing
        self.at_boundary = at_boundary or _nothing
        self.vocabulary = vocabulary
        self._attempts = 0
        self._lost: set[int] = set()
        self._ahead: Preparation | None = None
        self._given_up: Preparation | None = None
        # A wait on a store's client blocks its other users, so the background thread has a client of its own.
        self._apart_store: dist.Store = self.store.clone()
        self._controls: dict[tuple[bool, tuple[int, ...]], ControlPlane] = {}
        self._calls = Calls(self.store, tag=f"{name}/calls", rank=self.rank)
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
        self._reap()
        self._call_others("prepare", layout, apart=True)
        report = SwitchReport(self.world.layout, layout, verify=self.options.verify)
        self._ahead = Preparation(Attempt(self, layout, report, apart=True), layout, report, inside, self._given_up)
        self._given_up = None

    @property
    def preparing(self) -> Preparation | None:
        """What is being prepared, or waits for its switch; None where nothing is."""
        return self._ahead

    def cancel_preparation(self, seconds: float | None = None) -> None:
        """Drop what `prepare_ahead` has begun, if anything; called by every rank at the same iteration boundary.

        Waits for the thread that builds, at most `seconds` (None: the timeout of the options).
        """
        preparation, self._ahead = self._ahead, None
        if preparation is not None:
            self._call_others("cancel", preparation.layout, apart=True)
            preparation.cancel(self.options.timeout if seconds is None else seconds)
            self._keep_if_running(preparation)

    def _keep_if_running(self, preparation: Preparation) -> None:
        """Remember a preparation that was given up but whose thread goes on: the next one has to wait for it."""
        if not preparation.done:
            self._given_up = preparation

    def _attempt(self, layout: ParallelLayout, lost: Collection[int]) -> tuple[Attempt, Preparation | None]:
        """Return the attempt that was prepared for this layout, else a new one."""
        self._lost |= set(lost)
        if self._ahead is not None and (lost or self._ahead.layout != layout):
            self.cancel_preparation()
        preparation, self._ahead = self._ahead, None
        if preparation is not None:
            self._call_others("switch", layout, apart=True)
            return preparation.attempt, preparation
        self._attempts += 1
        self._call_others("switch", layout, apart=False)
        report = SwitchReport(self.world.layout, layout, verify=self.options.verify)
        attempt = Attempt(self, layout, report)
        if self._reap() is not None:
            attempt.refused = StateError(
                "a preparation that was given up has not ended yet",
                rank=self.rank,
                phase="prepare",
                hint="it opens data sets or builds a model: see why that takes so long, and ask again later",
            )
        return attempt, None

    def _reap(self) -> Preparation | None:
        """Let go of what a preparation that was given up has left, once it has ended; return one that has not."""
        if self._given_up is not None and self._given_up.done:
            self._given_up.abort()
            self._given_up = None
        return self._given_up

    def switch(self, layout: ParallelLayout, *, lost: Collection[int] = ()) -> SwitchReport:
        """Move the job to another layout; collective, called by every rank at an iteration boundary.

        Args:
            layout: The layout to go to.
            lost: Ranks of the current world that are gone for good; the same on every rank that is left. What they
                held is taken from replicas. A state without a live copy is named, and the switch refused.

        Raises:
            SwitchRefused: Before anything moved.
            SwitchAborted: After something moved; the old world is as it was.
                Both carry the report as `report` and the first error as `__cause__`.
        """
        attempt, preparation = self._attempt(layout, lost)
        report = attempt.report
        report.number = self.committed + 1
        try:
            with timed(report, "prepare_s"):
                if preparation is not None:
                    with self.council(layout).phase("prepare", "ahead"):
                        preparation.join(self.options.timeout)
                else:
                    attempt.begin()
                    attempt.build_ahead()
                attempt.take_over()
            with timed(report, "transfer_s"):
                attempt.transfer()
            with timed(report, "verify_s"):
                attempt.verify()
        except Exception as caught:
            error = caught if isinstance(caught, DynaTrainError) else unexpected(caught, self.rank)
            (preparation or attempt).abort()
            if preparation is not None:
                self._keep_if_running(preparation)
            report.outcome = "aborted" if attempt.moved else "refused"
            report.error = str(error)
            raise failure(report, error) from error
        with timed(report, "commit_s"):
            self._commit(attempt)
        report.outcome = "committed"
        return report

    def _commit(self, attempt: Attempt) -> None:
        """Make the target current and let go of the old world; local, every rank has agreed to it."""
        with timed(attempt.report, "swap_s"):
            before, self.world = self.world, attempt.world()
            self.world.parallel_state.swap_in()
            # A rank that leaves goes back to the group of the launch, which all processes keep.
            of_launch = self.parked or self.world.layout.ranks == self._launch_order
            make_default(self._launch_group if of_launch else attempt.world_group())
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

    # --- ranks outside of the world -----------------------------------------------------------------------------------

    @property
    def processes(self) -> tuple[int, ...]:
        """Global ranks of all processes of the job that are alive, those outside of the current world too."""
        return tuple(rank for rank in self._launch_order if rank not in self._lost)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of the current world that are gone for good."""
        return frozenset(self._lost & set(self.world.layout.ranks))

    @property
    def parked(self) -> bool:
        """Whether this process is outside of the current world: it holds no state and can only `join_next`."""
        return self.rank not in self.world.layout.ranks

    def join_next(
        self, seconds: float | None = None, *, inside: OnCall | None = None, around: OnCall | None = None
    ) -> SwitchReport | None:
        """Wait until this parked process is in the world again; it sleeps while it waits.

        The ranks of the world call it by a `switch` to a layout that it is in. A switch that fails leaves it parked,
        and it waits on.

        Args:
            seconds: Longest wait; None waits until the job ends.
            inside: Gives what the thread that prepares the target is inside of, for a call.
            around: Gives what the switch itself is inside of, for a call.

        Returns:
            The report of the switch by which it joined; None where the time is up or the job has ended.
        """
        return join_next(self, self._calls, seconds, inside, around)

    def dismiss(self) -> None:
        """Tell every parked process that the job has ended; called by all ranks of the world, the first one tells."""
        if self.rank == self._first:
            outside = [rank for rank in self.processes if rank not in self.world.layout.ranks]
            self._calls.send(outside, Call("end"))

    @property
    def _first(self) -> int:
        """The rank of the world that speaks to those outside of it."""
        return next(rank for rank in self.world.layout.ranks if rank not in self._lost)

    def learn(self, call: Call) -> None:
        """Take over what happened while this process was outside; local."""
        self._attempts = call.attempt - 1
        self.committed = call.committed
        self._lost |= call.lost
        self._description = call.description
        self.world = World(call.source, [], None, self.world.parallel_state)

    def _call_others(self, stage: Literal["prepare", "switch", "cancel"], layout: ParallelLayout, apart: bool) -> None:
        """Call the processes that a layout takes in; the first rank of the current world does it."""
        if self.rank != self._first:
            return
        outside = [rank for rank in layout.ranks if rank in self.processes and rank not in self.world.layout.ranks]
        if outside:  # else there may be no note
            how = stage, self._attempts, apart, self.committed
            state = self.world.layout, layout, self._description, frozenset(self._lost)
            self._calls.send(outside, Call(*how, *state, self.note()))

    # --- all ranks together -------------------------------------------------------------------------------------------

    def council(self, target: ParallelLayout | None = None, *, apart: bool = False) -> Council:
        """Return what the ranks of the current attempt decide with: in the training thread, or in one beside it."""
        members = members_of(self.world.layout, target or self.world.layout, self._lost)
        if (apart, members) not in self._controls:
            kind = "apart" if apart else "control"
            digest = hashlib.sha1(repr(members).encode()).hexdigest()[:12]  # of thousands of ranks, perhaps
            self._controls[apart, members] = ControlPlane(
                self._apart_store if apart else self.store,
                ranks=members,
                rank=self.rank,
                tag=f"{self.name}/{kind}/{digest}",
            )
        return Council(
            self._controls[apart, members],
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
            numbering=self._launch_order if self.parked else self.world.layout.ranks,
        )


def _nothing(_: object) -> None:
    """Do nothing: the default of hooks."""
