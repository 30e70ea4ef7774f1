"""C23: process groups belong to a world: none is stale, none is left behind, and every rank asks for the same ones."""

from __future__ import annotations

from typing import Any

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

START = ParallelLayout(tp=2, dp=2)
CYCLE = [ParallelLayout(dp=4), ParallelLayout(pp=2, dp=2), ParallelLayout(tp=2, dp=2)]
CYCLES = 5


def _cycles(context: RankContext) -> dict[str, Any]:
    from tests.cases.job import CaseJob
    from tests.cases.models import T_SHAPE, gpt

    shape = {**T_SHAPE, "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2}
    job = CaseJob(context, START, gpt(16), shape=shape)
    requested = _requests()
    found: dict[str, Any] = {"sums": [(START, _sums(context.rank))], "requested": [], "left": []}
    for _ in range(CYCLES):
        for layout in CYCLE:
            job.switch(layout)
            found["requested"].append(requested.pop(job.switcher.world.parallel_state.groups))
            found["sums"].append((layout, _sums(context.rank)))
        found["left"].append(_left())
    return found


def _requests() -> dict[object, list[tuple[int, ...]]]:
    """Return what is filled with the ranks of each group that a world is asked for from now on, members or not."""
    from megatron_dynatrain.elastic.groups import WorldGroups

    requested: dict[object, list[tuple[int, ...]]] = {}
    stock = WorldGroups.group

    def group(self: Any, ranks: Any = None, **others: Any) -> Any:
        requested.setdefault(self, []).append(tuple(ranks) if ranks is not None else self.ranks)
        return stock(self, ranks, **others)

    WorldGroups.group = group  # type: ignore[method-assign]
    return requested


def _groups() -> dict[str, Any]:
    """Megatron's groups by the token of the layout that they must be."""
    from megatron.core import parallel_state as mpu

    return {
        "tp": mpu.get_tensor_model_parallel_group(),
        "pp": mpu.get_pipeline_model_parallel_group(),
        "dp": mpu.get_data_parallel_group(),
        "dp-cp": mpu.get_data_parallel_group(with_context_parallel=True),
        "cp": mpu.get_context_parallel_group(),
        "tp-pp": mpu.get_model_parallel_group(),
        "tp-dp": mpu.get_tensor_and_data_parallel_group(),
        "tp-dp-cp": mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "tp-cp": mpu.get_tensor_and_context_parallel_group(),
    }


def _sums(rank: int) -> dict[str, tuple[int, int]]:
    """All-reduce rank ids in each group; the ids' bits too, as 0 + 3 is 1 + 2."""
    import torch
    import torch.distributed as dist

    sums = {}
    for token, group in _groups().items():
        values = torch.tensor([rank, 2**rank])
        dist.all_reduce(values, group=group)
        sums[token] = (int(values[0]), int(values[1]))
    return sums


def _left() -> dict[str, int]:
    from pathlib import Path

    from megatron_dynatrain.elastic.groups import live_groups

    return {
        "groups": live_groups(),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
    }


def test_c23_five_cycles_of_three_layouts(ranks: RankPool) -> None:
    found = ranks.run(4, _cycles, timeout=90)
    for rank, record in enumerate(found):
        assert len(record["sums"]) == 1 + CYCLES * len(CYCLE)
        for layout, sums in record["sums"]:
            for token, (ids, bits) in sums.items():
                members = layout.group_of(rank, token)
                assert (ids, bits) == (sum(members), sum(2**member for member in members)), (layout, rank, token)
        first, *others = record["left"]
        assert len(others) == CYCLES - 1
        assert others == [first] * len(others), rank
    requested = found[0]["requested"]
    assert [record["requested"] for record in found] == [requested] * 4
    assert requested[: len(CYCLE)] * CYCLES == requested
    for layout, order in zip(CYCLE, requested, strict=False):
        assert len(order) > 10
        for token in ("tp", "dp", "pp", "tp-pp"):
            assert set(layout.groups(token)) <= set(order), (layout, token)


def _shrink_and_grow(context: RankContext) -> dict[str, Any]:
    from tests.cases.job import CaseJob
    from tests.cases.models import T_SHAPE, gpt

    heads = {"num_attention_heads": 3, "num_query_groups": 3}
    shape = {**T_SHAPE, "num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 12, **heads}
    four, three = ParallelLayout.for_world(4), ParallelLayout.for_world([0, 1, 3], tp=3)
    job = CaseJob(context, four, gpt(24), shape=shape)
    found: dict[str, Any] = {"sums": [], "left": []}
    for _ in range(CYCLES):
        job.switch(three)
        if job.switcher.parked:
            job.switcher.join_next(60)
        else:
            found["sums"].append((three, _sums(context.rank)))
            job.switch(four)
        found["sums"].append((four, _sums(context.rank)))
        found["left"].append(_left())
    return found


def test_c23_worlds_that_shrink_and_grow(ranks: RankPool) -> None:
    """World 4 -> 3 -> 4, one from the middle leaves: sums of the members' ranks, and nothing is left behind."""
    for rank, found in enumerate(ranks.run(4, _shrink_and_grow, timeout=120)):
        for layout, sums in found["sums"]:
            for token, (ids, bits) in sums.items():
                members = layout.group_of(rank, token)
                assert (ids, bits) == (sum(members), sum(2**member for member in members)), (layout, rank, token)
        assert found["left"][1:] == [found["left"][1]] * (CYCLES - 1), found["left"]
