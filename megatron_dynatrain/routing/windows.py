"""The plan of one rank: its moves, in windows that are the same on every rank."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_dynatrain.errors import AgreementError, PlanError
from megatron_dynatrain.routing.cut import Slice, WindowBudget, cut_windows
from megatron_dynatrain.routing.estimate import minimum_received_bytes
from megatron_dynatrain.routing.items import PieceIndex, items_of
from megatron_dynatrain.routing.moves import Move, NodeOf, clip, route
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import ModelDescription, StateKind

__all__ = ["PairSummary", "RankPlan", "Summary", "Window", "WindowBudget", "check_pairs", "plan_all", "plan_rank"]


@dataclass(frozen=True, slots=True)
class Window:
    """What one rank does in one window; the moves between two ranks are in the same order on both."""

    index: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    copies: tuple[Move, ...]

    @property
    def staging_bytes(self) -> int:
        """Bytes sent and received, together."""
        return sum(move.nbytes for move in self.sends) + sum(move.nbytes for move in self.receives)


@dataclass(frozen=True, slots=True)
class Summary:
    """One direction of what two ranks exchange: bytes, number of moves, and a digest of the ordered list of moves."""

    nbytes: int = 0
    ops: int = 0
    digest: int = 0

    def __str__(self) -> str:
        return f"{self.nbytes} bytes in {self.ops} moves, digest {self.digest:016x}"


@dataclass(frozen=True, slots=True)
class PairSummary:
    """What a rank exchanges with one peer, and in how many windows; `sent` here equals `received` there."""

    sent: Summary = Summary()
    received: Summary = Summary()
    windows: int = 0

    def agrees_with(self, there: PairSummary) -> bool:
        """Return whether the peer's summary of the same pair is the mirror of this one."""
        return (self.sent, self.received, self.windows) == (there.received, there.sent, there.windows)


@dataclass(frozen=True)
class RankPlan:
    """Everything one rank does in a switch; made without any other rank's plan.

    Args:
        rank: Global rank.
        ranks: All ranks of the source or the target layout, ascending.
        windows: All windows, the same number on every rank, in order of execution.
        minimum_received_bytes: Lower bound of what the rank must receive, from code that shares nothing with routing.
    """

    rank: int
    ranks: tuple[int, ...]
    windows: tuple[Window, ...] = field(repr=False)
    minimum_received_bytes: int

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that go to other ranks."""
        return sum(move.nbytes for window in self.windows for move in window.sends)

    @cached_property
    def received_bytes(self) -> int:
        """Bytes that come from other ranks."""
        return sum(move.nbytes for window in self.windows for move in window.receives)

    @cached_property
    def local_bytes(self) -> int:
        """Bytes copied within the rank's own memory."""
        return sum(move.nbytes for window in self.windows for move in window.copies)

    @cached_property
    def staging_bytes(self) -> int:
        """Largest number of bytes that one window sends and receives; at most the budget."""
        return max((window.staging_bytes for window in self.windows), default=0)

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks it exchanges bytes with, ascending."""
        return tuple(sorted(self._pairs))

    def pair_summary(self, peer: int) -> PairSummary:
        """Return what is exchanged with a peer in all windows; empty where nothing is."""
        return self._pairs.get(peer, PairSummary(windows=len(self.windows)))

    @cached_property
    def _pairs(self) -> dict[int, PairSummary]:
        sent = _summaries((w.index, move.target_rank, move) for w in self.windows for move in w.sends)
        received = _summaries((w.index, move.source_rank, move) for w in self.windows for move in w.receives)
        return {
            peer: PairSummary(sent.get(peer, Summary()), received.get(peer, Summary()), len(self.windows))
            for peer in {*sent, *received}
        }


def _summaries(moves: Iterable[tuple[int, int, Move]]) -> dict[int, Summary]:
    """Sum up (window, peer, move) per peer. The digest is 63 bits of BLAKE2b, so that it fits a signed integer."""
    nbytes: dict[int, int] = {}
    ops: dict[int, int] = {}
    hashes: dict[int, hashlib.blake2b] = {}
    for window, peer, move in moves:
        nbytes[peer] = nbytes.get(peer, 0) + move.nbytes
        ops[peer] = ops.get(peer, 0) + 1
        text = (
            f"{window}|{move.tensor}|{move.state}|{move.box.lo}|{move.box.hi}|{move.source.dtype}"
            f"|{move.source.slab}|{move.source.offset}|{move.target.slab}|{move.target.offset}\n"
        )
        if peer not in hashes:
            hashes[peer] = hashlib.blake2b(digest_size=8)
        hashes[peer].update(text.encode())
    return {
        peer: Summary(nbytes[peer], ops[peer], int.from_bytes(hashes[peer].digest(), "big") >> 1) for peer in nbytes
    }


def plan_rank(
    source: Placement,
    target: Placement,
    rank: int,
    *,
    budget: WindowBudget | None = None,
    node_of: NodeOf | None = None,
    skip_states: Collection[StateKind] = (),
) -> RankPlan:
    """Return the plan of one rank; pure and local: it looks only at tensors the rank holds in either layout.

    Args:
        source: Where everything is.
        target: Where everything goes; of the same model. Its ranks may be others than the source's.
        rank: Global rank, of the source or the target layout.
        budget: Limits of a window; the same on every rank.
        node_of: Node of a rank, the same function on every rank; None where all are alike.
        skip_states: States that are not moved.

    Raises:
        PlanError: An element without a source, a budget too small to move one row, or placements of different models.
    """
    planner = _Planner(source, target, budget, node_of, skip_states)
    if rank not in planner.ranks:
        raise PlanError("the rank is in neither layout", rank=rank, phase="prepare", expected=planner.ranks, got=rank)
    return planner.plan((rank,))[0]


def plan_all(
    source: Placement,
    target: Placement,
    *,
    budget: WindowBudget | None = None,
    node_of: NodeOf | None = None,
    skip_states: Collection[StateKind] = (),
) -> tuple[RankPlan, ...]:
    """Return the plans of all ranks of both layouts, ascending; each equals what `plan_rank` returns for its rank."""
    planner = _Planner(source, target, budget, node_of, skip_states)
    return planner.plan(planner.ranks)


class _Planner:
    def __init__(
        self,
        source: Placement,
        target: Placement,
        budget: WindowBudget | None,
        node_of: NodeOf | None,
        skip_states: Collection[StateKind],
    ) -> None:
        description = _common_description(source, target)
        self.ranks = tuple(sorted({*source.ranks, *target.ranks}))
        self._source, self._target = PieceIndex(source), PieceIndex(target)
        self._budget = budget or WindowBudget()
        self._node_of = node_of
        self._skip_states = frozenset(skip_states)
        items = items_of(description, self._skip_states)
        self._windows = cut_windows(items, source, target, self._budget)

    def plan(self, ranks: Sequence[int]) -> tuple[RankPlan, ...]:
        """Return the plans of some ranks; every slice that concerns one of them is routed once."""
        wanted = frozenset(ranks)
        plans: dict[int, list[Window]] = {rank: [] for rank in ranks}
        for index, slices in enumerate(self._windows):
            moves = [move for part in slices if self._concerns(part, wanted) for move in self._route(part)]
            of_rank = _by_rank(moves, wanted)
            idle = Window(index, (), (), ())
            for rank in ranks:
                window = Window(index, *of_rank[rank]) if rank in of_rank else idle
                if window.staging_bytes > self._budget.bytes:
                    raise _over_budget(rank, window, self._budget)
                plans[rank].append(window)
        return tuple(
            RankPlan(
                rank,
                self.ranks,
                tuple(plans[rank]),
                minimum_received_bytes(self._source.placement, self._target.placement, rank, self._skip_states),
            )
            for rank in ranks
        )

    def _concerns(self, part: Slice, ranks: frozenset[int]) -> bool:
        return not (
            ranks.isdisjoint(self._target.holders(part.item)) and ranks.isdisjoint(self._source.holders(part.item))
        )

    def _route(self, part: Slice) -> tuple[Move, ...]:
        sources = clip(self._source.held(part.item), part.region)
        targets = clip(self._target.held(part.item), part.region)
        return route(part.item, sources, targets, turn=part.turn, node_of=self._node_of)


def _common_description(source: Placement, target: Placement) -> ModelDescription:
    """Return the model that both placements are of, with the larger of two paddings of the vocabulary.

    Raises:
        PlanError: They are of different models, or padding that differs is among the pieces.
    """
    here, there = source.description, target.description
    rows = {number for model in (here, there) if (number := model.padded_rows) is not None}
    if len(rows) == 2:
        if not (source.real_only and target.real_only):
            raise PlanError(
                "the layouts pad the vocabulary differently, so padding rows have no source",
                phase="prepare",
                expected="placements of the real rows only",
                got=f"{here.padded_rows} and {there.padded_rows} rows",
            )
        here, there = here.padded_to(max(rows)), there.padded_to(max(rows))
    if here != there:
        raise PlanError("the source and target placements are of different models", phase="prepare")
    return here


def _by_rank(
    moves: Iterable[Move], ranks: frozenset[int]
) -> dict[int, tuple[tuple[Move, ...], tuple[Move, ...], tuple[Move, ...]]]:
    """Return (sends, receives, copies) of each of the ranks that has any."""
    found: dict[int, tuple[list[Move], list[Move], list[Move]]] = {}
    for move in moves:
        if move.source_rank == move.target_rank:
            if move.source_rank in ranks:
                found.setdefault(move.source_rank, ([], [], []))[2].append(move)
            continue
        if move.source_rank in ranks:
            found.setdefault(move.source_rank, ([], [], []))[0].append(move)
        if move.target_rank in ranks:
            found.setdefault(move.target_rank, ([], [], []))[1].append(move)
    return {rank: (tuple(sends), tuple(receives), tuple(copies)) for rank, (sends, receives, copies) in found.items()}


def _over_budget(rank: int, window: Window, budget: WindowBudget) -> PlanError:
    return PlanError(
        "a window needs more than its budget: the placements are not as even as their layouts say",
        rank=rank,
        phase="prepare",
        subject=f"window {window.index}",
        expected=f"at most {budget.bytes} bytes",
        got=f"{window.staging_bytes} bytes",
    )


def check_pairs(plans: Sequence[RankPlan]) -> None:
    """Check that what each rank sends is what its peer expects, and that all have the same windows.

    Raises:
        AgreementError: Two plans disagree; names the pair and both summaries.
    """
    for here, there in itertools.combinations(plans, 2):
        pair, mirror = here.pair_summary(there.rank), there.pair_summary(here.rank)
        if not pair.agrees_with(mirror):
            raise pair_error(here.rank, there.rank, pair, mirror)


def pair_error(rank: int, peer: int, here: PairSummary, there: PairSummary) -> AgreementError:
    """Return the error for a pair that doesn't agree."""
    if here.windows != there.windows:
        subject, expected, got = "number of windows", f"{here.windows} (rank {rank})", f"{there.windows} (rank {peer})"
    elif here.sent != there.received:
        subject, expected, got = f"rank {rank} to rank {peer}", f"{here.sent} (sent)", f"{there.received} (received)"
    else:
        subject, expected, got = f"rank {peer} to rank {rank}", f"{there.sent} (sent)", f"{here.received} (received)"
    return AgreementError(
        f"ranks {rank} and {peer} don't agree on what they will exchange",
        phase="prepare",
        subject=subject,
        expected=expected,
        got=got,
        hint="the ranks planned from different layouts, models or budgets; nothing has moved",
    )
