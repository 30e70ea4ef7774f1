"""The groups of a target world have their ranks in the same order as those of a launch: sums add up in that order."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

Orders = dict[str, tuple[int, ...]]


def both(context: RankContext, world: int, sizes: dict[str, Any]) -> tuple[Orders, Orders]:
    """Return the ranks of every group of this rank, by the name of Megatron's global: a launch's, a target's."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_dynatrain.elastic.groups import WorldGroups
    from megatron_dynatrain.mcore.parallel_state import ParallelState

    def orders(state: ParallelState) -> Orders:
        found = {name: value for name, value in state.values.items() if isinstance(value, dist.ProcessGroup)}
        return {name: tuple(dist.get_process_group_ranks(group)) for name, group in found.items()}

    layout = ParallelLayout.for_world(world, **sizes)
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order=layout.order,
        create_gloo_process_groups=False,
    )
    launched = orders(ParallelState.capture())
    store = dist.distributed_c10d._get_default_store()
    groups = WorldGroups(
        store, ranks=layout.ranks, rank=context.rank, tag="target", backend="gloo", timeout=30, numbering=layout.ranks
    )
    target = orders(ParallelState.build(layout, groups, create_gloo_process_groups=False))
    dist.barrier()  # who is early must not take back what the others meet by
    groups.destroy()
    parallel_state.destroy_model_parallel()
    return launched, target


@pytest.mark.parametrize(
    "sizes", [{"pp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "order": "tp-cp-ep-pp-dp"}], ids=str
)
def test_a_target_has_its_ranks_in_the_order_of_a_launch(ranks: RankPool, sizes: dict[str, Any]) -> None:
    for launched, target in ranks.run(4, both, 4, sizes):
        assert len(launched) > 15
        assert target == launched
