"""Placements written out by hand: which rank holds which box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.vps.placement import Piece, Slab, slab_name
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import Home, ModelDescription, ParameterSpec, Segment, StateKind, Where

PARAM = StateKind.PARAM


def frozen_model(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> ModelDescription:
    """A model whose only state is the parameters."""
    specs = [
        ParameterSpec(name, (Segment(name, shape),), Home(Where.FIRST), dtype, trainable=False)
        for name, shape in shapes.items()
    ]
    return ModelDescription(tuple(specs), num_layers=1)


class TablePlacement:
    """Stands for `Placement`; `table` says per rank which (tensor, box) it holds, each in a slab of its own."""

    def __init__(
        self, description: ModelDescription, ranks: Sequence[int], table: Mapping[int, Sequence[tuple[str, Box]]]
    ) -> None:
        self.description = description
        self.ranks = tuple(ranks)
        self.layout = ParallelLayout(dp=len(ranks), ranks=self.ranks)
        dtype = {spec.name: spec.dtype for spec in description.parameters}
        self._pieces = {
            rank: tuple(
                Piece(name, PARAM, box, slab_name(PARAM, i, name), 0, dtype[name])
                for i, (name, box) in enumerate(table.get(rank, ()))
            )
            for rank in ranks
        }
        self._of_tensor: dict[str, dict[int, tuple[Piece, ...]]] = {}
        for rank in sorted(ranks):
            for piece in self._pieces[rank]:
                of_rank = self._of_tensor.setdefault(piece.tensor, {})
                of_rank[rank] = (*of_rank.get(rank, ()), piece)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return self._pieces[rank]

    def pieces_of(self, rank: int, tensor: str) -> tuple[Piece, ...]:
        return self._of_tensor.get(tensor, {}).get(rank, ())

    def slabs(self, rank: int) -> tuple[Slab, ...]:
        return tuple(
            Slab(piece.slab, piece.box.numel, piece.dtype, piece.tensor, PARAM, i, (0, piece.box.numel))
            for i, piece in enumerate(self._pieces[rank])
        )

    def holders(self, tensor: str) -> tuple[int, ...]:
        return tuple(self._of_tensor.get(tensor, ()))


def one_each(
    size: int, source: Sequence[int], target: Sequence[int], dtype: str = "float32"
) -> tuple[TablePlacement, TablePlacement]:
    """Tensor `t{i}` of `size` elements goes from rank source[i] to rank target[i], and nobody else holds it."""
    ranks = sorted({*source, *target})
    model = frozen_model({f"t{i}": (size,) for i in range(len(source))}, dtype)
    whole = Box.whole((size,))

    def placed(at: Sequence[int]) -> TablePlacement:
        table: dict[int, list[tuple[str, Box]]] = {}
        for i, rank in enumerate(at):
            table.setdefault(rank, []).append((f"t{i}", whole))
        return TablePlacement(model, ranks, table)

    return placed(source), placed(target)
