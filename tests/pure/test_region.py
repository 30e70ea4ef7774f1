"""Boxes, and the cut of a flat run into boxes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynatrain.vps.region import Box, cut_flat_run

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((10,), 3, 7, [(Box((3,), (7,)), 0)]),
        ((4, 5), 0, 20, [(Box((0, 0), (4, 5)), 0)]),
        ((4, 5), 5, 15, [(Box((1, 0), (3, 5)), 0)]),
        ((4, 5), 6, 8, [(Box((1, 1), (2, 3)), 0)]),
        ((4, 5), 3, 17, [(Box((0, 3), (1, 5)), 0), (Box((1, 0), (3, 5)), 2), (Box((3, 0), (4, 2)), 12)]),
        ((4, 5), 3, 7, [(Box((0, 3), (1, 5)), 0), (Box((1, 0), (2, 2)), 2)]),
        (
            (2, 3, 4),
            5,
            22,
            [
                (Box((0, 1, 1), (1, 2, 4)), 0),
                (Box((0, 2, 0), (1, 3, 4)), 3),
                (Box((1, 0, 0), (2, 2, 4)), 7),
                (Box((1, 2, 0), (2, 3, 2)), 15),
            ],
        ),
        ((1, 6, 2), 2, 12, [(Box((0, 1, 0), (1, 6, 2)), 0)]),
        ((), 0, 1, [(Box((), ()), 0)]),
        ((3, 3), 4, 4, []),
        ((0, 3), 0, 0, []),
    ],
)
def test_cut_exact(shape: tuple[int, ...], start: int, stop: int, expected: list[tuple[Box, int]]) -> None:
    assert list(cut_flat_run(shape, start, stop)) == expected


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_runs_outside_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"is not inside a tensor of shape \(2, 3\) \(6 elements\)"):
        list(cut_flat_run((2, 3), start, stop))


@given(st.data(), SHAPES)
def test_cut_covers_the_run_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    flat = np.arange(int(np.prod(shape)))
    start, stop = sorted((data.draw(st.integers(0, flat.size)), data.draw(st.integers(0, flat.size))))
    cut = list(cut_flat_run(shape, start, stop))
    assert len(cut) <= max(1, 2 * len(shape) - 1)
    found = []
    for box, offset in cut:
        assert offset == len(found)
        found += flat.reshape(shape)[box.relative_to(Box.whole(shape))].reshape(-1).tolist()
    assert found == list(range(start, stop))


@given(st.data(), SHAPES)
def test_intersection_is_the_common_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    marked = np.zeros(shape, dtype=int)
    for box in (a, b):
        marked[box.relative_to(Box.whole(shape))] += 1
    common = a.intersect(b)
    assert (common.numel if common else 0) == int((marked == 2).sum())
    assert common == b.intersect(a)
    if common is not None:
        assert a.contains(common)
        assert b.contains(common)
        assert (marked[common.relative_to(Box.whole(shape))] == 2).all()
    if a.numel:
        assert Box.whole(shape).contains(a)
        assert a.contains(b) == ((common == b) or not b.numel) or not b.numel


def test_box_arithmetic() -> None:
    box = Box((1, 2), (3, 5))
    assert (box.shape, box.numel) == ((2, 3), 6)
    assert box.shift((1, -2)) == Box((2, 0), (4, 3))
    assert box.relative_to(Box((1, 1), (4, 6))) == (slice(0, 2), slice(1, 4))
    assert not box.contains(Box((1, 2), (3, 6)))
    assert not Box((1, 3), (3, 5)).contains(box)
    assert Box((0, 0), (1, 5)).intersect(Box((1, 0), (2, 5))) is None
    with pytest.raises(ValueError, match="zip"):
        box.intersect(Box((0,), (1,)))
