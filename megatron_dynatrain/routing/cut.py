"""Cut the items of a switch into windows, from upper bounds that need no rank's plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dynatrain.errors import PlanError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.items import Item
from megatron_dynatrain.vps.placement import WHOLE, Placement
from megatron_dynatrain.vps.region import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBudget:
    """What one rank may have in flight at a time.

    Args:
        bytes: Upper limit of the bytes that a rank sends and receives in one window, together: what it needs for
            staging if every move is packed.
        ops: Upper limit of the slices (parts of one state of one tensor) in a window, and of the messages of one rank
            that a transport has in flight. After packing a rank has few messages per peer and window.
    """

    bytes: int = 256 * 2**20
    ops: int = 256

    def __post_init__(self) -> None:
        if self.bytes < 1 or self.ops < 1:
            raise PlanError("a window budget must allow something", subject="WindowBudget", expected=">= 1", got=self)


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one item; `turn` numbers the slices of the same bytes (`moves.route`)."""

    item: Item
    region: Box
    turn: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of what any one rank sends and receives of a slice; pure functions of the two layouts.

    Tensor parallelism splits evenly, so a rank holds at most `local = |slice and one shard|` bytes of a slice. Of
    each element there are at most `wanting` target pieces and at least `having` source replicas on different ranks:

    - receive: at most `local(target)` for each copy of the tensor on a rank, so `copies * local(target)`;
    - send: every element at most `wanting` times, so `wanting * local(source)`; and because `moves.route` asks no
      replica for more than an even share of a cell plus the largest request, also at most
      `(wanting / having + 1) * local(source)`.

    `wanting` and `having` count dp x cp (experts: edp) for what every data-parallel rank holds whole, 1 for what the
    distributed optimizer shards (at most `instances` where wanted), times tp where a tensor isn't split by tp.
    """

    source: ParallelLayout
    target: ParallelLayout

    def send(self, item: Item, extent: tuple[int, ...]) -> int:
        """Return the bytes that no rank exceeds in sending a slice of this shape."""
        local = _local_bytes(item, extent, self.source)
        wanting = item.copies * _replicas(item, self.target, self.target.instances)
        having = _replicas(item, self.source, 1)
        return min(wanting * local, wanting * local // having + local)

    def receive(self, item: Item, extent: tuple[int, ...]) -> int:
        """Return the bytes that no rank exceeds in receiving a slice of this shape."""
        return item.copies * _local_bytes(item, extent, self.target)


def _tensor_parallel(item: Item, layout: ParallelLayout) -> int:
    return layout.etp if item.expert else layout.tp


def _local_bytes(item: Item, extent: tuple[int, ...], layout: ParallelLayout) -> int:
    shape = list(extent)
    if item.shard_dim is not None:
        shape[item.shard_dim] = min(
            shape[item.shard_dim], item.shape[item.shard_dim] // _tensor_parallel(item, layout) or 1
        )
    return math.prod(shape) * item.itemsize


def _replicas(item: Item, layout: ParallelLayout, of_shard: int) -> int:
    whole = layout.edp if item.expert else layout.dp * layout.cp
    split = 1 if item.shard_dim is not None else _tensor_parallel(item, layout)
    return split * (whole if item.state in WHOLE else of_shard)


def cut_windows(
    items: Sequence[Item], source: Placement, target: Placement, budget: WindowBudget
) -> tuple[tuple[Slice, ...], ...]:
    """Return the slices of every window, in order; equal on every rank, without any rank's plan.

    Only `holders()` of the placements is asked: a window is full when the bounds (`Bounds`) of its slices, added up
    on the ranks that hold them, reach the budget on one rank. An item too big for a window is sliced along canonical
    dim 0, and where one step of that is too big, along the next, down to single rows of the last dim.

    Raises:
        PlanError: The budget is too small to move one row, with the numbers.
    """
    return tuple(_Cutter(source, target, budget).cut(items))


class _Cutter:
    def __init__(self, source: Placement, target: Placement, budget: WindowBudget) -> None:
        self._placements = (source, target)
        self._bounds = Bounds(source.layout, target.layout)
        self._budget = budget
        ranks = sorted({*source.ranks, *target.ranks})
        self._column = {rank: i for i, rank in enumerate(ranks)}
        self._columns: dict[tuple[int, ...], NDArray[np.intp]] = {}
        self._known: dict[object, tuple[int, int]] = {}
        self._turns: dict[int, int] = {}
        self._fill = np.zeros(len(ranks), dtype=np.int64)
        self._window: list[Slice] = []

    def cut(self, items: Sequence[Item]) -> Iterator[tuple[Slice, ...]]:
        """Yield the windows; each slice goes into the open window if that leaves every rank within the budget."""
        for item in items:
            for region in self._regions(item):
                bounds = self._bounds_of(item, region.shape)
                full = self._add(item, bounds) > self._budget.bytes or len(self._window) >= self._budget.ops
                if full and self._window:
                    yield self._close()
                    self._add(item, bounds)
                self._window.append(Slice(item, region, self._turn(item, region)))
        if self._window:
            yield self._close()

    def _add(self, item: Item, bounds: tuple[int, int]) -> int:
        """Add the bounds of a slice on the ranks that hold the tensor; return the largest sum on one of them."""
        senders, receivers = (self._columns_of(p.holders(item.tensor)) for p in self._placements)
        self._fill[senders] += bounds[0]
        self._fill[receivers] += bounds[1]
        return int(max(self._fill[senders].max(), self._fill[receivers].max()))

    def _close(self) -> tuple[Slice, ...]:
        window = tuple(self._window)
        self._window = []
        self._fill[:] = 0
        return window

    def _columns_of(self, ranks: tuple[int, ...]) -> NDArray[np.intp]:
        if ranks not in self._columns:
            self._columns[ranks] = np.array([self._column[rank] for rank in ranks], dtype=np.intp)
        return self._columns[ranks]

    def _turn(self, item: Item, region: Box) -> int:
        size = region.numel * item.itemsize
        self._turns[size] = self._turns.get(size, -1) + 1
        return self._turns[size]

    def _regions(self, item: Item) -> Iterator[Box]:
        """Yield the item whole where it fits an empty window, otherwise in slices that do."""

        def fits(region: Box) -> bool:
            return sum(self._bounds_of(item, region.shape)) <= self._budget.bytes

        whole = Box.whole(item.shape)
        if whole.numel == 0:
            return
        if fits(whole):
            yield whole
            return
        row = Box((0,) * len(item.shape), (*(1 for _ in item.shape[:-1]), *item.shape[-1:]))
        row = row if len(item.shape) > 1 else Box((0,) * len(item.shape), (1,) * len(item.shape))
        if not fits(row):
            need = sum(self._bounds_of(item, row.shape))
            raise PlanError(
                "the window budget is too small to move one row",
                phase="prepare",
                subject=f"{item.tensor} ({item.state})",
                expected=f"at least {need} bytes: one row of {row.numel} {item.dtype} elements, sent and received",
                got=f"{self._budget.bytes} bytes",
                hint="raise the window budget",
            )
        yield from _slices(whole, 0, fits)

    def _bounds_of(self, item: Item, extent: tuple[int, ...]) -> tuple[int, int]:
        """Return the bounds (send, receive) of a slice; large models have few different ones."""
        key = (item.state, item.dtype, item.shape, item.shard_dim, item.expert, item.copies, extent)
        if key not in self._known:
            self._known[key] = (self._bounds.send(item, extent), self._bounds.receive(item, extent))
        return self._known[key]


def _slices(region: Box, dim: int, fits: Callable[[Box], bool]) -> Iterator[Box]:
    """Cut a region along `dim` into the thickest slices that fit; where not even one step fits, along the next dim."""
    start, stop = region.lo[dim], region.hi[dim]

    def part(a: int, b: int) -> Box:
        return Box((*region.lo[:dim], a, *region.lo[dim + 1 :]), (*region.hi[:dim], b, *region.hi[dim + 1 :]))

    if not fits(part(start, start + 1)):
        for i in range(start, stop):
            yield from _slices(part(i, i + 1), dim + 1, fits)
        return
    low, high = 1, stop - start
    while low < high:
        middle = (low + high + 1) // 2
        if fits(part(start, start + middle)):
            low = middle
        else:
            high = middle - 1
    for a in range(start, stop, low):
        yield part(a, min(a + low, stop))
