"""One attempt at a switch: the target comes to be step by step, and is dropped whole if any rank fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatron_dynatrain.elastic.council import Council
from megatron_dynatrain.elastic.groups import WorldGroups, default_group
from megatron_dynatrain.errors import DynaTrainError, MissingSourceError, StateError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore import buffers, states, teardown
from megatron_dynatrain.mcore.build import untouched_random_streams
from megatron_dynatrain.mcore.describe import check_described
from megatron_dynatrain.mcore.inner_optimizers import Step
from megatron_dynatrain.mcore.optimizers import SharedValues
from megatron_dynatrain.mcore.parallel_state import ParallelState
from megatron_dynatrain.mcore.random_streams import RandomStreams
from megatron_dynatrain.mcore.realize import clear_padding
from megatron_dynatrain.mcore.states import LiveState
from megatron_dynatrain.mcore.streams_switch import check_streams, rule_of, streams_after
from megatron_dynatrain.mcore.thread_world import thread_world
from megatron_dynatrain.membership import check_ranks, members_of, no_live_copy
from megatron_dynatrain.memory import MemoryNeed, choose_mode
from megatron_dynatrain.routing.windows import RankPlan, plan_rank
from megatron_dynatrain.switch_types import SwitchReport, World
from megatron_dynatrain.transport.base import Deadline
from megatron_dynatrain.transport.execute import run_plan
from megatron_dynatrain.transport.torch_p2p import TorchTransport, agree_on_pairs
from megatron_dynatrain.verify import (
    DigestTable,
    check_casts,
    check_replicas,
    check_same_bits,
    check_scalars,
    dense_and_experts,
)
from megatron_dynatrain.vps.flat_buffer import BufferPolicy
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import ModelDescription, StateKind

if TYPE_CHECKING:
    from megatron_dynatrain.switch import Switcher


class Attempt:
    """Everything of one attempted switch on this rank, in the order in which it comes to be.

    Made on every rank of the source or the target. A rank that joins has a source without state, one that leaves a
    target without state: nothing is built, sent to or read from what isn't there, and all else is the same.

    `begin`, then `build_ahead` in any thread while training goes on, then `take_over` at the boundary and the rest.
    Every method but `begin`, `world` and `abort` is collective and raises a DynaTrainError on every rank if any fails.

    Args:
        job: The switcher, for what all ranks do together and for the source world.
        layout: The layout to go to.
        report: Filled as the figures become known.
        apart: Whether `build_ahead` runs in a thread of its own beside the training thread.

    Attributes:
        report: As given.
        refused: What the first vote is to fail with.
        moved: Whether bytes may have moved: a failure is then an abort and not a refusal.
        description: The model as the target has it.
        council: What this attempt decides with: while it builds apart, not that of the training thread.
    """

    def __init__(self, job: Switcher, layout: ParallelLayout, report: SwitchReport, *, apart: bool = False) -> None:
        self._lost = job.lost  # what they held is taken from replicas on others
        self._job = job
        self._layout = layout
        self.report = report
        self._apart = apart
        self.rank = job.rank
        self.council = self._council(apart=apart)
        self._groups: WorldGroups = job.groups("world", layout.ranks, apart=apart)
        self._stays = self.rank in layout.ranks
        self._members_change = set(layout.ranks) != set(job.world.layout.ranks)
        union = members_of(job.world.layout, layout, self._lost)
        self._transfer_groups: WorldGroups = job.groups("transfer", union, apart=apart)
        self._streams: RandomStreams | None = None
        self._parallel_state: ParallelState | None = None
        self._transport: TorchTransport | None = None
        self._host_group: object = None
        self._replica_groups: list[object] = []
        self._chunks: list[torch.nn.Module] = []
        self._optimizer: object = None
        self._skip: tuple[StateKind, ...] = ()
        self.refused: DynaTrainError | None = None
        self.moved = False

    def _council(self, *, apart: bool = False) -> Council:
        council = self._job.council(self._layout, apart=apart)
        council.on_failure = self._drop  # who waits for this rank in one of its groups fails now, not later
        return council

    # --- prepare ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Look at the source, in the training thread and between two steps; local. Errors wait for the vote."""
        try:
            self._source = LiveState(self._job.world.chunks, self._job.world.optimizer, rank=self.rank)
            self._steps = sorted(self._source.steps())
        except DynaTrainError as error:
            self.refused = error

    def build_ahead(self) -> None:
        """Check, build the target without values, plan, and let all pairs agree; nothing of the source is touched."""
        job, council = self._job, self.council
        with council.phase("prepare", "fit"):
            if self.refused is not None:
                raise self.refused
            check_ranks(job.processes, self._layout)
            job.model_fits(self._layout)
            self.description = job.description_at(self._layout)
            self._real_only = self.description.padded_rows != job.description.padded_rows
            self._policy = self._shared_policy("policy", self._source)
            self._before = self._place(job.description, job.world.layout, self._policy)
        council.same("target layout", self._layout, phase="prepare")
        with council.phase("prepare", "memory"):
            steps = council.gather("steps", self._steps)
            self._skip = () if any(steps.values()) else self.description.made_by_first_step
            self._source.check(self._before, moments=not self._skip)
            self._choose_memory()
        with council.phase("prepare", "groups"):
            self._make_groups()
        with council.phase("prepare", "build"):
            self._build()
        self._agree_on_plan()

    def _agree_on_plan(self) -> None:
        council = self.council
        with council.phase("prepare", "plan"):
            if not self._skip:
                self._target.create_moments()
            policy = self._shared_policy("target policy", self._target)
            self._after = self._place(self.description, self._layout, policy)
            self._target.check(self._after, moments=not self._skip)
            self._plan = self._route(self._before, self._after)
        with council.phase("prepare", "pairs"):
            # On the host: beside training, no second thread may use the GPU's communicators.
            host = TorchTransport(self._host_group, rank=self.rank, ranks=self._transfer_groups.ranks)
            agree_on_pairs(self._plan, host, deadline=self._deadline())

    def take_over(self) -> None:
        """Make what was built ready for the transfer, at the boundary and in the thread that trains."""
        job = self._job
        self.council = council = self._council()
        self._streams = RandomStreams.capture()
        with council.phase("prepare", "optimizer"):
            step = self._step_of_the_job()
            parts = council.gather("optimizer", SharedValues.of(self._source.optimizer))
            self._shared = SharedValues.merged(part for _, part in sorted(parts.items()))
            self.report.shared = council.gather("of the loop", job.share())
        if bool(self._skip) == (step is not None):  # the job made its first step while this was built
            self._skip = () if step is not None else self.description.made_by_first_step
            self._agree_on_plan()
        with council.phase("prepare", "allocate"):
            if step is not None:
                self._target.set_step(step)
            states.release_gradients(job.world.chunks)
            self._target.realize()
            rows = job.vocabulary.size if job.vocabulary is not None else None
            # As in _build: a model's sharded_state_dict asks the live parallel state where its layers stand.
            if self._stays:
                with self._live_target():
                    check_described(self.description, self._chunks, self._layout, real_rows=rows)
                    job.at_boundary(self._layout)
            self._add_totals()

    def _step_of_the_job(self) -> Step | None:
        """Return the job's one step count, in the optimizer's own type; None before the first step."""
        template = self._source.step_template()
        kept = template.detach().clone() if isinstance(template, torch.Tensor) else template
        gathered = self.council.gather("step", (sorted(self._source.steps()), kept))
        distinct = sorted({step for steps, _ in gathered.values() for step in steps})
        if len(distinct) > 1:
            raise StateError(
                "the optimizer's step counts differ",
                phase="prepare",
                subject="step",
                expected="one step count on all ranks and parameters",
                got=distinct,
                hint="an optimizer that counts differently per parameter can't be switched",
            )
        return next((step for _, step in gathered.values() if step is not None), None)

    def _choose_memory(self) -> None:
        options = self._job.options
        after = self._place(self.description, self._layout, self._policy)
        itemsize = states.gradient_itemsize(self._source.chunks)
        staging = options.budget.bytes
        need = MemoryNeed.of(self._before, after, self.rank, staging=staging, gradient_itemsize=itemsize)
        self.report.memory_mode = choose_mode(options.memory, need, limit=options.memory_limit, rank=self.rank)

    def _make_groups(self) -> None:
        """Make the groups of the target and of the transfer."""
        groups, layout = self._transfer_groups, self._layout
        self._transport = TorchTransport(groups.group(), rank=self.rank, ranks=groups.ranks, device=self._job.device)
        self._host_group = groups.group(backend="gloo")  # small numbers of the host; on gloo the same group
        if not self._stays:
            return
        self._parallel_state = ParallelState.build(layout, self._groups)
        self._groups.group()  # the target's default group
        replicas = layout.group_of(self.rank, "dp-cp"), layout.group_of(self.rank, "dp", expert=True)
        self._replica_groups = [groups.group(ranks, backend="gloo") for ranks in replicas]

    def _build(self) -> None:
        """Build the target's chunks and optimizer, all without storage."""
        if not self._stays:
            self._target = LiveState([], None, rank=self.rank)
            return
        with self._apart_target() if self._apart else self._live_target():
            self._chunks, self._optimizer = self._job.build(self._layout)
            # Here, as a model's sharded_state_dict asks the live parallel state where its layers stand.
            self._target = LiveState(self._chunks, self._optimizer, rank=self.rank)
        self._target.check_device(self._job.device)
        states.release_gradients(self._chunks)

    @contextmanager
    def _live_target(self) -> Iterator[None]:
        """Let the whole process see the target's parallel state; random streams are put back afterwards."""
        with self._parallel_state.active(), default_group(self._groups.group()), untouched_random_streams():
            yield

    @contextmanager
    def _apart_target(self) -> Iterator[None]:
        """Let this thread alone see the target's parallel state."""
        # Megatron's optimizer gathers over the default group: on gloo, as one thread alone may use a communicator.
        with thread_world(self._parallel_state, self._groups.group(backend="gloo")):
            yield

    def _place(self, description: ModelDescription, layout: ParallelLayout, policy: BufferPolicy) -> Placement:
        outside = (set(self._transfer_groups.ranks) - set(layout.ranks)) | self._lost
        return Placement(description, layout, policy, real_only=self._real_only, outside=outside)

    def _shared_policy(self, name: str, live: LiveState) -> BufferPolicy:
        """Return the buffer policy of a world, also on a rank outside of it; collective where members change."""
        policy = live.buffer_policy()
        if self._members_change:
            offered = self.council.gather(name, policy)
            policy = next(offer for _, offer in sorted(offered.items()) if offer is not None)
        if policy is None:
            raise StateError("a rank of the layout has no model", rank=self.rank, phase="prepare")
        return policy

    def _route(self, before: Placement, after: Placement) -> RankPlan:
        try:
            return plan_rank(before, after, self.rank, budget=self._job.options.budget, skip_states=self._skip)
        except MissingSourceError as error:
            if not self._lost:
                raise
            raise no_live_copy(error, self._lost) from error

    def _add_totals(self) -> None:
        plan = self._plan
        held = _nbytes(self._memory(self._source)), _nbytes(self._memory(self._target))
        row = (plan.sent_bytes, plan.received_bytes, plan.local_bytes, plan.minimum_received_bytes)
        peak = held[0] + held[1] + plan.staging_bytes
        step = held[0] + states.gradient_bytes(self._source.chunks)
        rows = self.council.gather("totals", (*row, peak, step))
        self.report.add_totals(list(rows.values()), windows=len(plan.windows))

    # --- transfer, verify ---------------------------------------------------------------------------------------------

    def transfer(self) -> None:
        """Move every state, then what is not a tensor per parameter; the source keeps all of its own."""
        job = self._job
        self.moved = True
        with self.council.phase("transfer", "bytes"), torch.no_grad():
            if self._real_only:
                clear_padding(self.description, self._after, self._memory(self._target), self.rank)
            run_plan(
                self._plan,
                self._memory(self._source),
                self._memory(self._target),
                self._transport,
                deadline=self._deadline(),
                on_window=lambda index: job.on_phase(f"transfer/window {index}"),
            )
        with self.council.phase("transfer", "scalars"):
            self._target.copy_main()
            self._shared.carry(self._target.optimizer, rank=self.rank)

    def verify(self) -> None:
        """Prove that the target holds what the source holds; after this every rank commits."""
        job = self._job
        with self.council.phase("verify", "streams"):
            streams = streams_after(
                job.world.layout,
                self._layout,
                self.rank,
                own=self._streams,
                gather=self._gather,
                seed=job.options.seed,
                number=job.committed + 1,
            )
            streams.restore()
            self.report.streams = rule_of(
                job.world.layout, self._layout, seed=job.options.seed, number=job.committed + 1
            )
        with self.council.phase("verify", "digest"):
            if job.options.verify != "off":
                before = DigestTable.compute(
                    self._before, self._memory(self._source), self.rank, skip=self._skip, once=bool(self._lost)
                )
                after = DigestTable.compute(self._after, self._memory(self._target), self.rank, skip=self._skip)
                check_casts(self._target, rank=self.rank)
                buffers.check_counters(self._chunks, rank=self.rank)
                check_scalars(self._source, self._target, self._shared, rank=self.rank)
        if job.options.verify == "full":
            with self.council.phase("verify", "return"), torch.no_grad():
                self._compare_every_bit()
        with self.council.phase("verify", "compare"):
            if job.options.verify != "off":
                before.compare(after, self._host_group)
                for tensors, group in zip(
                    dense_and_experts(self.description), self._replica_groups, strict=self._stays
                ):
                    check_replicas(after, tensors, group, rank=self.rank)
                check_streams(self._layout, self.rank, streams, gather=self._gather)

    def _gather(self, name: str, value: object) -> Mapping[int, Any]:
        return self.council.gather(name, value, phase="verify")

    def _compare_every_bit(self) -> None:
        """Send the target's state back to where it came from, into scratch memory, and compare it with the source."""
        memory = self._memory(self._source)
        scratch = {name: torch.empty_like(flat) for name, flat in memory.items()}
        plan = self._route(self._after, self._before)
        run_plan(plan, self._memory(self._target), scratch, self._transport, deadline=self._deadline())
        check_same_bits(self._before, memory, scratch, self.rank, skip=self._skip)

    # --- the end ------------------------------------------------------------------------------------------------------

    def world(self) -> World:
        """Return the finished target; local."""
        state = self._parallel_state if self._stays else ParallelState.of_no_world()
        if state is None:
            raise StateError("a world was asked for before it was built", rank=self.rank)
        return World(self._layout, self._chunks, self._optimizer, state)

    def world_group(self) -> object:
        """Return the group of all ranks of the target, in its order; local, it exists since prepare."""
        return self._groups.group()

    def release_transport(self, *, abort: bool = False) -> None:
        """Destroy the groups of the transfer; local. Ranks that still wait in one of them fail at once."""
        if self._transport is not None:
            self._transport.close()
        self._host_group = None
        self._replica_groups = []
        self._transfer_groups.destroy(abort=abort)

    def close(self, *, abort: bool = False) -> None:
        """Let go of the transfer's groups and of all that refers to source and target; local."""
        self.release_transport(abort=abort)
        self._source = self._target = None

    def abort(self) -> None:
        """Drop everything of the target; the old world is untouched but for its gradient buffers, made again. Local."""
        try:
            if self._streams is not None:
                self._streams.restore()
            self._drop()
        finally:
            if self._streams is not None:  # the boundary was reached: gradients are dead, and may be released
                states.restore_gradients(self._job.world.chunks)

    def _drop(self) -> None:
        """Let go of the target and of all that refers to it: a group's connections close with the last reference."""
        self.close(abort=True)
        teardown.release_optimizer(self._optimizer)
        teardown.release_model(self._chunks)
        self._chunks.clear()
        self._optimizer = None
        if self._parallel_state is not None:
            self._parallel_state.destroy(abort=True)
        self._groups.destroy(abort=True)
        teardown.collect()

    def _memory(self, live: LiveState) -> dict[str, torch.Tensor]:
        return live.memory(moments=not self._skip)

    def _deadline(self) -> Deadline:
        return Deadline(self._job.options.timeout)


def _nbytes(memory: dict[str, torch.Tensor]) -> int:
    return sum(flat.numel() * flat.element_size() for flat in memory.values())
