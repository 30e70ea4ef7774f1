"""The parallel layout: one frozen, checked value that says which rank holds what (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.pipeline_split import PipelineSplit, parse_stages, spread_layers

__all__ = ["AXES", "DEFAULT_ORDER", "EVEN", "ParallelLayout", "PipelineSplit"]

AXES = ("tp", "cp", "ep", "dp", "pp")
"""The axes of the rank grid. A grid has all five; `ep` is 1 in the dense grid, `cp` is 1 in the expert grid."""

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Megatron's default order: the axis named first has neighbouring ranks."""

EVEN = PipelineSplit()
"""The default split: the same number of layers on each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes, order and ranks of one parallel layout; equal and hashed by all its fields.

    The dense grid has `tp x cp x dp x pp` ranks, the expert grid the same ranks as `etp x ep x edp x pp`, both in
    the order of `order`, equal to Megatron's `RankGenerator`.

    Args:
        tp: Tensor-parallel size.
        cp: Context-parallel size.
        ep: Expert-parallel size.
        etp: Tensor-parallel size of the experts; tp where it isn't given.
        dp: Data-parallel size (without cp).
        pp: Pipeline-parallel size.
        vpp: Model chunks per pipeline rank; None for one. 1 becomes None, and a written pipeline layout sets it.
        sequence_parallel: Off where tp is 1, as Megatron does it, whatever was given.
        order: Megatron's order string, a permutation of `tp-cp-ep-dp-pp`.
        instances: Distributed optimizer instances (`--num-distributed-optimizer-instances`).
        split: How layers are spread over stages.
        ranks: Global ranks in grid order; 0..world-1 where none are given.

    Raises:
        LayoutError: The layout can't exist; the message shows the whole product and the world size.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    dp: int
    pp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False
    order: str = DEFAULT_ORDER
    instances: int = 1
    split: PipelineSplit = EVEN
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._normalise()
        self._check_sizes()
        self._check_grids()
        self._check_pipeline()

    @classmethod
    def for_world(cls, world_size: int | Sequence[int], **sizes: Any) -> ParallelLayout:
        """Return the layout of a world whose data-parallel size is what the other sizes leave.

        Args:
            world_size: Number of ranks, or the global ranks in grid order.
            sizes: Any field of the layout except `dp` and `ranks`.

        Raises:
            LayoutError: tp x cp x pp doesn't divide the world, or another check of the layout fails.
        """
        ranks = tuple(range(world_size)) if isinstance(world_size, int) else tuple(world_size)
        tp, cp, pp = (_size(name, sizes.get(name, 1)) for name in ("tp", "cp", "pp"))
        model = tp * cp * pp
        if not ranks or len(ranks) % model:
            raise LayoutError(
                f"tp {tp} x cp {cp} x pp {pp} = {model} doesn't divide the world size {len(ranks)}",
                subject="world size",
                expected=f"a world size that is a multiple of {model}",
                got=len(ranks),
                hint="a schedule or request that doesn't name tp, cp or pp keeps its value: name it too",
            )
        return cls(dp=len(ranks) // model, ranks=ranks, **sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def edp(self) -> int:
        """Expert data-parallel size: what etp x ep x pp leave of the world."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def num_chunks(self) -> int:
        """Model chunks per pipeline rank."""
        return self.vpp or 1

    @property
    def experts_apart(self) -> bool:
        """Whether experts use process groups, and a gradient buffer, of their own.

        Source: `use_expert_pgs` in Megatron's `tensor_parallel/layers.py` (it sets `param.allreduce`).
        """
        return self.ep > 1 or self.etp != self.tp

    def size(self, axis: str, *, expert: bool = False) -> int:
        """Return the size of an axis of the dense or the expert grid."""
        return self._sizes(expert)[axis]

    def coordinate(self, rank: int, *, expert: bool = False) -> dict[str, int]:
        """Return the index on each of the five axes of a global rank.

        In the expert grid `tp` is the index in the expert tensor-parallel group and `dp` in the expert data-parallel
        group.

        Raises:
            LayoutError: The rank is not in the layout.
        """
        index = _coordinates(self.order, self._shape_key(expert))[self._position(rank)]
        return dict(zip(AXES, index, strict=True))

    def groups(self, token: str, *, expert: bool = False) -> tuple[tuple[int, ...], ...]:
        """Return the groups that span the axes of `token` (e.g. `tp-dp`), in global ranks.

        Groups, and ranks in a group, are ordered like those of Megatron's `RankGenerator.get_ranks`.

        Raises:
            LayoutError: The token names something that is not an axis.
        """
        table = _group_table(self.order, self._shape_key(expert), token)
        return tuple(tuple(self.ranks[i] for i in row) for row in table)

    def group_of(self, rank: int, token: str, *, expert: bool = False) -> tuple[int, ...]:
        """Return the group that spans the axes of `token` and has the global rank `rank` in it.

        Raises:
            LayoutError: The rank is not in the layout, or the token names something that is not an axis.
        """
        table = _group_table(self.order, self._shape_key(expert), token)
        row, _ = _group_places(self.order, self._shape_key(expert), token)[self._position(rank)]
        return tuple(self.ranks[i] for i in table[row])

    def index_in(self, rank: int, token: str, *, expert: bool = False) -> int:
        """Return the place of a global rank in its group of `token`."""
        return _group_places(self.order, self._shape_key(expert), token)[self._position(rank)][1]

    def shards(self, *, expert: bool = False) -> int:
        """Return over how many ranks the distributed optimizer shards a buffer (one optimizer instance)."""
        return (self.edp if expert else self.dp * self.cp) // self.instances

    def shard_index(self, rank: int, *, expert: bool = False) -> int:
        """Return which shard of a buffer a global rank owns.

        Source: the `intra_dp_cp` and `intra_expt_dp` groups of Megatron's `initialize_model_parallel`, consecutive
        parts of the dp-cp (expert: dp) group.
        """
        return self.index_in(rank, "dp" if expert else "dp-cp", expert=expert) % self.shards(expert=expert)

    def stage_layers(self, num_layers: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the global, zero-based layer numbers of each `[pipeline rank][model chunk]`, every layer once.

        Raises:
            LayoutError: The layers can't be spread so.
        """
        return spread_layers(self.split, num_layers, self.pp, self.num_chunks)

    def describe(self) -> str:
        """Return the layout in short, for logs and records, e.g. `tp2 dp2 sp`; what is at its default is left out."""
        sizes = [("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("vpp", self.num_chunks), ("ep", self.ep)]
        parts = [f"{name}{size}" for name, size in sizes if size > 1]
        if self.etp != self.tp:
            parts.append(f"etp{self.etp}")
        if self.dp > 1 or not parts:
            parts.append(f"dp{self.dp}")
        if self.sequence_parallel:
            parts.append("sp")
        if self.instances > 1:
            parts.append(f"instances{self.instances}")
        if self.order != DEFAULT_ORDER:
            parts.append(self.order)
        if self.split != EVEN:
            parts.append(f"[{self.split}]")
        if self.ranks != tuple(range(self.world_size)):
            parts.append(f"ranks {_spans(self.ranks)}")
        return " ".join(parts)

    def replace(self, **changes: Any) -> ParallelLayout:
        """Return the layout with some fields changed; the others keep their value.

        Where `dp` is not among the changes it is again what is left of the ranks. Three fields follow another one as
        long as they are not named themselves: etp stays equal to tp where it is now; vpp ends where pp becomes 1, and
        is read again from a written pipeline layout; ranks are 0..world-1 where they were and `dp` is named.

        Raises:
            LayoutError: The new layout can't exist.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | changes
        if "etp" not in changes and self.etp == self.tp:
            fields["etp"] = 0
        written = self.split.layout is not None or fields["split"].layout is not None
        if "vpp" not in changes and (fields["pp"] == 1 or (written and not changes.keys().isdisjoint({"pp", "split"}))):
            fields["vpp"] = None
        if "dp" not in changes:
            del fields["dp"]
            return type(self).for_world(fields.pop("ranks"), **fields)
        if "ranks" not in changes and self.ranks == tuple(range(self.world_size)):
            fields["ranks"] = ()
        return type(self)(**fields)

    def _normalise(self) -> None:
        """Fill the defaults that depend on other fields, so that equal layouts compare equal."""
        for name in ("tp", "cp", "ep", "dp", "pp", "instances"):
            _size(name, getattr(self, name))
        self._set("etp", _size("etp", self.etp or self.tp))
        if self.vpp is not None and _size("vpp", self.vpp) == 1:
            self._set("vpp", None)
        self._set("sequence_parallel", bool(self.sequence_parallel) and self.tp > 1)
        self._set("ranks", tuple(self.ranks) or tuple(range(self.tp * self.cp * self.dp * self.pp)))
        if self.split.layout is not None and self.vpp is None and self.pp > 0:
            stages = len(parse_stages(self.split.layout))
            if stages % self.pp == 0 and stages > self.pp:
                self._set("vpp", stages // self.pp)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_sizes(self) -> None:
        dense = f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp}"
        product = self.tp * self.cp * self.pp * self.dp
        if product != self.world_size:
            raise LayoutError(
                f"{dense} = {product} is not the world size {self.world_size}",
                subject="world size",
                expected=product,
                got=self.world_size,
            )
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise LayoutError("ranks must be unique and not negative", subject="ranks", got=list(self.ranks))
        experts = self.etp * self.ep * self.pp
        if self.world_size % experts:
            raise LayoutError(
                f"etp {self.etp} x ep {self.ep} x pp {self.pp} = {experts} doesn't divide the world size"
                f" {self.world_size} = {dense}",
                subject="ep",
                expected=f"a world size that is a multiple of {experts}",
                got=self.world_size,
            )
        for name, size in (("dp x cp", self.dp * self.cp), ("edp", self.edp)):
            if size % self.instances:
                raise LayoutError(
                    f"{self.instances} distributed optimizer instances don't divide {name} = {size}",
                    subject="instances",
                    expected=f"a divisor of {size}",
                    got=self.instances,
                )

    def _check_grids(self) -> None:
        if sorted(self.order.split("-")) != sorted(AXES):
            raise LayoutError(
                "the order of the axes names each axis once", subject="order", expected=DEFAULT_ORDER, got=self.order
            )
        if not self.order.endswith("pp") and self.pp > 1 and self.edp != self.dp:
            raise LayoutError(
                f"without pp as the last axis, edp {self.edp} and dp {self.dp} must be the same",
                subject="order",
                expected="an order that ends with pp",
                got=self.order,
            )
        if self.pp > 1 and self.groups("pp") != self.groups("pp", expert=True):
            raise LayoutError(
                "the pipeline groups of the dense and the expert grid differ",
                subject="order",
                expected="an order that ends with pp",
                got=f"{self.order}: {self.groups('pp')} and {self.groups('pp', expert=True)}",
            )

    def _check_pipeline(self) -> None:
        if self.vpp is not None and self.pp == 1:
            raise LayoutError("a virtual pipeline needs pp > 1", subject="vpp", expected="none", got=self.vpp)
        if self.split.layout is not None and len(parse_stages(self.split.layout)) != self.pp * self.num_chunks:
            raise LayoutError(
                "the written pipeline layout has another number of stages",
                subject=f"pipeline layout {self.split.layout}",
                expected=f"pp {self.pp} x vpp {self.num_chunks} = {self.pp * self.num_chunks}",
                got=len(parse_stages(self.split.layout)),
            )

    def _sizes(self, expert: bool) -> Mapping[str, int]:
        if expert:
            return {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    def _shape_key(self, expert: bool) -> tuple[int, ...]:
        """Return the sizes in the order of `AXES`; the key of the cached grids."""
        sizes = self._sizes(expert)
        return tuple(sizes[axis] for axis in AXES)

    def _position(self, rank: int) -> int:
        position = _positions(self.ranks).get(rank)
        if position is None:
            raise LayoutError("the rank is not in the layout", subject="rank", expected=_spans(self.ranks), got=rank)
        return position


def _size(name: str, value: object) -> int:
    """Return a size that is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(
            "a size of a layout is a whole number of at least 1", subject=name, expected=">= 1", got=value
        )
    return value


@lru_cache(maxsize=64)
def _grid(order: str, key: tuple[int, ...]) -> tuple[NDArray[np.int64], tuple[int, ...], tuple[str, ...]]:
    """Return the grid of positions, its shape and the names of its dims; the axis named first in `order` is last."""
    names = tuple(reversed(order.split("-")))
    sizes = dict(zip(AXES, key, strict=True))
    shape = tuple(sizes[name] for name in names)
    return np.arange(math.prod(shape)).reshape(shape), shape, names


@lru_cache(maxsize=64)
def _coordinates(order: str, key: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return for each position in the grid its index on each axis, in the order of `AXES`."""
    grid, shape, names = _grid(order, key)
    index = dict(zip(names, np.unravel_index(grid.reshape(-1), shape), strict=True))
    return tuple(zip(*(index[axis].tolist() for axis in AXES), strict=True))


@lru_cache(maxsize=1024)
def _group_table(order: str, key: tuple[int, ...], token: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of a token as positions in the grid: its axes are moved last and flattened."""
    grid, shape, names = _grid(order, key)
    wanted = token.split("-")
    if not set(wanted) <= set(AXES):
        raise LayoutError("a group spans axes of the grid", subject="token", expected="-".join(AXES), got=token)
    inside = [i for i, name in enumerate(names) if name in wanted]
    outside = [i for i, name in enumerate(names) if name not in wanted]
    rows = grid.transpose(outside + inside).reshape(-1, math.prod(shape[i] for i in inside))
    return tuple(tuple(row) for row in rows.tolist())


@lru_cache(maxsize=1024)
def _group_places(order: str, key: tuple[int, ...], token: str) -> dict[int, tuple[int, int]]:
    """Return for each position in the grid the group of a token that has it, and its place in that group."""
    table = _group_table(order, key, token)
    return {position: (row, place) for row, group in enumerate(table) for place, position in enumerate(group)}


@lru_cache(maxsize=256)
def _positions(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks)}


def _spans(ranks: tuple[int, ...]) -> str:
    """Write ranks with runs of neighbours drawn together, e.g. `0-2,5`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
