"""Geometry of replicas: cut overlapping boxes into disjoint cells, and find the boxes that meet a given one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_dynatrain.vps.placement import Piece
from megatron_dynatrain.vps.region import Box


@dataclass(frozen=True, slots=True)
class Held:
    """A piece, the rank that holds it, and the part of its box that is looked at (all of it, or one slice)."""

    rank: int
    piece: Piece
    box: Box


@dataclass(frozen=True, slots=True)
class Cell:
    """A box that no other cell of the tensor meets, and who holds all of it: one replica per rank, in order of rank."""

    box: Box
    holders: tuple[Held, ...]


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return the part of `box` outside `hole` as at most 2*ndim disjoint boxes."""
    inner = box.intersect(hole)
    if inner is None:
        return [box]
    rest = []
    lo, hi = list(box.lo), list(box.hi)
    for dim in range(len(lo)):
        if lo[dim] < inner.lo[dim]:
            rest.append(Box(tuple(lo), (*hi[:dim], inner.lo[dim], *hi[dim + 1 :])))
        if inner.hi[dim] < hi[dim]:
            rest.append(Box((*lo[:dim], inner.hi[dim], *lo[dim + 1 :]), tuple(hi)))
        lo[dim], hi[dim] = inner.lo[dim], inner.hi[dim]
    return rest


def uncovered(box: Box, cover: Iterable[Box]) -> list[Box]:
    """Return the part of `box` that no box of `cover` covers, as disjoint boxes."""
    rest = [box]
    for hole in cover:
        rest = [part for piece in rest for part in subtract(piece, hole)]
    return rest


class BoxIndex:
    """Finds the boxes that meet a given one without looking at all of them.

    Boxes are sorted along the dim that tells most of them apart; along it a search gives the few candidates.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        ndim = len(boxes[0].lo) if boxes else 0
        self._dim = max(range(ndim), key=lambda d: len({box.lo[d] for box in boxes}), default=None)
        if self._dim is None:
            return
        dim = self._dim
        self._order = sorted(range(len(boxes)), key=lambda i: boxes[i].lo[dim])
        self._lo = [boxes[i].lo[dim] for i in self._order]
        # The largest end so far never falls, so it can be searched though the ends themselves are in no order.
        self._reach = list(itertools.accumulate((boxes[i].hi[dim] for i in self._order), max))

    def meeting(self, box: Box) -> list[tuple[int, Box]]:
        """Return (index, common box) of every box that meets `box`, in order of index."""
        if self._dim is None:
            candidates: Iterable[int] = range(len(self._boxes))
        else:
            first = bisect.bisect_right(self._reach, box.lo[self._dim])
            last = bisect.bisect_left(self._lo, box.hi[self._dim])
            candidates = sorted(self._order[first:last])
        found = []
        for i in candidates:
            common = self._boxes[i].intersect(box)
            if common is not None:
                found.append((i, common))
        return found


def overlay(held: Sequence[Held]) -> tuple[Cell, ...]:
    """Cut replicas into disjoint cells such that each replica holds all or nothing of a cell.

    Replicas with equal boxes, the usual case, become one cell without a cut. Boxes that overlap in part (the optimizer
    shards of a tied parameter on two stages) are cut along each other.
    """
    groups: dict[Box, list[Held]] = {}
    for item in sorted(held, key=lambda h: h.rank):
        groups.setdefault(item.box, []).append(item)
    boxes = list(groups)
    index = BoxIndex(boxes)
    cells: list[Cell] = []
    done: set[int] = set()
    for i, box in enumerate(boxes):
        if i in done:
            continue
        cluster = _cluster(i, boxes, index)
        done.update(cluster)
        if len(cluster) == 1:
            cells.append(_cell(box, groups[box]))
        else:
            cells.extend(_cut([(boxes[j], groups[boxes[j]]) for j in cluster]))
    return tuple(cells)


def _cluster(start: int, boxes: Sequence[Box], index: BoxIndex) -> list[int]:
    """Return the boxes that are joined to `start` by a chain of overlaps, in order of index."""
    found, todo = {start}, [start]
    while todo:
        for j, _ in index.meeting(boxes[todo.pop()]):
            if j not in found:
                found.add(j)
                todo.append(j)
    return sorted(found)


def _cut(groups: Sequence[tuple[Box, list[Held]]]) -> list[Cell]:
    cells: list[tuple[Box, list[Held]]] = []
    for box, holders in groups:
        fresh = uncovered(box, [known for known, _ in cells])
        cut: list[tuple[Box, list[Held]]] = []
        for known, others in cells:
            common = known.intersect(box)
            if common is None:
                cut.append((known, others))
                continue
            cut.append((common, others + holders))
            cut.extend((part, others) for part in subtract(known, box))
        cells = cut + [(part, holders) for part in fresh]
    return [_cell(box, holders) for box, holders in cells]


def _cell(box: Box, holders: Sequence[Held]) -> Cell:
    first_of_rank = {held.rank: held for held in reversed(holders)}
    return Cell(box, tuple(first_of_rank[rank] for rank in sorted(first_of_rank)))
