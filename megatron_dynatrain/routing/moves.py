"""Moves: intersect what a layout needs with what another one has, and choose among replicas."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from megatron_dynatrain.errors import MissingSourceError, PlanError
from megatron_dynatrain.routing.cells import BoxIndex, Cell, Held, overlay, uncovered
from megatron_dynatrain.routing.items import Item, spread
from megatron_dynatrain.vps.placement import Piece
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import StateKind

NodeOf = Callable[[int], Hashable]
"""Global rank to the node it runs on; any value that can be compared."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box copied from a piece of one rank's memory to a piece of another's, or of its own.

    Args:
        tensor: Key of the logical tensor.
        state: State that is moved.
        box: What is moved, in canonical global coordinates; inside both pieces.
        source_rank: Global rank that has it.
        target_rank: Global rank that needs it; equal to `source_rank` for a copy.
        source: Piece it is read from.
        target: Piece it is written to.
        nbytes: Bytes of the box.
    """

    tensor: str
    state: StateKind
    box: Box
    source_rank: int
    target_rank: int
    source: Piece
    target: Piece
    nbytes: int


@dataclass(slots=True)
class _Demand:
    """A part of a target piece that lies in one cell; `move` is filled when a replica is chosen."""

    cell: int
    rank: int
    target: Piece
    box: Box
    source: Held | None


def clip(held: Sequence[tuple[int, Piece]], region: Box) -> list[Held]:
    """Return the pieces that meet `region`, each with its common box."""
    clipped = []
    for rank, piece in held:
        box = piece.box.intersect(region)
        if box is not None:
            clipped.append(Held(rank, piece, box))
    return clipped


def route(
    item: Item,
    sources: Sequence[Held],
    targets: Sequence[Held],
    *,
    turn: int = 0,
    node_of: NodeOf | None = None,
) -> tuple[Move, ...]:
    """Return the moves that fill every target box; pure, so every rank that calls it gets the same.

    A target rank that holds an element itself copies it. Among the other replicas one on the same node is taken, then
    the least loaded one; ties are turned by `turn`, so that different tensors load different ranks. No replica is
    asked, for one cell, for more than an even share of what others need of it plus the largest single request:
    `cut.Bounds` relies on it.

    Args:
        item: Tensor and state.
        sources: Replicas, in order of rank; their boxes may be equal, overlap or be disjoint.
        targets: What is needed, in order of rank.
        turn: Number of the item or slice among those of its size.
        node_of: Node of a rank; None where all ranks are alike.

    Raises:
        PlanError: An element of the target without a source, or a dtype that changes; names tensor, state and box.
    """
    cells = overlay(sources)
    index = BoxIndex([cell.box for cell in cells])
    demands: list[_Demand] = []
    for target in targets:
        demands.extend(_demands(item, target, cells, index))
    _choose(cells, demands, turn, node_of)
    return tuple(_move(item, demand) for demand in demands)


def _demands(item: Item, target: Held, cells: Sequence[Cell], index: BoxIndex) -> list[_Demand]:
    met = index.meeting(target.box)
    if sum(box.numel for _, box in met) != target.box.numel:
        missing = uncovered(target.box, [box for _, box in met])
        raise MissingSourceError(
            f"no rank of the source layout holds box {missing[0].lo}..{missing[0].hi} that rank {target.rank} needs",
            phase="prepare",
            subject=f"{item.tensor} ({item.state})",
            expected=f"{target.box.numel} elements with a source",
            got=f"{sum(box.numel for _, box in met)}",
            hint="the two placements don't describe the same model",
        )
    found = []
    for i, box in met:
        own = next((held for held in cells[i].holders if held.rank == target.rank), None)
        found.append(_Demand(i, target.rank, target.piece, box, own))
    return found


def _choose(cells: Sequence[Cell], demands: Sequence[_Demand], turn: int, node_of: NodeOf | None) -> None:
    """Give every demand that its own rank can't fill a replica, in order."""
    wanted: dict[int, list[_Demand]] = {}
    for demand in demands:
        if demand.source is None:
            wanted.setdefault(demand.cell, []).append(demand)
    sent: dict[int, int] = {}
    for i, asking in wanted.items():
        holders = cells[i].holders
        if len(holders) == 1:
            for demand in asking:
                demand.source = holders[0]
                sent[holders[0].rank] = sent.get(holders[0].rank, 0) + demand.box.numel
            continue
        _share(holders, asking, sent, spread(turn) * len(holders) >> 64, node_of)


def _share(
    holders: Sequence[Held], asking: Sequence[_Demand], sent: dict[int, int], first: int, node_of: NodeOf | None
) -> None:
    """Spread the demands on one cell over its holders; `sent` counts the elements each rank sends of the item."""
    sizes = [demand.box.numel for demand in asking]
    limit = sum(sizes) // len(holders) + max(sizes)
    of_cell = dict.fromkeys((held.rank for held in holders), 0)
    turned = [*holders[first:], *holders[:first]]
    nodes = {held.rank: node_of(held.rank) for held in holders} if node_of else {}
    for demand, size in zip(asking, sizes, strict=True):
        node = node_of(demand.rank) if node_of else None
        # The least loaded holder of the cell is always below the limit: the least is at most the mean.
        fitting = (held for held in turned if of_cell[held.rank] + size <= limit)
        best = min(fitting, key=lambda h: (nodes.get(h.rank) != node, sent.get(h.rank, 0)))
        demand.source = best
        of_cell[best.rank] += size
        sent[best.rank] = sent.get(best.rank, 0) + size


def _move(item: Item, demand: _Demand) -> Move:
    held = demand.source
    if held is None:  # _choose fills every demand; only a fault of ours can come here
        raise PlanError("a demand was left without a replica", subject=f"{item.tensor} ({item.state})")
    if held.piece.dtype != demand.target.dtype:
        raise PlanError(
            "the dtype of a state differs between the layouts",
            phase="prepare",
            subject=f"{item.tensor} ({item.state})",
            expected=held.piece.dtype,
            got=demand.target.dtype,
        )
    return Move(
        item.tensor,
        item.state,
        demand.box,
        held.rank,
        demand.rank,
        held.piece,
        demand.target,
        demand.box.numel * item.itemsize,
    )
