"""What a switch moves, in the order in which it is moved: one item per (logical tensor, state)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_dynatrain.vps.placement import Piece, Placement
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import ITEMSIZE, ModelDescription, StateKind

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: multiples of it, modulo 2**64, fill the range evenly (Knuth, TAOCP 3, 6.4)."""


def spread(index: int) -> int:
    """Return a number in [0, 2**64) such that any run of indices, with any stride, is spread evenly over the range."""
    return index * _GOLDEN % 2**64


@dataclass(frozen=True, slots=True)
class Item:
    """One state of one logical tensor.

    Args:
        tensor: Key of the tensor.
        state: Its state.
        dtype: Dtype name of the state.
        shape: Global canonical shape.
        shard_dim: Canonical dim that tensor parallelism splits; None for none.
        expert: Whether it is split by the expert axes.
        copies: Parameters that hold the tensor (2 for a tied embedding).
    """

    tensor: str
    state: StateKind
    dtype: str
    shape: tuple[int, ...]
    shard_dim: int | None
    expert: bool
    copies: int

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole logical tensor."""
        return Box.whole(self.shape).numel * self.itemsize


def items_of(description: ModelDescription, skip_states: Collection[StateKind] = ()) -> tuple[Item, ...]:
    """Return every (tensor, state) once, in the order of transfer; a pure function of the model.

    Parameters are not taken in module order but spread by the golden ratio. A pipeline stage, an expert-parallel rank
    and an optimizer shard each hold a run of the module order; in the spread order all of them send and receive at the
    same pace from the first window to the last, so windows keep all ranks busy, and source memory can be freed about
    as fast as target memory is needed. The states and segments of one parameter stay together.
    """
    copies: dict[str, int] = {}
    for spec in description.parameters:
        for segment in spec.segments:
            copies[segment.key] = copies.get(segment.key, 0) + 1
    items: dict[tuple[str, StateKind], Item] = {}
    order = sorted(range(len(description.parameters)), key=spread)
    for spec in (description.parameters[i] for i in order):
        for state, dtype in description.states_of(spec):
            if state in skip_states:
                continue
            for segment in spec.segments:
                items.setdefault(
                    (segment.key, state),
                    Item(
                        segment.key,
                        state,
                        dtype,
                        segment.shape,
                        segment.shard_dim,
                        spec.expert is not None,
                        copies[segment.key],
                    ),
                )
    return tuple(items.values())


class PieceIndex:
    """Pieces of a placement by tensor and state, read only where they are asked for."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.ranks = frozenset(placement.ranks)
        self._tensor: str | None = None
        self._held: dict[StateKind, list[tuple[int, Piece]]] = {}

    def holders(self, item: Item) -> tuple[int, ...]:
        """Return the ranks that hold any state of the item's tensor, ascending."""
        return self.placement.holders(item.tensor)

    def held(self, item: Item) -> list[tuple[int, Piece]]:
        """Return (rank, piece) of every holder of the item, in order of rank."""
        if item.tensor != self._tensor:  # the states of a tensor are asked for one after another
            self._tensor, self._held = item.tensor, {}
            for rank in self.placement.holders(item.tensor):
                for piece in self.placement.pieces_of(rank, item.tensor):
                    self._held.setdefault(piece.state, []).append((rank, piece))
        return self._held.get(item.state, [])
