"""All ranks of a plan in one process, in lock step: for tests, and to replay a plan without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dynatrain.errors import TransferError
from megatron_dynatrain.routing.windows import RankPlan
from megatron_dynatrain.transport.execute import Execution, Memory, Posted, TransferReport
from megatron_dynatrain.transport.write_once import WriteCounter


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message on its way; a fault may change `tensor`, which is then a copy of what was sent."""

    window: int
    source_rank: int
    target_rank: int
    index: int
    tensor: torch.Tensor


Fault = Callable[[Delivery], bool]
"""Looks at each message, may change its bytes, and returns whether it arrives."""


@torch.no_grad()
def run_all(
    plans: Sequence[RankPlan],
    sources: Mapping[int, Memory],
    targets: Mapping[int, Memory],
    *,
    fault: Fault | None = None,
    on_window: Callable[[int], None] | None = None,
    in_place: bool = True,
    check_writes: bool = False,
) -> tuple[TransferReport, ...]:
    """Execute the plans of all ranks, one window of all ranks after the other; the code of `run_plan` does the work.

    Args:
        plans: One plan per rank.
        sources: Memory per rank; a rank without any may be missing.
        targets: Memory per rank; a rank without any may be missing.
        fault: Spoils or drops messages.
        on_window: Called when all ranks are done with a window.
        in_place: See `run_plan`.
        check_writes: Whether to check that every target element is written once.

    Raises:
        TransferError: What a rank sends is not what its peer receives.
        StateError: A target element was not written exactly once.
    """
    counters = {plan.rank: WriteCounter(targets.get(plan.rank, {}), plan.rank) for plan in plans if check_writes}
    executions = [
        Execution(
            plan,
            sources.get(plan.rank, {}),
            targets.get(plan.rank, {}),
            in_place=in_place,
            writes=counters.get(plan.rank),
        )
        for plan in plans
    ]
    for windows in zip(*(plan.windows for plan in plans), strict=True):
        posted = {
            execution.plan.rank: execution.post(window) for execution, window in zip(executions, windows, strict=True)
        }
        _deliver(windows[0].index, posted, fault)
        for execution in executions:
            execution.finish(posted[execution.plan.rank])
        if on_window is not None:
            on_window(windows[0].index)
    for counter in counters.values():
        counter.verify()
    return tuple(execution.report() for execution in executions)


def _deliver(window: int, posted: Mapping[int, Posted], fault: Fault | None) -> None:
    ends = {(rank, peer) for rank, post in posted.items() for peer in post.sends}
    ends |= {(peer, rank) for rank, post in posted.items() for peer in post.receives}
    for sender, receiver in sorted(ends):
        sent = posted[sender].sends.get(receiver, [])
        received = posted[receiver].receives.get(sender, [])
        if [t.numel() for t in sent] != [t.numel() for t in received]:
            raise TransferError(
                "what is sent is not what is received",
                phase="transfer",
                subject=f"window {window}, rank {sender} to rank {receiver}",
                expected=f"messages of {[t.numel() for t in sent]} bytes",
                got=f"{[t.numel() for t in received]} bytes",
            )
        for index, (message, room) in enumerate(zip(sent, received, strict=True)):
            if fault is None:
                room.copy_(message)
                continue
            delivery = Delivery(window, sender, receiver, index, message.clone())
            if fault(delivery):
                room.copy_(delivery.tensor)
