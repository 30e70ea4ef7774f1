"""Run the plans of all ranks without bytes, under unbuffered sends and random delays, and find circular waits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dynatrain.errors import TransferError
from megatron_dynatrain.routing.rounds import Rounds
from megatron_dynatrain.routing.windows import RankPlan


@dataclass(frozen=True, slots=True)
class Post:
    """One blocking operation of a rank: it ends when the peer is at the opposite operation (rendezvous)."""

    peer: int
    sends: bool
    window: int
    nbytes: int


def program_of(plan: RankPlan) -> tuple[Post, ...]:
    """Return the operations of a rank in the strictest order a transport may use: one at a time, nothing buffered.

    Within a window peers come in order of their round; in a pair the rank that comes first sends first.
    """
    table = Rounds(plan.ranks)
    program: list[Post] = []
    for window in plan.windows:
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        for move in window.sends:
            sent[move.target_rank] = sent.get(move.target_rank, 0) + move.nbytes
        for move in window.receives:
            received[move.source_rank] = received.get(move.source_rank, 0) + move.nbytes
        for peer in sorted({*sent, *received}, key=lambda p: table.of(plan.rank, p)):
            posts = [
                Post(peer, sends, window.index, nbytes[peer])
                for sends, nbytes in ((True, sent), (False, received))
                if peer in nbytes
            ]
            program.extend(posts if plan.rank < peer else reversed(posts))
    return tuple(program)


def simulate_plans(plans: Sequence[RankPlan], seed: int = 0) -> int:
    """Execute all plans; return the number of messages exchanged. See `simulate`."""
    return simulate({plan.rank: program_of(plan) for plan in plans}, seed)


def simulate(programs: Mapping[int, Sequence[Post]], seed: int = 0) -> int:
    """Execute blocking programs under rendezvous, in a random order of events; return the number of messages.

    Raises:
        TransferError: A circular wait (names its ranks), a rank that waits for one that is done, or a message whose two
            ends differ.
    """
    generator = random.Random(seed)
    at = dict.fromkeys(programs, 0)
    arrived: set[int] = set()  # ranks that have reached their next operation; the others are delayed
    messages = 0
    while True:
        open_ranks = [rank for rank, program in programs.items() if at[rank] < len(program)]
        if not open_ranks:
            return messages
        delayed = [rank for rank in open_ranks if rank not in arrived]
        ready = [pair for rank in arrived if (pair := _partner(rank, programs, at, arrived))]
        if delayed and (not ready or generator.random() < 0.5):
            arrived.add(generator.choice(delayed))
        elif ready:
            for rank in generator.choice(sorted(ready)):
                at[rank] += 1
                arrived.discard(rank)
            messages += 1
        else:
            raise _stuck(programs, at)


def _partner(
    rank: int, programs: Mapping[int, Sequence[Post]], at: Mapping[int, int], arrived: set[int]
) -> tuple[int, int] | None:
    post = programs[rank][at[rank]]
    if post.peer not in arrived or not post.sends:
        return None
    other = programs[post.peer][at[post.peer]]
    if other.peer != rank or other.sends:
        return None
    if (post.window, post.nbytes) != (other.window, other.nbytes):
        raise TransferError(
            "the two ends of a message differ",
            rank=rank,
            phase="transfer",
            subject=f"rank {rank} to rank {post.peer}",
            expected=f"window {post.window}, {post.nbytes} bytes",
            got=f"window {other.window}, {other.nbytes} bytes",
        )
    return rank, post.peer


def _stuck(programs: Mapping[int, Sequence[Post]], at: Mapping[int, int]) -> TransferError:
    waits = {rank: program[at[rank]].peer for rank, program in programs.items() if at[rank] < len(program)}
    chain = [min(waits)]
    while waits.get(chain[-1]) is not None and waits[chain[-1]] not in chain:
        chain.append(waits[chain[-1]])
    end = waits.get(chain[-1])
    if end is None:
        message = f"rank {chain[-2] if len(chain) > 1 else chain[-1]} waits for rank {chain[-1]}, which is done"
    else:
        message = "circular wait"
        chain = [*chain[chain.index(end) :], end]
    return TransferError(message, phase="transfer", subject=" -> ".join(f"rank {rank}" for rank in chain))
