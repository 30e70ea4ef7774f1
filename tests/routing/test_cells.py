"""Boxes: difference, search, and the overlay of replicas."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynatrain.routing.cells import BoxIndex, Held, overlay, subtract
from megatron_dynatrain.routing.estimate import _elements_outside
from megatron_dynatrain.vps.placement import Piece
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import StateKind

SHAPE = (5, 4, 6)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    lo = [draw(st.integers(0, n - 1)) for n in SHAPE]
    hi = [draw(st.integers(a + 1, n)) for a, n in zip(lo, SHAPE, strict=True)]
    return Box(tuple(lo), tuple(hi))


def mark(found: list[Box]) -> np.ndarray:
    count = np.zeros(SHAPE, dtype=int)
    for box in found:
        count[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))] += 1
    return count


def held(rank: int, box: Box) -> Held:
    return Held(rank, Piece("t", StateKind.PARAM, box, f"slab{rank}", 0, "float32"), box)


@given(boxes(), boxes())
def test_subtract_leaves_what_is_outside_once(box: Box, hole: Box) -> None:
    assert (mark(subtract(box, hole)) == mark([box]) * (mark([hole]) == 0)).all()


@given(boxes(), st.lists(boxes(), max_size=5))
def test_lower_bound_counts_what_is_outside_the_union(box: Box, own: list[Box]) -> None:
    assert _elements_outside(box, own) == int((mark([box]) * (mark(own) == 0)).sum())


@given(st.lists(boxes(), max_size=8), boxes())
def test_index_finds_what_a_full_search_finds(found: list[Box], box: Box) -> None:
    expected = [(i, common) for i, other in enumerate(found) if (common := other.intersect(box))]
    assert BoxIndex(found).meeting(box) == expected


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), boxes()), max_size=6))
def test_overlay_cells_are_disjoint_and_name_all_holders(replicas: list[tuple[int, Box]]) -> None:
    cells = overlay([held(rank, box) for rank, box in replicas])
    assert mark([cell.box for cell in cells]).max(initial=0) <= 1
    assert ((mark([cell.box for cell in cells]) > 0) == (mark([box for _, box in replicas]) > 0)).all()
    for cell in cells:
        ranks = [h.rank for h in cell.holders]
        assert ranks == sorted({rank for rank, box in replicas if box.intersect(cell.box)})
        assert all(h.box.contains(cell.box) for h in cell.holders)


def test_equal_replicas_stay_one_cell() -> None:
    box = Box((0, 0, 0), (2, 4, 6))
    assert [cell.box for cell in overlay([held(rank, box) for rank in (2, 0, 1)])] == [box]


def test_scalar() -> None:
    scalar = Box((), ())
    (cell,) = overlay([held(1, scalar), held(0, scalar)])
    assert [h.rank for h in cell.holders] == [0, 1]
    assert list(itertools.chain(*BoxIndex([scalar]).meeting(scalar))) == [0, scalar]
