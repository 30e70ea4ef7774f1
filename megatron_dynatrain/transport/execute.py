"""Execute the plan of one rank: window by window, pack, exchange, copy and unpack."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_dynatrain.routing.windows import RankPlan, Window
from megatron_dynatrain.transport.base import Deadline, Transport
from megatron_dynatrain.transport.device import Copies, copies_for
from megatron_dynatrain.transport.messages import BitViews, Memory, Message, as_bytes, by_peer, part_of
from megatron_dynatrain.transport.write_once import WriteCounter

__all__ = ["Execution", "Memory", "Posted", "TransferReport", "run_plan"]

OnWindow = Callable[[int], None]
"""Called with the index of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What one rank did.

    Args:
        rank: Global rank.
        sent_bytes: To other ranks.
        received_bytes: From other ranks.
        copied_bytes: Within its own memory.
        windows: Windows executed, empty ones included.
        messages: Messages sent and received, after packing.
        staging_bytes: Most staging memory held at a time; less than planned where moves went without staging.
        seconds: Wall time.
    """

    rank: int
    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    windows: int
    messages: int
    staging_bytes: int
    seconds: float


@dataclass(slots=True)
class Posted:
    """The messages of one window, between packing and unpacking."""

    window: Window
    sends: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    receives: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    unpack: list[tuple[Message, torch.Tensor]] = field(default_factory=list)
    staging: list[torch.Tensor] = field(default_factory=list)


class Execution:
    """One rank's side of a plan, in steps: `post` a window, let a transport exchange it, `finish` it.

    Args:
        plan: The rank's plan.
        source: Memory that is read.
        target: Memory that is written; may share nothing with the source.
        in_place: Whether long contiguous moves go without staging. Off where source slabs are freed, or target slabs
            made, between `post` and `finish`.
        writes: Counts writes, for checks.
    """

    def __init__(
        self,
        plan: RankPlan,
        source: Memory,
        target: Memory,
        *,
        in_place: bool = True,
        writes: WriteCounter | None = None,
    ) -> None:
        self.plan = plan
        self.copies: Copies = copies_for(source, target)
        self._source = BitViews(source, "source", plan.rank)
        self._target = BitViews(target, "target", plan.rank)
        self._in_place = in_place
        self._writes = writes
        self._began = time.monotonic()
        self._windows = self._messages = self._copied = self._staging = 0
        self._sent = self._received = 0

    def post(self, window: Window) -> Posted:
        """Pack what the window sends, and make room for what it receives."""
        posted = Posted(window)
        with self.copies.copying():
            for peer, messages in by_peer(window.sends, sent=True).items():
                posted.sends[peer] = [self._pack(message, posted) for message in messages]
            for peer, messages in by_peer(window.receives, sent=False).items():
                posted.receives[peer] = [self._room(message, posted) for message in messages]
        self._staging = max(self._staging, sum(tensor.numel() for tensor in posted.staging))
        self.copies.before_exchange(posted.staging)
        return posted

    def finish(self, posted: Posted) -> None:
        """Copy what stays on the rank and unpack what arrived; staging is free afterwards."""
        self.copies.after_exchange()
        with self.copies.copying():
            for move in posted.window.copies:
                source = self._source.box(move.source, move.box)
                self._target.box(move.target, move.box).copy_(source, non_blocking=True)
                self._copied += move.nbytes
            for message, tensor in posted.unpack:
                self._unpack(message, tensor)
        if self._writes is not None:
            for move in (*posted.window.copies, *posted.window.receives):
                self._writes.record(move.target, move.box)
        self._count(posted)

    def report(self) -> TransferReport:
        """Return what was done so far."""
        return TransferReport(
            rank=self.plan.rank,
            sent_bytes=self._sent,
            received_bytes=self._received,
            copied_bytes=self._copied,
            windows=self._windows,
            messages=self._messages,
            staging_bytes=self._staging,
            seconds=time.monotonic() - self._began,
        )

    def _pack(self, message: Message, posted: Posted) -> torch.Tensor:
        if len(message.moves) == 1 and self._in_place:
            view = self._source.box(message.moves[0].source, message.moves[0].box)
            if self._can_travel(view):
                return as_bytes(view)
        staging = self._stage(message, posted)
        offset = 0
        for move in message.moves:
            view = self._source.box(move.source, move.box)
            part_of(staging, offset, view).copy_(view, non_blocking=True)
            offset += move.nbytes
        return staging

    def _room(self, message: Message, posted: Posted) -> torch.Tensor:
        if len(message.moves) == 1 and self._in_place:
            view = self._target.box(message.moves[0].target, message.moves[0].box)
            if self._can_travel(view):
                return as_bytes(view)
        staging = self._stage(message, posted)
        posted.unpack.append((message, staging))
        return staging

    def _can_travel(self, view: torch.Tensor) -> bool:
        """Return whether a transport can take the view itself: dense, and not on the host beside a GPU (offloading)."""
        return view.is_contiguous() and view.device == self.copies.device

    def _stage(self, message: Message, posted: Posted) -> torch.Tensor:
        staging = self.copies.empty(message.nbytes)
        posted.staging.append(staging)
        return staging

    def _unpack(self, message: Message, tensor: torch.Tensor) -> None:
        offset = 0
        for move in message.moves:
            view = self._target.box(move.target, move.box)
            view.copy_(part_of(tensor, offset, view), non_blocking=True)
            offset += move.nbytes

    def _count(self, posted: Posted) -> None:
        self._windows += 1
        self._messages += sum(map(len, posted.sends.values())) + sum(map(len, posted.receives.values()))
        self._sent += sum(t.numel() for tensors in posted.sends.values() for t in tensors)
        self._received += sum(t.numel() for tensors in posted.receives.values() for t in tensors)


@torch.no_grad()
def run_plan(
    plan: RankPlan,
    source: Memory,
    target: Memory,
    transport: Transport,
    *,
    deadline: Deadline,
    on_window: OnWindow | None = None,
    on_packed: OnWindow | None = None,
    on_arrived: OnWindow | None = None,
    in_place: bool = True,
    writes: WriteCounter | None = None,
) -> TransferReport:
    """Execute the plan of this rank; collective over the ranks of the plan.

    Bits are moved, whatever the dtype. The source is not changed. Returns when all of the target is written.

    Args:
        plan: This rank's plan; the pairs have agreed on it (`agree_on_pairs`).
        source: Slab name to flat tensor, as the source placement says.
        target: The same for the target placement.
        transport: How bytes reach other ranks.
        deadline: Limit of every wait.
        on_window: Called when a window is done.
        on_packed: Called when a window's sends are packed: source slabs that no later move reads may go. Needs
            `in_place=False` to mean that.
        on_arrived: Called when a window's bytes have arrived: the target slabs it writes must exist from here on.
        in_place: Whether long contiguous moves go without staging.
        writes: Counts writes, and checks them at the end.

    Raises:
        PlacementError: A memory is not what its placement says.
        TransferError: Bytes could not be exchanged; names window and peer.
        DeadlineError: The same, because of the time.
    """
    execution = Execution(plan, source, target, in_place=in_place, writes=writes)
    for window in plan.windows:
        label = f"window {window.index} of {len(plan.windows)}"
        deadline.check("transfer", label, rank=plan.rank)
        posted = execution.post(window)
        _call(on_packed, window)
        if posted.sends or posted.receives:
            transport.exchange(posted.sends, posted.receives, deadline=deadline, label=label)
        _call(on_arrived, window)
        execution.finish(posted)
        del posted  # staging goes before the next window stages
        _call(on_window, window)
    execution.copies.finish(deadline, rank=plan.rank)
    if writes is not None:
        writes.verify()
    return execution.report()


def _call(hook: OnWindow | None, window: Window) -> None:
    if hook is not None:
        hook(window.index)
