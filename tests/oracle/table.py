"""The table of pairs: from which layout to which, on how many ranks, with which model.

Rows are written as chains: one run switches A -> B -> C, which are two rows. Axes that a layout doesn't name are at
their default, as in a launch without their flags.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from megatron_dynatrain.layout import DEFAULT_ORDER, ParallelLayout, PipelineSplit
from tests.oracle.models import EIGHT, FIVE_LAYERS, MODELS, THREES, TWOS, Model, Sizes

Keys = Mapping[str, Any]

FIRST, SEGMENT = 2, 2
"""Steps before the first switch of a chain, and after each."""

LARGEST_IN_CI = 4
"""Ranks; chains on more of them run in `make soak`."""

VOCABULARY, ROWS_DIVISIBLE_BY = 128, 16
"""Of `gpt_args`: rows with the end of a document, and `--make-vocab-size-divisible-by`."""

PP_BEFORE_DP = "tp-cp-ep-pp-dp"
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

MOE_TP = {"tp": 2, "sp": True}
CHAINS = (
    Chain(
        "2-sizes",
        2,
        "dense-fp32",
        TWOS,
        (at(), at(tp=2), at(tp=2, sp=True), at(tp=2), at(), at(cp=2), at(), at(instances=2), at()),
        ci=(2, 4, 6),
    ),
    Chain(
        "2-pipelines",
        2,
        "dense-fp32",
        TWOS,
        (
            at(pp=2),
            at(pp=2, vpp=2),
            at(pp=2),
            at(pp=2, first=1),
            at(pp=2, last=1),
            at(pp=2),
            at(pp=2, layout="Et*3|tL"),
            at(pp=2),
            at(pp=2, account_for_embedding=True, account_for_loss=True),
            at(pp=2, vpp=2, layout="E|t*3|t|L"),
            at(pp=2),
            at(),
            at(pp=2),
        ),
        ci=(0, 9),
    ),
    Chain(
        "2-five-layers",
        2,
        "dense-bf16",
        FIVE_LAYERS,
        (
            at(pp=2, first=2),
            at(pp=2, account_for_loss=True),
            at(),
            at(pp=2, account_for_embedding=True),
            at(pp=2, layout="Ettt|tt|L|", vpp=2),
            at(tp=2, ranks=[1, 0]),
        ),
        ci=(0,),
    ),
    Chain(
        "3-dense-fp32",
        3,
        "dense-fp32",
        THREES,
        (at(), at(tp=3), at(pp=3), at(pp=3, vpp=2), at(cp=3), at(tp=3, sp=True), at()),
        ci=(1,),
    ),
    Chain(
        "3-dense-bf16",
        3,
        "dense-bf16",
        THREES,
        (at(tp=3, sp=True), at(), at(pp=3, first=1, last=2), at(tp=3), at(tp=3, ranks=[2, 0, 1]), at(pp=3)),
        ci=(),
    ),
    Chain(
        "3-moe-fp32",
        3,
        "moe-fp32",
        THREES,
        (at(), at(ep=3), at(), at(tp=3, sp=True), at(ep=3), at(pp=3), at(cp=3, ep=3)),
        ci=(0,),
    ),
    Chain(
        "4-dense-fp32",
        4,
        "dense-fp32",
        TWOS,
        (
            at(tp=2),
            at(tp=2, pp=2, sp=True),
            at(tp=4),
            at(pp=4),
            at(cp=4),
            at(pp=2, vpp=2),
            at(tp=2, cp=2),
            at(tp=2),
        ),
        ci=(2,),
    ),
    Chain(
        "4-dense-bf16",
        4,
        "dense-bf16",
        TWOS,
        (at(tp=2), at(pp=4), at(pp=2, vpp=2), at(tp=4, sp=True), at(), at(cp=2, pp=2), at(tp=2, cp=2), at(pp=2)),
        ci=(),
    ),
    Chain(
        "4-places",
        4,
        "dense-fp32",
        TWOS,
        (
            at(pp=2),
            at(pp=2, order=PP_BEFORE_DP),
            at(pp=2),
            at(pp=2, ranks=[2, 3, 0, 1]),
            at(pp=2),
            at(tp=2, pp=2),
            at(tp=2, pp=2, ranks=[3, 1, 0, 2]),
            at(tp=2, ranks=[0, 2, 1, 3]),
            at(pp=2, vpp=2, order=PP_BEFORE_DP),
        ),
        ci=(0, 5),
    ),
    Chain(
        "4-instances",
        4,
        "dense-bf16",
        TWOS,
        (at(), at(instances=2), at(instances=4), at(instances=2), at(tp=2, instances=2), at(tp=2), at(pp=2, cp=2)),
        ci=(3,),
    ),
    Chain(
        "4-moe-fp32",
        4,
        "moe-fp32",
        TWOS,
        (
            at(),
            at(ep=2),
            at(ep=4),
            at(ep=2),
            at(),
            at(etp=1, **MOE_TP),
            at(etp=2, **MOE_TP),
            at(etp=1, **MOE_TP),
            at(etp=2, ep=2, **MOE_TP),
            at(ep=2, cp=2),
        ),
        ci=(0, 5, 7),
    ),
    Chain(
        "4-moe-bf16",
        4,
        "moe-bf16",
        TWOS,
        (
            at(ep=2),
            at(ep=2, pp=2),
            at(ep=2, pp=2, vpp=2),
            at(ep=2, etp=1, **MOE_TP),
            at(ep=2, etp=2, **MOE_TP),
            at(ep=2, pp=2, last=1),  # not first=1: without TE, Megatron can't save where a stage has no experts
            at(ep=4),
            at(pp=2),
            at(ep=4, ranks=[1, 3, 0, 2]),
        ),
        ci=(2, 6),
    ),
    Chain("4-dense-fp16", 4, "dense-fp16", TWOS, (at(tp=2), at(pp=2), at(), at(tp=2, pp=2, sp=True))),
    Chain("4-mla", 4, "mla-fp32", TWOS, (at(), at(tp=2), at(pp=2), at(tp=4), at(tp=2, pp=2, sp=True))),
    Chain(
        "6-dense-fp32",
        6,
        "dense-fp32",
        THREES,
        (
            at(),
            at(tp=3),
            at(tp=3, pp=2, sp=True),
            at(pp=3),
            at(pp=3, vpp=2),
            at(pp=6),
            at(tp=2, cp=3),
            at(tp=2, pp=3, ranks=[5, 0, 4, 1, 3, 2]),
            at(instances=3),
        ),
    ),
    Chain(
        "6-dense-bf16",
        6,
        "dense-bf16",
        THREES,
        (at(pp=2), at(tp=3), at(tp=3, cp=2), at(pp=3, order=PP_BEFORE_DP), at(pp=3, first=1, last=2), at()),
    ),
    Chain(
        "6-moe-fp32",
        6,
        "moe-fp32",
        THREES,
        (
            at(ep=2),
            at(ep=3),
            at(ep=6),
            at(ep=3, etp=1, **MOE_TP),
            at(ep=3, etp=2, **MOE_TP),
            at(ep=3, pp=2),
            at(tp=3, sp=True),
            at(ep=2, tp=3, etp=3, sp=True),
        ),
    ),
    Chain(
        "8-dense-fp32",
        8,
        "dense-fp32",
        EIGHT,
        (at(tp=2, pp=2), at(tp=4), at(tp=8), at(pp=4), at(tp=2, cp=2, pp=2, sp=True), at(pp=2, vpp=2), at()),
    ),
    Chain(
        "8-dense-bf16",
        8,
        "dense-bf16",
        EIGHT,
        (at(tp=4, pp=2), at(tp=2, instances=2), at(cp=4, pp=2), at(pp=4, tp=2, layout="Et|t|t|tL"), at(cp=2)),
    ),
    Chain(
        "8-moe-bf16",
        8,
        "moe-bf16",
        EIGHT,
        (
            at(ep=8),
            at(ep=4, etp=2, **MOE_TP),
            at(ep=2, pp=2, cp=2),
            at(ep=4, pp=2, vpp=2),
            at(ep=4, etp=1, pp=2, **MOE_TP),
            at(ep=2, etp=4, tp=4, sp=True),
            at(ep=8),
        ),
    ),
)

ROWS = tuple(itertools.chain.from_iterable(chain.rows for chain in CHAINS))
