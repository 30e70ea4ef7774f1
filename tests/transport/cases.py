"""The cases that every transport must pass: placements and budgets by name, and what must hold after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.windows import WindowBudget
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.region import Box
from tests.pure.models import dense_model, moe_model
from tests.routing.tables import TablePlacement, frozen_model, one_each

AnyPlacement = Placement | TablePlacement
EIGHT_MIB = 2 * 2**20
"""Elements of float32 in 8 MiB."""


@dataclass(frozen=True)
class Case:
    """One switch; `messages` is how many messages all ranks together send, where that is fixed."""

    world: int
    placements: Callable[[], tuple[AnyPlacement, AnyPlacement]]
    budget: WindowBudget
    messages: int | None = None


def _model(world: int, source: dict, target: dict, *, budget: int, dtype: str = "bfloat16", **shape) -> Case:
    def build() -> tuple[Placement, Placement]:
        model = moe_model(layers=2, dtype=dtype) if "ep" in {**source, **target} else dense_model(dtype=dtype, **shape)
        return tuple(
            Placement(model, ParallelLayout.for_world(sizes.pop("ranks", world), **sizes))
            for sizes in (dict(source), dict(target))
        )

    return Case(world, build, WindowBudget(bytes=budget))


def _each(
    world: int, size: int, ends: Sequence[tuple[int, int]], messages: int | None, dtype: str = "float32", **budget: int
) -> Case:
    return Case(
        world,
        lambda: one_each(size, [a for a, _ in ends], [b for _, b in ends], dtype),
        WindowBudget(**budget),
        messages,
    )


def _odd() -> tuple[TablePlacement, TablePlacement]:
    """Odd sizes in all element sizes, an empty tensor, a scalar, and a part that the target rank has already."""
    shapes = {"a": (7,), "empty": (0, 3), "b": (3, 5), "scalar": (), "c": (13, 1, 3)}
    model = frozen_model(shapes, "uint8")
    wide = frozen_model({"d": (5, 3)}, "float64")
    half = frozen_model({"e": (11,), "f": (2, 2)}, "bfloat16")
    whole = type(model)((*model.parameters, *wide.parameters, *half.parameters), 1)
    shapes |= {"d": (5, 3), "e": (11,), "f": (2, 2)}
    everything = [(name, Box.whole(shape)) for name, shape in shapes.items()]
    source = TablePlacement(whole, (0, 1), {0: everything, 1: [("d", Box((1, 0), (4, 3))), ("b", Box((0, 1), (2, 4)))]})
    return source, TablePlacement(whole, (0, 1), {1: everything})


def _long_strided() -> tuple[TablePlacement, TablePlacement]:
    """Long moves that are contiguous on one side only: rank 0 sends columns, rank 1 receives columns."""
    shape = (512, 1536)
    model = frozen_model({"a": shape, "b": shape})
    left, right, whole = Box((0, 0), (512, 768)), Box((0, 768), (512, 1536)), Box.whole(shape)
    source = TablePlacement(model, (0, 1), {0: [("a", whole), ("b", left)], 1: [("b", right)]})
    return source, TablePlacement(model, (0, 1), {0: [("a", right)], 1: [("a", left), ("b", whole)]})


CASES = {
    "tp2-to-pp2": _model(2, {"tp": 2}, {"pp": 2}, budget=6000),
    "tp2dp2-to-pp2dp2": _model(4, {"tp": 2}, {"pp": 2}, budget=20000, tied=True),
    "dp3-to-tp3": _model(3, {}, {"tp": 3}, budget=9000, hidden=12, ffn=12, vocab=12, layers=2),
    "grow-and-shrink": _model(5, {"ranks": (3, 0)}, {"tp": 4, "ranks": (4, 2, 1, 3)}, budget=2**20, layers=2),
    "experts": _model(4, {"ep": 4}, {"ep": 2, "etp": 2, "tp": 2}, budget=2**20),
    "long-strided": Case(2, _long_strided, WindowBudget(), 2),
    "odd-sizes": Case(2, _odd, WindowBudget()),
    "one-rank": _model(1, {}, {}, budget=2**20),
    "c24-a-swap": _each(4, EIGHT_MIB, [(0, 1), (1, 0), (2, 3), (3, 2)], 4),
    "c24-b-ring": _each(4, EIGHT_MIB, [(0, 1), (1, 2), (2, 3), (3, 0)], 4),
    "c24-b-ring-in-slices": _each(4, EIGHT_MIB, [(0, 1), (1, 2), (2, 3), (3, 0)], None, bytes=2**20),
    "c24-c-reversed": _model(4, {"tp": 4}, {"tp": 2, "ranks": (3, 2, 1, 0)}, budget=20000),
    "c24-d-300-small": _each(4, 3, [(a, b) for a in range(4) for b in range(4) if a != b] * 300, None),
    "c24-e-same-rank": _each(4, EIGHT_MIB, [(0, 0), (1, 1), (2, 2), (3, 3)], 0),
}
