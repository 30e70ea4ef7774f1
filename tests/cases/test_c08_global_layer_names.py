"""C08: every stage calls its first layer `layers.0`; the global number decides which layer a stage gets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.windows import plan_all
from megatron_dynatrain.transport.memory import run_all
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import StateKind
from tests.pure.models import dense_model
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool
from tests.transport.witness import differences, empty, filled

STOPS = {
    2: [({"dp": 2}, [[0, 1, 2, 3]]), ({"pp": 2, "dp": 1}, [[0, 1], [2, 3]]), ({"dp": 2}, [[0, 1, 2, 3]])],
    4: [
        ({"dp": 4}, [[0, 1, 2, 3]]),
        ({"pp": 2, "dp": 2}, [[0, 1], [2, 3]]),
        ({"pp": 4, "dp": 1}, [[0], [1], [2], [3]]),
        ({"dp": 4}, [[0, 1, 2, 3]]),
    ],
}


def _switch(context: RankContext) -> dict[str, Any]:
    """Every weight and state of layer l holds l; every target starts full of NaN."""
    import torch

    from tests.cases.job import CaseJob, owned_by
    from tests.cases.models import T_SHAPE, gpt

    first, *stops = [ParallelLayout(**sizes) for sizes, _ in STOPS[context.world]]
    job = CaseJob(context, first, gpt(), shape=T_SHAPE)
    job.step(0.0)  # makes the moments
    with torch.no_grad():
        for name, parameter in job.parameters().items():
            parameter.fill_(_value(name))
        for name, item in job.owned().items():
            item.state["exp_avg"].fill_(_value(name) + 0.25)
            item.state["exp_avg_sq"].fill_(_value(name) + 0.5)
    spoiled: list[int] = []

    def spoil(chunks: list[Any], optimizer: Any) -> None:
        spoiled.append(len(list(chunks[0].parameters())))
        for parameter in chunks[0].parameters():
            parameter.fill_(math.nan)
        for item in owned_by(optimizer):
            item.state["exp_avg"].fill_(math.nan)
            item.state["exp_avg_sq"].fill_(math.nan)

    job.on_empty = spoil
    found: dict[str, Any] = {"held": [_held(job)], "states": [job.gather()]}
    for layout in stops:
        job.switch(layout)
        found["held"].append(_held(job))
        found["states"].append(job.gather())
    assert len(spoiled) == len(stops)
    assert min(spoiled) > 0
    return found


def _value(name: str) -> float:
    return float(name.split(".")[2]) if name.startswith("decoder.layers.") else 9.0


def _held(job: Any) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Local name of each parameter -> its distinct values, those of exp_avg and those of exp_avg_sq."""
    owned = job.owned()
    held = {}
    for name, parameter in job.parameters().items():
        state = owned[name].state if name in owned else {}
        tensors = [parameter.detach(), state.get("exp_avg"), state.get("exp_avg_sq")]
        held[name] = tuple([] if t is None else sorted(set(t.flatten().tolist())) for t in tensors)
    return held


@pytest.mark.parametrize("world", [2, 4])
def test_c08_stages_get_their_own_layers(ranks: RankPool, world: int) -> None:
    found = ranks.run(world, _switch)
    for stop, (sizes, layers) in enumerate(STOPS[world]):
        layout = ParallelLayout(**sizes)
        for rank, record in enumerate(found):
            mine = layers[layout.coordinate(rank)["pp"]]
            held = record["held"][stop]
            numbers = {int(name.split(".")[2]) for name in held if name.startswith("decoder.layers.")}
            assert numbers == set(range(len(mine)))  # every stage counts from 0
            for name, (weights, exp_avg, exp_avg_sq) in held.items():
                value = float(mine[int(_value(name))]) if name.startswith("decoder.layers.") else 9.0
                assert weights == [value], (sizes, rank, name)
                assert exp_avg in ([], [value + 0.25]), (sizes, rank, name)
                assert exp_avg_sq in ([], [value + 0.5]), (sizes, rank, name)
    first, *others = found[0]["states"]
    for state in others:
        assert first.differences(state) == []
        assert not any(np.isnan(bits.view(np.float32)).any() for bits in state.bits.values())


def test_c08_four_stages_to_two_with_two_chunks_each() -> None:
    """The plan of pp4 -> pp2 vpp2 -> pp4, executed in memory: rank 0 gets layers 0 and 2, rank 1 gets 1 and 3."""
    deep = Placement(dense_model(), ParallelLayout(pp=4, dp=1))
    virtual = Placement(dense_model(), ParallelLayout(pp=2, vpp=2, dp=1))
    memory = {rank: filled(deep, rank) for rank in range(4)}
    for source, target in ((deep, virtual), (virtual, deep)):
        after = {rank: empty(target, rank) for rank in target.layout.ranks}
        run_all(plan_all(source, target), memory, after, check_writes=True)
        for rank, slabs in after.items():
            assert list(differences(slabs, filled(target, rank))) == []
        memory = after
    for rank, layers in ((0, {0: 0, 2: 1}), (1, {1: 0, 3: 1})):
        slabs = [
            slab for slab in virtual.slabs(rank) if slab.state is StateKind.EXP_AVG and ".layers." in slab.parameter
        ]
        assert {int(slab.parameter.split(".")[2]): slab.chunk for slab in slabs} == layers
