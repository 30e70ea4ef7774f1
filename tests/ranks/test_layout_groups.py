"""Group lists of `ParallelLayout` against Megatron's own `initialize_model_parallel`.

Megatron runs with torch's fake backend, which makes groups of any world in one process, so that every rank of many
layouts is checked; a few layouts are checked again with real groups.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import DEFAULT_ORDER, ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

Sizes = dict[str, Any]
Groups = dict[str, tuple[int, ...] | None]

# --use-tp-pp-dp-mapping
PP_BEFORE_DP = "tp-cp-ep-pp-dp"
# Name -> (token, in the expert grid?)
TOKENS = {
    "tp": ("tp", False),
    "pp": ("pp", False),
    "cp": ("cp", False),
    "dp": ("dp", False),
    "dp_cp": ("dp-cp", False),
    "mp": ("tp-pp", False),
    "tp_cp": ("tp-cp", False),
    "tp_dp": ("tp-dp", False),
    "tp_dp_cp": ("tp-dp-cp", False),
    "ep": ("ep", True),
    "expt_tp": ("tp", True),
    "tp_ep": ("tp-ep", True),
    "tp_ep_pp": ("tp-ep-pp", True),
    "expt_dp": ("dp", True),
}


def predicted(world: int, sizes: Sizes, rank: int) -> Groups | None:
    """Return what the layout says of a rank; None where it refuses the sizes."""
    try:
        layout = ParallelLayout.for_world(world, **sizes)
    except LayoutError:
        return None
    groups: Groups = {name: layout.group_of(rank, token, expert=expert) for name, (token, expert) in TOKENS.items()}
    stages = layout.group_of(rank, "pp")
    ends = (stages[0], stages[-1]) if len(stages) > 1 else stages
    groups["embd"] = ends if rank in ends else None
    groups["pos_embd"] = stages[:1] if rank == stages[0] else None
    groups["intra_dp_cp"] = _shard_group(layout, rank, expert=False)
    groups["intra_expt_dp"] = _shard_group(layout, rank, expert=True)
    return groups


def _shard_group(layout: ParallelLayout, rank: int, *, expert: bool) -> tuple[int, ...]:
    group = layout.group_of(rank, "dp" if expert else "dp-cp", expert=expert)
    size = layout.shards(expert=expert)
    start = layout.index_in(rank, "dp" if expert else "dp-cp", expert=expert) // size * size
    part = group[start : start + size]
    assert part[layout.shard_index(rank, expert=expert)] == rank
    return part


def megatron_groups(sizes: Sizes) -> Groups | None:
    """Return the groups of this process by Megatron; None where it refuses the sizes."""
    from megatron.core import parallel_state

    try:
        parallel_state.initialize_model_parallel(
            sizes["tp"],
            sizes["pp"],
            context_parallel_size=sizes["cp"],
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
            num_distributed_optimizer_instances=sizes.get("instances", 1),
            order=sizes.get("order", DEFAULT_ORDER),
            create_gloo_process_groups=False,
        )
        return _read_groups()
    except (AssertionError, RuntimeError):
        return None
    finally:
        parallel_state.destroy_model_parallel()


def _read_groups() -> Groups:
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    found = {
        "tp": ps.get_tensor_model_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "cp": ps.get_context_parallel_group(),
        "dp": ps.get_data_parallel_group(),
        "dp_cp": ps.get_data_parallel_group(with_context_parallel=True),
        "mp": ps.get_model_parallel_group(),
        "tp_cp": ps.get_tensor_and_context_parallel_group(),
        "tp_dp": ps.get_tensor_and_data_parallel_group(),
        "tp_dp_cp": ps.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "ep": ps.get_expert_model_parallel_group(),
        "expt_tp": ps.get_expert_tensor_parallel_group(),
        "tp_ep": ps.get_expert_tensor_and_model_parallel_group(),
        "tp_ep_pp": ps.get_expert_tensor_model_pipeline_parallel_group(),
        "expt_dp": ps.get_expert_data_parallel_group(),
        "embd": ps.get_embedding_group(check_initialized=False),
        "pos_embd": ps.get_position_embedding_group(check_initialized=False),
        "intra_dp_cp": ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        "intra_expt_dp": ps.get_expert_data_parallel_group(partial_expert_data_parallel=True),
    }
    return {
        name: None if group is None else tuple(dist.get_process_group_ranks(group)) for name, group in found.items()
    }


def faked(context: RankContext, world: int, layouts: list[Sizes]) -> list[list[Groups | None]]:
    """Return for each layout what Megatron says on each rank of a faked world."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: list[list[Groups | None]] = [[] for _ in layouts]
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        for at, sizes in enumerate(layouts):
            found[at].append(megatron_groups(sizes))
        dist.destroy_process_group()
    return found


def real(context: RankContext, layouts: list[Sizes]) -> list[Groups | None]:
    return [megatron_groups(sizes) for sizes in layouts]


def all_sizes(world: int) -> list[Sizes]:
    """Return all sizes whose parts divide the world, possible or not."""
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    layouts = []
    for tp, cp, pp, ep, etp in itertools.product(divisors, repeat=5):
        if world % (tp * cp * pp) == 0 and ep * etp <= world and ep * etp * pp <= 2 * world:
            layouts.append({"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp})
    return layouts


def compare(world: int, layouts: list[Sizes], found: list[list[Groups | None]]) -> int:
    """Compare all; return how many layouts are possible."""
    possible = 0
    for sizes, groups in zip(layouts, found, strict=True):
        expected = [predicted(world, sizes, rank) for rank in range(world)]
        assert groups == expected, sizes
        possible += expected[0] is not None
    return possible


@pytest.mark.parametrize("world", [4, 6])
def test_every_layout_of_a_small_world(ranks: RankPool, world: int) -> None:
    layouts = all_sizes(world)
    (found,) = ranks.run(1, faked, world, layouts, init_group=False)
    possible = compare(world, layouts, found)
    assert 0 < possible < len(layouts)  # refusals are compared too


def test_layouts_of_eight_ranks(ranks: RankPool) -> None:
    layouts = all_sizes(8)[::7]
    layouts += [sizes | {"order": PP_BEFORE_DP} for sizes in all_sizes(8)[::11]]
    layouts += [sizes | {"instances": 2} for sizes in all_sizes(8)[::13]]
    (found,) = ranks.run(1, faked, 8, layouts, init_group=False)
    assert compare(8, layouts, found) > 30


def test_real_groups_of_four_and_eight_ranks(ranks: RankPool) -> None:
    for world, layouts in (
        (4, [{"tp": 2, "cp": 1, "pp": 2, "ep": 1, "etp": 2}, {"tp": 1, "cp": 2, "pp": 1, "ep": 4, "etp": 1}]),
        (8, [{"tp": 2, "cp": 1, "pp": 2, "ep": 2, "etp": 1}]),
    ):
        records = ranks.run(world, real, layouts)
        compare(world, layouts, [list(groups) for groups in zip(*records, strict=True)])
