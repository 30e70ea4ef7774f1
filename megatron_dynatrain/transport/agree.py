"""Agreement of every pair on what it will exchange, before the first byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dynatrain.errors import DeadlineError, TransferError
from megatron_dynatrain.routing.windows import PairSummary, RankPlan, Summary, pair_error
from megatron_dynatrain.transport.base import Deadline

if TYPE_CHECKING:
    from megatron_dynatrain.transport.torch_p2p import TorchTransport

_FIELDS = 7
"""Of one pair, as int64: bytes, moves and digest sent, the same received, number of windows."""


def agree_on_pairs(plan: RankPlan, transport: TorchTransport, *, deadline: Deadline) -> None:
    """Check with every peer that both plan the same; collective over the transport's group.

    Each rank tells every other rank (bytes, moves, digest) of both directions, in one exchange of fixed size; then all
    ranks learn of every pair that disagrees, so all raise the same error or none does.

    Args:
        plan: This rank's plan.
        transport: The transport that will run it.
        deadline: Limit of every wait.

    Raises:
        AgreementError: A pair disagrees; names the pair and what both planned, on every rank.
        DeadlineError: A rank did not come.
        TransferError: The group failed.
    """
    pairs = [plan.pair_summary(peer) for peer in transport.ranks]
    rows = [_encode(pair) for pair in pairs]
    mine = torch.tensor(rows, dtype=torch.int64, device=transport.device)
    theirs = torch.empty_like(mine)
    _wait(dist.all_to_all_single(theirs, mine, group=transport.group, async_op=True), plan.rank, deadline)
    # (peer, what this rank planned, what the peer planned) of the first pair that disagrees; -1 for none.
    verdict = torch.full((1 + 2 * _FIELDS,), -1, dtype=torch.int64, device=transport.device)
    there = theirs.tolist()
    for i, peer in enumerate(transport.ranks):
        if peer != plan.rank and not pairs[i].agrees_with(_decode(there[i])):
            verdict = torch.tensor([peer, *rows[i], *there[i]], dtype=torch.int64, device=transport.device)
            break
    verdicts = [torch.empty_like(verdict) for _ in transport.ranks]
    _wait(dist.all_gather(verdicts, verdict, group=transport.group, async_op=True), plan.rank, deadline)
    for rank, found in zip(transport.ranks, verdicts, strict=True):
        peer, *numbers = found.tolist()
        if peer >= 0:
            raise pair_error(rank, peer, _decode(numbers[:_FIELDS]), _decode(numbers[_FIELDS:]))


def _encode(pair: PairSummary) -> list[int]:
    sent, received = pair.sent, pair.received
    return [sent.nbytes, sent.ops, sent.digest, received.nbytes, received.ops, received.digest, pair.windows]


def _decode(row: list[int]) -> PairSummary:
    return PairSummary(Summary(*row[:3]), Summary(*row[3:6]), row[6])


def _wait(work: dist.Work | None, rank: int, deadline: Deadline) -> None:
    if work is None:
        raise TransferError("this rank is not a member of the group", rank=rank, phase="prepare")
    try:
        work.wait(deadline.wait_limit())
    except RuntimeError as error:
        late = deadline.passed()
        raise (DeadlineError if late else TransferError)(
            "the ranks could not agree on what to exchange",
            rank=rank,
            phase="prepare",
            expected=f"an answer of all ranks within {deadline.seconds:g} s",
            got=str(error).splitlines()[0],
            hint="nothing has moved; see the logs of the other ranks",
        ) from error
