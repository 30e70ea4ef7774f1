"""Switch a real model from one layout to another on the in-memory transport, and check all that a switch promises."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from megatron_dynatrain.errors import VerificationError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.windows import RankPlan, WindowBudget, check_pairs, plan_all
from megatron_dynatrain.transport.memory import run_all
from tests.megatron_models.choice import ModelChoice
from tests.megatron_models.coordinates import Ids
from tests.megatron_models.world import World, world_of

_NOTHING = np.zeros(0, dtype=np.uint64)


def check_pair(
    model: ModelChoice,
    source: ParallelLayout,
    target: ParallelLayout,
    *,
    bucket_size: int | None = None,
    budget: WindowBudget | None = None,
) -> None:
    """Switch and check; the layouts differ.

    Raises:
        AssertionError, DynaTrainError: Something a switch promises doesn't hold.
    """
    before, after = world_of(model, source, bucket_size), world_of(model, target, bucket_size)
    assert before.description == after.description
    before.fill()
    after.poison()
    plans = plan_all(before.placement, after.placement, budget=budget)
    check_pairs(plans)
    run_all(plans, before.memory, after.memory, check_writes=True)
    wrong = after.wrong()
    assert not wrong, "\n".join([f"{len(wrong)} slabs hold wrong elements:", *wrong[:8]])
    assert not before.wrong(), "the switch changed its source"
    _check_bytes(before, after, plans)
    _check_digests(before, after)


def _check_bytes(before: World, after: World, plans: tuple[RankPlan, ...]) -> None:
    """A rank receives the elements that it must hold and doesn't hold yet, each once for each place it has them in."""
    for plan in plans:
        known = np.sort(np.concatenate([_NOTHING, *before.ids.get(plan.rank, {}).values()]))
        least = 0
        for itemsize, needed in _by_itemsize(after, plan.rank).items():
            held = np.searchsorted(known, needed, "right") > np.searchsorted(known, needed, "left")
            least += itemsize * int((~held).sum())
        assert plan.received_bytes == plan.minimum_received_bytes == least, (
            f"rank {plan.rank} receives {plan.received_bytes} bytes; at least {plan.minimum_received_bytes} (plan),"
            f" {least} (counted)"
        )


def _by_itemsize(world: World, rank: int) -> dict[int, Ids]:
    found: dict[int, list[Ids]] = {}
    for name, ids in world.ids.get(rank, {}).items():
        found.setdefault(world.memory[rank][name].element_size(), []).append(ids)
    return {itemsize: np.concatenate(ids) for itemsize, ids in found.items()}


def _check_digests(before: World, after: World) -> None:
    """The digests of both layouts agree, and don't any more when one replica is spoiled."""
    group = dist.group.WORLD  # of the fake backend: the tables are sums over all ranks already
    before.digest().compare(after.digest(), group)
    for how, spoiled in after.spoiled_digests():
        try:
            before.digest().compare(spoiled, group)
        except VerificationError:
            continue
        raise AssertionError(f"the digests are the same with {how}")
