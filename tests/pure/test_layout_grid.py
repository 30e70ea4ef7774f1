"""The rank grid is Megatron's own, for every order of the axes. The only pure tests that import Megatron's grid."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import AXES, ParallelLayout

TOKENS = ("tp", "cp", "ep", "dp", "pp", "tp-cp", "tp-dp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp-ep-dp-pp", "tp-ep-pp")
ORDERS = tuple("-".join(order) for order in itertools.permutations(AXES))
SIZES = (
    {"tp": 2, "cp": 2, "dp": 2, "pp": 2},
    {"tp": 3, "dp": 3, "pp": 3},
    {"tp": 2, "cp": 1, "dp": 6, "pp": 2},
    {"tp": 4, "cp": 2, "dp": 1, "pp": 1, "ep": 4, "etp": 1},
    {"tp": 2, "cp": 1, "dp": 8, "pp": 2, "ep": 4, "etp": 2},
    {"tp": 2, "cp": 3, "dp": 2, "pp": 2, "ep": 3, "etp": 1},
    {"tp": 1, "cp": 1, "dp": 6, "pp": 1, "ep": 3, "etp": 2},
    {"tp": 2, "cp": 1, "dp": 3, "pp": 3, "ep": 3, "etp": 2},
)


@pytest.fixture(scope="module")
def parallel_state() -> ModuleType:
    return pytest.importorskip("megatron.core.parallel_state")


def generators(module: ModuleType, sizes: dict[str, int], order: str) -> tuple[object, object]:
    """Build Megatron's dense and expert rank generators as `initialize_model_parallel` does."""
    world = sizes["tp"] * sizes.get("cp", 1) * sizes["dp"] * sizes["pp"]
    ep, etp = sizes.get("ep", 1), sizes.get("etp", sizes["tp"])
    dense = module.RankGenerator(
        tp=sizes["tp"], ep=1, dp=sizes["dp"], pp=sizes["pp"], cp=sizes.get("cp", 1), order=order
    )
    edp = world // (etp * ep * sizes["pp"])
    expert = module.RankGenerator(tp=etp, ep=ep, dp=edp, pp=sizes["pp"], cp=1, order=order)
    return dense, expert


def allowed(dense: object, expert: object, order: str, pp: int) -> bool:
    """The two asserts of `initialize_model_parallel` on the order."""
    same = dense.get_ranks("pp") == expert.get_ranks("pp")
    return same and (order.endswith("pp") or pp == 1 or expert.dp == dense.dp)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
def test_groups_equal_rank_generator(parallel_state: ModuleType, sizes: dict[str, int]) -> None:
    refused = 0
    for order in ORDERS:
        dense, expert = generators(parallel_state, sizes, order)
        if not allowed(dense, expert, order, sizes["pp"]):
            refused += 1
            with pytest.raises(LayoutError, match="order"):
                ParallelLayout(**sizes, order=order)
            continue
        layout = ParallelLayout(**sizes, order=order)
        for token in TOKENS:
            assert [list(g) for g in layout.groups(token)] == dense.get_ranks(token), (order, token)
            assert [list(g) for g in layout.groups(token, expert=True)] == expert.get_ranks(token), (order, token)
    assert refused < len(ORDERS)


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_shard_index_follows_partial_groups(parallel_state: ModuleType, instances: int) -> None:
    """Consecutive parts of the dp-cp group, and for experts what `create_hierarchical_groups` makes of the dp group."""
    sizes = {"tp": 2, "cp": 2, "dp": 4, "pp": 2, "ep": 2, "etp": 1}
    layout = ParallelLayout(**sizes, instances=instances)
    dense, expert = generators(parallel_state, sizes, layout.order)
    for is_expert, groups in ((False, dense.get_ranks("dp-cp")), (True, expert.get_ranks("dp"))):
        shards = len(groups[0]) // instances
        assert layout.shards(expert=is_expert) == shards
        for group in groups:
            for start in range(0, len(group), shards):
                part = group[start : start + shards]
                assert [layout.shard_index(rank, expert=is_expert) for rank in part] == list(range(shards))
