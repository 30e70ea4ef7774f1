"""Boxes: axis-aligned half-open regions of a logical tensor, and the cut of a flat run into boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An axis-aligned half-open region `[lo, hi)` of a tensor, in elements, one entry per dim."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of the given shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dim, in elements."""
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None where there is none."""
        lo = tuple(max(a, b) for a, b in zip(self.lo, other.lo, strict=True))
        hi = tuple(min(a, b) for a, b in zip(self.hi, other.hi, strict=True))
        if any(a >= b for a, b in zip(lo, hi, strict=True)):
            return None
        return Box(lo, hi)

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` is in this box."""
        return all(a <= c for a, c in zip(self.lo, other.lo, strict=True)) and all(
            d <= b for b, d in zip(self.hi, other.hi, strict=True)
        )

    def shift(self, by: tuple[int, ...]) -> Box:
        """Return the box moved by `by` elements per dim."""
        return Box(
            tuple(a + d for a, d in zip(self.lo, by, strict=True)),
            tuple(b + d for b, d in zip(self.hi, by, strict=True)),
        )

    def relative_to(self, origin: Box) -> tuple[slice, ...]:
        """Return the slices that select this box in a dense array that holds `origin`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.lo, self.hi, origin.lo, strict=True))


def cut_flat_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Cut the row-major flat run `[start, stop)` of a dense tensor into at most 2*ndim-1 boxes.

    Yields `(box, offset)` in flat order: the box in the coordinates of `shape`, and where its first element lies in
    the run, in elements. Each box is contiguous both in the tensor and in the run.

    Raises:
        ValueError: The run is not inside the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"flat run [{start}, {stop}) is not inside a tensor of shape {shape} ({total} elements)")
    if start == stop:
        return
    if not shape:
        yield Box((), ()), 0
        return
    yield from _cut(shape, start, stop, (), 0)


def _cut(
    shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...], base: int
) -> Iterator[tuple[Box, int]]:
    """Cut a run of the sub-tensor `shape` that lies at index `prefix` of the whole; `base` is the run's offset."""
    fixed_hi = tuple(i + 1 for i in prefix)
    if len(shape) == 1:
        yield Box((*prefix, start), (*fixed_hi, stop)), base
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        yield from _cut(shape[1:], start - first * row, stop - first * row, (*prefix, first), base)
        return
    head, tail = -start % row, stop % row
    if head:
        yield from _cut(shape[1:], row - head, row, (*prefix, start // row), base)
    low, high = (start + head) // row, (stop - tail) // row
    if low < high:
        rest = shape[1:]
        yield Box((*prefix, low, *(0 for _ in rest)), (*fixed_hi, high, *rest)), base + head
    if tail:
        yield from _cut(shape[1:], 0, tail, (*prefix, stop // row), base + stop - start - tail)
