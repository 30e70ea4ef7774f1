"""Transport over a torch.distributed group: isend/irecv on gloo, batches of them on NCCL."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dynatrain.errors import DeadlineError, TransferError
from megatron_dynatrain.routing.rounds import Rounds
from megatron_dynatrain.transport.agree import agree_on_pairs
from megatron_dynatrain.transport.base import Deadline

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["TorchTransport", "agree_on_pairs"]

_PER_PAIR = 4
"""Messages of one pair and direction in one batch."""
_POLL = 0.0005
"""Seconds between two looks at NCCL work, whose own wait doesn't stop the host."""


@dataclass(slots=True)
class _Pending:
    """One operation in flight; `work` is None until it is posted."""

    work: Work | None
    what: str
    done: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """Some messages of one pair."""

    peer: int
    sends: Sequence[torch.Tensor]
    receives: Sequence[torch.Tensor]


class TorchTransport:
    """Point-to-point messages within one process group.

    Messages are posted in batches of whole rounds (`routing.rounds`) and a few messages per pair, so that a rank never
    has more than `max_ops` in flight. Every rank takes the batches in the same order and skips those in which it has
    nothing, so whoever waits in a batch waits for ranks that reach the same batch: there is no circular wait even if
    nothing is buffered.

    Args:
        group: Its process group, used by nobody else at the same time.
        rank: Global rank of this process.
        ranks: Global ranks of the group, in order of their rank in the group.
        device: Device of the messages; the CPU for gloo.
        max_ops: Messages that this rank may have in flight.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        rank: int,
        ranks: Sequence[int],
        device: torch.device | str = "cpu",
        max_ops: int = 256,
    ) -> None:
        self.group: ProcessGroup | None = group
        self.rank = rank
        self.ranks = tuple(ranks)
        self.device = torch.device(device)
        self._rounds = Rounds(sorted(self.ranks))
        self._group_rank = {global_rank: i for i, global_rank in enumerate(self.ranks)}
        self._per_pair = min(_PER_PAIR, max(1, max_ops // 2))
        self._rounds_per_batch = max(1, max_ops // (2 * self._per_pair))
        self._batched = dist.get_backend(group) == "nccl"
        # What is still in flight when an exchange fails: its memory may be written to until the group is destroyed.
        self._abandoned: list[tuple[list[_Pending], list[_Step]]] = []

    def exchange(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        *,
        deadline: Deadline,
        label: str = "",
    ) -> None:
        """Exchange the messages of one window; see `Transport.exchange`."""
        self._check_peers({*sends, *receives}, label)
        for batch in self._batches(sends, receives):
            pending: list[_Pending] = []
            try:
                self._post(batch, pending)
                for item in pending:
                    self._wait(item, deadline)
            except RuntimeError as error:
                self._abandoned.append((pending, batch))
                raise self._error(error, self._culprit(pending, batch), deadline, label) from error

    def close(self) -> None:
        """Let go of the group and of what was left in flight; local, the transport can't be used afterwards.

        Destroying the group then closes its connections, so that peers which still wait fail at once.
        """
        for pending, _ in self._abandoned:
            for item in pending:
                item.work = None  # before the memory that it may write to
        self._abandoned.clear()
        self.group = None

    def _check_peers(self, peers: set[int], label: str) -> None:
        strangers = sorted(peers.difference(self._group_rank)) + [self.rank] * (self.rank in peers)
        if strangers:
            raise TransferError(
                f"rank {strangers[0]} is no peer in the transport's group",
                rank=self.rank,
                phase="transfer",
                subject=label or None,
                expected=f"another one of ranks {self.ranks}",
                got=strangers[0],
            )

    def _batches(
        self, sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]]
    ) -> Iterator[list[_Step]]:
        steps: dict[tuple[int, int], list[_Step]] = {}
        for peer in sorted({*sends, *receives}, key=lambda p: self._rounds.of(self.rank, p)):
            block = self._rounds.of(self.rank, peer) // self._rounds_per_batch
            out = [tensor for tensor in sends.get(peer, ()) if tensor.numel()]
            into = [tensor for tensor in receives.get(peer, ()) if tensor.numel()]
            for part, at in enumerate(range(0, max(len(out), len(into)), self._per_pair)):
                end = at + self._per_pair
                steps.setdefault((block, part), []).append(_Step(peer, out[at:end], into[at:end]))
        for key in sorted(steps):
            yield steps[key]

    def _post(self, batch: Sequence[_Step], pending: list[_Pending]) -> None:
        if self._batched:
            ops = [
                dist.P2POp(op, tensor, group=self.group, group_peer=self._group_rank[step.peer])
                for step in batch
                for op, tensors in ((dist.irecv, step.receives), (dist.isend, step.sends))
                for tensor in tensors
            ]
            peers = ", ".join(str(step.peer) for step in batch)
            pending.extend(_Pending(work, f"exchanging with {peers}") for work in dist.batch_isend_irecv(ops))
            return
        # Receives first: what then arrives needs no buffer.
        for step in batch:
            for tensor in step.receives:
                pending.append(_Pending(None, f"receiving from rank {step.peer}"))
                pending[-1].work = dist.irecv(tensor, group=self.group, group_src=self._group_rank[step.peer])
        for step in batch:
            for tensor in step.sends:
                pending.append(_Pending(None, f"sending to rank {step.peer}"))
                pending[-1].work = dist.isend(tensor, group=self.group, group_dst=self._group_rank[step.peer])

    def _wait(self, item: _Pending, deadline: Deadline) -> None:
        work = item.work
        if work is None:
            raise RuntimeError("this rank is not a member of the group")
        if self._batched:
            while not work.is_completed():
                if deadline.passed():
                    raise RuntimeError("timed out")
                time.sleep(_POLL)
            work.wait()  # orders the current stream after it
        else:
            work.wait(deadline.wait_limit())
        item.done = True

    def _culprit(self, pending: Sequence[_Pending], batch: Sequence[_Step]) -> str:
        """Return what was being done when it failed."""
        missing = next((item for item in pending if item.work is None or not item.done), None)
        return missing.what if missing else f"exchanging with {', '.join(str(step.peer) for step in batch)}"

    def _error(self, cause: RuntimeError, what: str, deadline: Deadline, label: str) -> TransferError | DeadlineError:
        late = deadline.passed()
        kind = DeadlineError if late else TransferError
        return kind(
            f"{what} {'took too long' if late else 'failed'}",
            rank=self.rank,
            phase="transfer",
            subject=label or None,
            expected=f"done within {deadline.seconds:g} s",
            got=str(cause).splitlines()[0],
            hint="see the log of that rank; the group can't be used any more: destroy it and prepare the switch again",
        )
