"""What the table of pairs is made of: layouts as a schedule writes them, chains of them, and the rows of a chain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from megatron_dynatrain.layout import DEFAULT_ORDER, ParallelLayout, PipelineSplit
from tests.oracle.models import MODELS, Model, Sizes

Keys = Mapping[str, Any]

FIRST, SEGMENT = 2, 2
"""Steps before the first switch of a chain, and after each."""

LARGEST_IN_CI = 4
"""Ranks; chains on more of them run in `make soak`."""

VOCABULARY, ROWS_DIVISIBLE_BY = 128, 16
"""Of `gpt_args`: rows with the end of a document, and `--make-vocab-size-divisible-by`."""

_SPLIT = ("first", "last", "account_for_embedding", "account_for_loss", "layout")
_DEFAULTS: Keys = {
    "tp": 1,
    "cp": 1,
    "ep": 1,
    "etp": None,
    "pp": 1,
    "vpp": None,
    "sequence_parallel": False,
    "order": DEFAULT_ORDER,
    "instances": 1,
    "first": None,
    "last": None,
    "account_for_embedding": False,
    "account_for_loss": False,
    "layout": None,
    "ranks": None,
}


def at(*, sp: bool = False, **keys: Any) -> Keys:
    """Return a layout as a schedule writes it, every key named, so that nothing is inherited."""
    unknown = keys.keys() - _DEFAULTS.keys()
    if unknown:
        raise KeyError(f"no keys of a layout: {sorted(unknown)}")
    return {**_DEFAULTS, **keys, "sequence_parallel": sp}


def layout_of(keys: Keys, world: int) -> ParallelLayout:
    """Return the value of a layout that a schedule writes."""
    sizes = {name: keys[name] for name in ("tp", "cp", "ep", "pp", "vpp", "sequence_parallel", "order", "instances")}
    sizes["etp"] = keys["etp"] or keys["tp"]
    split = PipelineSplit(**{name: keys[name] for name in _SPLIT})
    return ParallelLayout.for_world(tuple(keys["ranks"] or range(world)), split=split, **sizes)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Layouts that one run goes through.

    Attributes:
        name: Unique; the rows are named after it.
        layouts: The first is that of the launch.
        ci: Numbers of the rows whose whole oracle runs in `make test`; that of the others runs in `make soak`, and so
            does the chain itself where there are none.
    """

    name: str
    world: int
    model_name: str
    sizes: Sizes
    layouts: tuple[Keys, ...]
    ci: tuple[int, ...] = (0,)

    @property
    def model(self) -> Model:
        return MODELS[self.model_name]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Iteration of each switch, and that of the end."""
        return tuple(FIRST + SEGMENT * number for number in range(len(self.layouts)))

    @property
    def padded(self) -> int:
        """Rows of the vocabulary that every layout of it fits; the plugin must find the same number by itself."""
        unit = ROWS_DIVISIBLE_BY * math.lcm(*(keys["tp"] for keys in self.layouts))
        return math.ceil(VOCABULARY / unit) * unit

    @property
    def soak(self) -> bool:
        """Whether it is too long for CI."""
        return self.world > LARGEST_IN_CI or not self.ci

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Its rows, in order."""
        return tuple(Row(self, number) for number in range(len(self.layouts) - 1))


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: the switch with this number in a chain."""

    chain: Chain
    number: int

    @property
    def id(self) -> str:
        return f"{self.chain.name}-{self.number + 1}"

    @property
    def keys(self) -> tuple[Keys, Keys]:
        """Both layouts as a schedule writes them."""
        return self.chain.layouts[self.number], self.chain.layouts[self.number + 1]

    @property
    def source(self) -> ParallelLayout:
        return layout_of(self.keys[0], self.chain.world)

    @property
    def target(self) -> ParallelLayout:
        return layout_of(self.keys[1], self.chain.world)

    @property
    def iteration(self) -> int:
        """Steps before the switch."""
        return self.chain.boundaries[self.number]

    @property
    def soak(self) -> bool:
        """Whether its whole oracle is left to `make soak`."""
        return self.chain.soak or self.number not in self.chain.ci

    @property
    def oracle(self) -> str:
        """`checkpoint` where Megatron can save at A and load at B, else `gather`.

        It can't load experts that have an optimizer of their own from a checkpoint in which they had none.
        """
        splits = self.chain.model.moe and self.target.experts_apart and not self.source.experts_apart
        return "gather" if splits else "checkpoint"

    @property
    def changed(self) -> tuple[str, ...]:
        """The axes that differ; dp is what is left and not among them."""
        a, b = (axes_of(layout, moe=self.chain.model.moe) for layout in (self.source, self.target))
        return tuple(axis for axis in a if a[axis] != b[axis])


def axes_of(layout: ParallelLayout, *, moe: bool) -> dict[str, Any]:
    """Return the value of each axis that the table is about; those of experts only where the model has some."""
    split = layout.split
    experts = {"ep": layout.ep, "etp": layout.etp} if moe else {}
    return {
        "tp": layout.tp,
        "sp": layout.sequence_parallel,
        "cp": layout.cp,
        **experts,
        "pp": layout.pp,
        "vpp": layout.num_chunks,
        "uneven first/last": (split.first or 0, split.last or 0),
        "account_for_*": (split.account_for_embedding, split.account_for_loss),
        "written pipeline": split.layout or "",
        "instances": layout.instances,
        "order": "" if layout.order == DEFAULT_ORDER else layout.order,
        "ranks": () if layout.ranks == tuple(range(layout.world_size)) else layout.ranks,
    }


SPLIT_AXES = ("uneven first/last", "account_for_*", "written pipeline")
"""Ways of splitting one pipeline, of which one is used at a time."""
