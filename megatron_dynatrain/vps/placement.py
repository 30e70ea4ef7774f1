"""Placement: which boxes of which states each rank of a layout holds, and where they lie in its memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.vps.flat_buffer import BufferPolicy, FlatBuffer, run_of, stage_buffers
from megatron_dynatrain.vps.homes import Homes, local_box, local_numel, parts_of
from megatron_dynatrain.vps.region import Box, cut_flat_run
from megatron_dynatrain.vps.tensor import ModelDescription, ParameterSpec, Segment, StateKind

WHOLE = (StateKind.PARAM, StateKind.BUFFER)
"""States that every data-parallel rank holds whole; the distributed optimizer shards the others."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one state of a logical tensor in the memory of one rank.

    Args:
        tensor: Key of the logical tensor (`Segment.key`).
        state: Which state of it.
        box: The region, in canonical global coordinates; it lies dense and row-major in the slab.
        slab: The local memory it lies in (`slab_name`).
        offset: Where its first element lies in the slab, in elements.
        dtype: Dtype name.
    """

    tensor: str
    state: StateKind
    box: Box
    slab: str
    offset: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Slab:
    """One flat local memory of a rank: a state of a parameter, or the part of it that the rank owns.

    Args:
        name: `slab_name(state, chunk, parameter)`, unique on the rank.
        numel: Its elements.
        dtype: Dtype name.
        parameter: Name of the parameter.
        state: Which state of it.
        chunk: Model chunk of the parameter.
        run: The part `[a, b)` of the flat local parameter that it holds.
    """

    name: str
    numel: int
    dtype: str
    parameter: str
    state: StateKind
    chunk: int
    run: tuple[int, int]


def slab_name(state: StateKind, chunk: int, parameter: str) -> str:
    """Return the name of a local memory."""
    return f"{state}@{chunk}:{parameter}"


@dataclass(frozen=True, slots=True)
class _Part:
    """Slabs and pieces that several ranks have in common."""

    slabs: tuple[Slab, ...]
    pieces: tuple[Piece, ...]
    by_tensor: dict[str, tuple[Piece, ...]]


@dataclass(frozen=True, slots=True)
class _PartKey:
    """What a part depends on: nothing else of a rank matters.

    `parts` is the index of the tensor-parallel shard; `shard` the optimizer shard, None for what is held whole.
    """

    expert: bool
    pp: int
    ep: int
    tp: int
    shard: int | None


class Placement:
    """A pure function of (model description, layout, policy): what each rank holds; lazy, cached per rank.

    Ranks that agree in what matters (pipeline rank, tensor-parallel index, optimizer shard; for experts the same on
    the expert grid) share the work and the pieces.

    Args:
        description: The model.
        layout: The layout.
        policy: How Megatron lays parameters out in buffers.
        real_only: Whether pieces leave out padding rows of the vocabulary, because another layout has more or less of
            them. Slabs and buffers have them anyway.
        outside: Ranks that hold nothing: those outside of the layout that join or leave in a switch, and may be asked
            for, and those of the layout that are lost.

    Raises:
        LayoutError: The model doesn't fit the layout; some misfits show only when a rank is asked for.
    """

    def __init__(
        self,
        description: ModelDescription,
        layout: ParallelLayout,
        policy: BufferPolicy | None = None,
        *,
        real_only: bool = False,
        outside: Collection[int] = (),
    ) -> None:
        self.description = description
        self.layout = layout
        self.policy = policy or BufferPolicy()
        self.real_only = real_only
        self._outside = frozenset(outside)
        self._homes = Homes(description, layout)
        self._buffers: dict[tuple[int, int], tuple[FlatBuffer, ...]] = {}
        self._parts: dict[_PartKey, _Part] = {}
        self._keys: dict[int, tuple[_PartKey, ...]] = {}
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._holders: dict[tuple[int, int | None], tuple[int, ...]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold something: those of the layout in its order, but for lost ones."""
        return tuple(rank for rank in self.layout.ranks if rank not in self._outside)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every logical tensor as its pieces cover it, by key."""
        segments = (segment for spec in self.description.parameters for segment in spec.segments)
        return {s.key: _data_shape(s) if self.real_only else s.shape for s in segments}

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return all pieces of a rank: first what it holds whole, then the optimizer's."""
        if rank not in self._pieces:
            self._pieces[rank] = tuple(piece for part in self._parts_of(rank) for piece in part.pieces)
        return self._pieces[rank]

    def pieces_of(self, rank: int, tensor: str) -> tuple[Piece, ...]:
        """Return the pieces of a rank of one logical tensor, without listing the others."""
        return tuple(piece for part in self._parts_of(rank) for piece in part.by_tensor.get(tensor, ()))

    def slabs(self, rank: int) -> tuple[Slab, ...]:
        """Return all local memories of a rank, in the order of its pieces."""
        return tuple(slab for part in self._parts_of(rank) for slab in part.slabs)

    def buffers(self, rank: int) -> tuple[FlatBuffer, ...]:
        """Return the DDP buffers of a rank."""
        if rank in self._outside:
            return ()
        return self._stage_buffers(self.layout.coordinate(rank)["pp"], self.layout.coordinate(rank, expert=True)["ep"])

    def holders(self, tensor: str) -> tuple[int, ...]:
        """Return the ranks that hold any piece of a logical tensor, ascending.

        Raises:
            PlacementError: The model has no such tensor.
        """
        places = self._homes.places(tensor)
        if len(places) == 1:
            return self._ranks_at(*places[0])
        return tuple(sorted({rank for place in places for rank in self._ranks_at(*place)}))

    def _ranks_at(self, pp: int, ep: int | None) -> tuple[int, ...]:
        if not self._holders:  # all places in one pass: a large expert grid has thousands
            found: dict[tuple[int, int | None], list[int]] = {}
            for rank in sorted(self.ranks):
                at = self.layout.coordinate(rank, expert=True)
                for place in ((at["pp"], at["ep"]), (at["pp"], None)):
                    found.setdefault(place, []).append(rank)
            self._holders.update((place, tuple(ranks)) for place, ranks in found.items())
        return self._holders.get((pp, ep), ())  # none where all are lost

    def _parts_of(self, rank: int) -> Iterator[_Part]:
        if rank in self._outside:
            return
        if rank not in self._keys:
            self._keys[rank] = self._part_keys(rank)
        for key in self._keys[rank]:
            if key not in self._parts:
                self._parts[key] = self._build(key)
            yield self._parts[key]

    def _part_keys(self, rank: int) -> tuple[_PartKey, ...]:
        layout = self.layout
        dense, expert = layout.coordinate(rank), layout.coordinate(rank, expert=True)
        places = [(False, dense["pp"], 0, dense["tp"])]
        if self.description.num_experts:
            places.append((True, expert["pp"], expert["ep"], expert["tp"]))
        whole = [_PartKey(*place, None) for place in places]
        return (
            *whole,
            *(_PartKey(*place, layout.shard_index(rank, expert=place[0] and layout.experts_apart)) for place in places),
        )

    def _stage_buffers(self, pp: int, ep: int) -> tuple[FlatBuffer, ...]:
        if (pp, ep) not in self._buffers:
            self._buffers[pp, ep] = stage_buffers(self._homes.chunks(pp, ep), self.layout, pp, self.policy)
        return self._buffers[pp, ep]

    def _build(self, key: _PartKey) -> _Part:
        slabs: list[Slab] = []
        by_tensor: dict[str, list[Piece]] = {}
        pieces: list[Piece] = []
        runs = {} if key.shard is None else self._runs(key.pp, key.ep, key.shard, key.expert)
        for chunk, specs in enumerate(self._homes.chunks(key.pp, key.ep)):
            for spec in specs:
                if (spec.expert is not None) != key.expert:
                    continue
                run = (0, local_numel(spec, self.layout)) if key.shard is None else runs.get(spec.name)
                if run is not None:
                    slabs.extend(self._slabs_of(spec, chunk, run, key.shard is None))
                    pieces.extend(self._pieces_of(spec, chunk, run, key))
        for piece in pieces:
            by_tensor.setdefault(piece.tensor, []).append(piece)
        return _Part(tuple(slabs), tuple(pieces), {tensor: tuple(found) for tensor, found in by_tensor.items()})

    def _runs(self, pp: int, ep: int, shard: int, expert: bool) -> dict[str, tuple[int, int]]:
        """Return what an optimizer shard owns of each parameter, by name."""
        apart = expert and self.layout.experts_apart
        return {
            entry[0]: run
            for buffer in self._stage_buffers(pp, ep)
            if buffer.expert == apart
            for entry in buffer.index
            if (run := run_of(buffer, entry, shard)) is not None
        }

    def _states(self, spec: ParameterSpec, whole: bool) -> Iterator[tuple[StateKind, str]]:
        return (pair for pair in self.description.states_of(spec) if (pair[0] in WHOLE) == whole)

    def _slabs_of(self, spec: ParameterSpec, chunk: int, run: tuple[int, int], whole: bool) -> Iterator[Slab]:
        for state, dtype in self._states(spec, whole):
            name = slab_name(state, chunk, spec.name)
            yield Slab(name, run[1] - run[0], dtype, spec.name, state, chunk, run)

    def _pieces_of(self, spec: ParameterSpec, chunk: int, run: tuple[int, int], key: _PartKey) -> Iterator[Piece]:
        boxes = tuple(cut_parameter(spec, parts_of(spec, self.layout), key.tp, run, real_only=self.real_only))
        for state, dtype in self._states(spec, key.shard is None):
            slab = slab_name(state, chunk, spec.name)
            for tensor, box, offset in boxes:
                yield Piece(tensor, state, box, slab, offset, dtype)


def _data_shape(segment: Segment) -> tuple[int, ...]:
    return segment.shape if segment.real_rows is None else (segment.real_rows, *segment.shape[1:])


def cut_parameter(
    spec: ParameterSpec, parts: int, index: int, run: tuple[int, int], *, real_only: bool = False
) -> Iterator[tuple[str, Box, int]]:
    """Cut the run `[a, b)` of a flat local parameter into boxes of its logical tensors.

    Args:
        spec: The parameter.
        parts: Tensor-parallel ranks that split it.
        index: Which of them this is.
        run: The part of the local memory, in elements.
        real_only: Whether padding rows of the vocabulary are left out.

    Yields:
        Key of the logical tensor, box in global coordinates, and where it starts in the run, in elements.
    """
    start, stop = run
    base = 0
    for segment in spec.segments:
        local = local_box(segment, parts, index)
        low, high = max(start - base, 0), min(stop - base, local.numel)
        data = Box.whole(_data_shape(segment)) if real_only else None
        if low < high:
            for flat_box, offset in cut_flat_run(local.shape, low, high):
                box: Box | None = flat_box.shift(local.lo)
                # Rows are the outermost dim: what is left of a box still begins where the box begins.
                if data is not None and box is not None:
                    box = box.intersect(data)
                if box is not None:
                    yield segment.key, box, base + low + offset - start
        base += local.numel
