"""Bytes and memory of a switch: the lower bound of what must cross, and the peak of the safe and the lean mode."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_dynatrain.vps.placement import Piece, Placement
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import ITEMSIZE, StateKind

if TYPE_CHECKING:
    from megatron_dynatrain.routing.moves import Move
    from megatron_dynatrain.routing.windows import RankPlan


def state_bytes(placement: Placement, rank: int, skip_states: Collection[StateKind] = ()) -> int:
    """Return the bytes of all slabs of a rank; 0 for a rank outside the layout."""
    return sum(_slab_bytes(placement, rank, skip_states).values())


def _slab_bytes(placement: Placement, rank: int, skip_states: Collection[StateKind]) -> dict[str, int]:
    if rank not in placement.ranks:
        return {}
    return {
        slab.name: slab.numel * ITEMSIZE[slab.dtype] for slab in placement.slabs(rank) if slab.state not in skip_states
    }


def minimum_received_bytes(
    source: Placement, target: Placement, rank: int, skip_states: Collection[StateKind] = ()
) -> int:
    """Return the bytes that a rank needs and doesn't hold: no plan can have it receive less.

    Counts elements on a grid of all box edges and shares no code with the routing, so that it can check it. Two target
    pieces of one tensor on the same rank are counted each.
    """
    own = _pieces_by_key(source, rank)
    total = 0
    for key, pieces in _pieces_by_key(target, rank).items():
        if key[1] in skip_states:
            continue
        held = [piece.box for piece in own.get(key, ())]
        total += sum(_elements_outside(piece.box, held) * ITEMSIZE[piece.dtype] for piece in pieces)
    return total


def _pieces_by_key(placement: Placement, rank: int) -> dict[tuple[str, StateKind], list[Piece]]:
    found: dict[tuple[str, StateKind], list[Piece]] = {}
    if rank in placement.ranks:
        for piece in placement.pieces(rank):
            found.setdefault((piece.tensor, piece.state), []).append(piece)
    return found


def _elements_outside(box: Box, held: Iterable[Box]) -> int:
    """Return how many elements of `box` lie in none of `held`."""
    inside = [
        (np.maximum(box.lo, other.lo), np.minimum(box.hi, other.hi))
        for other in held
        if all(a < d and c < b for a, b, c, d in zip(box.lo, box.hi, other.lo, other.hi, strict=True))
    ]
    if not inside:
        return box.numel
    ndim = len(box.lo)
    edges = [
        np.unique([box.lo[d], box.hi[d], *(lo[d] for lo, _ in inside), *(hi[d] for _, hi in inside)])
        for d in range(ndim)
    ]
    covered = np.zeros([len(e) - 1 for e in edges], dtype=bool)
    for lo, hi in inside:
        at = [slice(*np.searchsorted(edges[d], (lo[d], hi[d]))) for d in range(ndim)]
        covered[tuple(at)] = True
    volume = np.ones(covered.shape, dtype=np.int64)
    for d in range(ndim):
        volume *= np.diff(edges[d]).reshape([-1 if i == d else 1 for i in range(ndim)])
    return int(volume[~covered].sum())


class MemoryMode(enum.StrEnum):
    """When the memory of the source is released."""

    SAFE = "safe"
    """The source is kept whole until the switch is committed."""
    LEAN = "lean"
    """A slab of the source is freed after its last read, one of the target made before its first write."""


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One step of a replay on one rank; `live` is what is allocated after it, in bytes."""

    window: int
    what: str
    delta: int
    live: int


def replay(
    plan: RankPlan,
    source: Placement,
    target: Placement,
    mode: MemoryMode,
    skip_states: Collection[StateKind] = (),
) -> tuple[MemoryEvent, ...]:
    """Return every allocation and release of a switch on one rank, in order; pure.

    The order of a window is the one of `transport.execute.run_plan`: pack -> (lean: free source) -> exchange ->
    (lean: make target) -> copy and unpack -> (lean: free what was copied). Staging counts every move as packed; moves
    that are sent in place need less. State that isn't moved (`skip_states`) is not counted.
    """
    before = _slab_bytes(source, plan.rank, skip_states)
    after = _slab_bytes(target, plan.rank, skip_states)
    live = 0
    events = []
    steps: Iterator[tuple[int, str, int]]
    if mode is MemoryMode.SAFE:
        steps = _safe_steps(plan, before, after)
    else:
        steps = _lean_steps(plan, before, after)
    for window, what, delta in itertools.chain([(-1, "source", sum(before.values()))], steps):
        live += delta
        events.append(MemoryEvent(window, what, delta, live))
    return tuple(events)


def peak_bytes(
    plan: RankPlan,
    source: Placement,
    target: Placement,
    mode: MemoryMode,
    skip_states: Collection[StateKind] = (),
) -> int:
    """Return the largest number of bytes of state and staging that a rank holds at a time during a switch.

    Safe: source + target + staging. Lean: at most that; about max(source, target) + staging where a rank gives and
    takes at the same pace, which the order of the items (`items_of`) aims at but can't promise for few or uneven
    tensors.
    """
    return max(event.live for event in replay(plan, source, target, mode, skip_states))


def _safe_steps(plan: RankPlan, before: dict[str, int], after: dict[str, int]) -> Iterator[tuple[int, str, int]]:
    yield -1, "target", sum(after.values())
    for window in plan.windows:
        yield from _staged(window.index, "pack", _nbytes(window.sends))
        yield from _staged(window.index, "receive", _nbytes(window.receives))
        yield from _staged(window.index, "unpack", -window.staging_bytes)
    yield len(plan.windows), "commit", -sum(before.values())


def _lean_steps(plan: RankPlan, before: dict[str, int], after: dict[str, int]) -> Iterator[tuple[int, str, int]]:
    last_packed = {move.source.slab: w.index for w in plan.windows for move in w.sends}
    last_copied = {move.source.slab: w.index for w in plan.windows for move in w.copies}
    alive, missing = dict(before), dict(after)
    for name in list(alive):  # what nobody reads from this rank goes first
        if name not in last_packed and name not in last_copied:
            yield -1, f"free {name}", -alive.pop(name)
    for window in plan.windows:
        at = window.index
        yield from _staged(at, "pack", _nbytes(window.sends))
        for name in _names(move.source.slab for move in window.sends):
            if last_packed[name] == at and last_copied.get(name, -1) < at:
                yield at, f"free {name}", -alive.pop(name)
        yield from _staged(at, "receive", _nbytes(window.receives))
        for name in _names(move.target.slab for move in (*window.receives, *window.copies)):
            if name in missing:
                yield at, f"make {name}", missing.pop(name)
        for name in _names(move.source.slab for move in window.copies):
            if last_copied[name] == at and last_packed.get(name, -1) <= at:
                yield at, f"free {name}", -alive.pop(name)
        yield from _staged(at, "unpack", -window.staging_bytes)


def _staged(window: int, what: str, nbytes: int) -> Iterator[tuple[int, str, int]]:
    if nbytes:
        yield window, what, nbytes


def _nbytes(moves: Iterable[Move]) -> int:
    return sum(move.nbytes for move in moves)


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
