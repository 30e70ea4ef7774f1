"""C11: an expert is known by its global number, whatever the expert-parallel size; the shared one is on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

STOPS = [
    ParallelLayout(pp=4, dp=1),
    ParallelLayout(ep=4, dp=4),
    ParallelLayout(ep=2, dp=4),
    ParallelLayout(pp=2, ep=2, dp=2),
    ParallelLayout(pp=4, dp=1),
]
EXPERTS = {  # by layout, what rank 0 and the next ranks hold, in the order of their modules
    "ep4 dp4": [[0], [1], [2], [3]],
    "ep2 dp4": [[0, 1], [2, 3], [0, 1], [2, 3]],
    "pp2 ep2 dp2": [[0, 1], [2, 3], [0, 1], [2, 3]],
    "pp4": [[0, 1, 2, 3]] * 4,
}


def _switch(context: RankContext, dtype: str) -> dict[str, Any]:
    """Fill every parameter and state by its place, then look at each stop by what is found in memory."""
    import torch

    from tests.cases.experts import places, value
    from tests.cases.job import CaseJob
    from tests.cases.models import EXPERT_SHAPE, moe

    job = CaseJob(context, STOPS[0], moe(), shape=EXPERT_SHAPE, dtype=getattr(torch, dtype))
    job.step(0.0)  # makes the moments
    where = places(job)
    with torch.no_grad():
        for name, parameter in job.parameters().items():
            parameter.fill_(value(where[name]))
        for name, item in job.owned().items():
            item.main.fill_(value(where[name]))
            item.state["exp_avg"].fill_(value(where[name]) + 0.25)
            item.state["exp_avg_sq"].fill_(value(where[name]) + 0.5)
    found: dict[str, Any] = {"held": [], "states": [job.gather()], "layouts": []}
    for layout in STOPS[1:]:
        job.switch(layout)
        found["layouts"].append(layout.describe())
        found["held"].append(_held(job))
        found["states"].append(job.gather())
    return found


def _held(job: Any) -> dict[str, Any]:
    import torch

    from tests.cases.experts import places, value

    where, owned = places(job), job.owned()
    wrong, values = [], []
    for name, parameter in job.parameters().items():
        states = owned[name].state if name in owned else {}
        expected = value(where[name])
        cast = float(torch.tensor(expected, dtype=parameter.dtype))
        for kind, tensor, filled in (
            ("param", parameter.detach(), cast),
            ("main", owned[name].main.detach() if name in owned else None, expected),
            ("exp_avg", states.get("exp_avg"), expected + 0.25),
            ("exp_avg_sq", states.get("exp_avg_sq"), expected + 0.5),
        ):
            if tensor is not None and set(tensor.flatten().tolist()) != {filled}:
                wrong.append((name, kind))
        if name.endswith("linear_fc1.weight") and where[name].expert is not None:
            values.append((where[name].layer, float(parameter.detach().flatten()[0])))
    kinds = {("shared", place.layer) for place in where.values() if place.shared}
    routers = {("router", where[name].layer) for name in where if ".router." in name}
    return {"wrong": wrong, "experts": values, "everywhere": kinds | routers}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c11_experts_keep_their_numbers(ranks: RankPool, dtype: str) -> None:
    found = ranks.run(4, _switch, dtype)
    for stop, name in enumerate(found[0]["layouts"]):
        layout = STOPS[stop + 1]
        for rank, record in enumerate(found):
            held = record["held"][stop]
            stage = layout.coordinate(rank)["pp"]
            layers = range(stage * 4 // layout.pp, (stage + 1) * 4 // layout.pp)
            assert held["wrong"] == [], (name, rank)
            experts = [(layer, 100.0 * layer + 10 * e) for layer in layers for e in EXPERTS[name][rank]]
            assert held["experts"] == experts, (name, rank)
            assert held["everywhere"] == {(kind, layer) for kind in ("shared", "router") for layer in layers}
    first, *others = found[0]["states"]
    for state in others:
        assert first.differences(state) == []
    # Experts are held once per expert-parallel rank and data-parallel replica of it, moments once.
    ep4 = others[0]
    keys = [key for key, state in ep4.copies if state == "param" and ".experts.experts." in key]
    assert len(keys) == 2
    assert {ep4.copies[key, "param"] for key in keys} == {1}
    assert {ep4.copies[key, "exp_avg"] for key in keys} == {1}
    shared = [key for key, state in ep4.copies if state == "param" and "shared_experts" in key]
    assert {ep4.copies[key, "param"] for key in shared} == {4}
    assert np.unique(ep4.bits[shared[0], "main"].view(np.float32)).tolist() == [0.0, 1000.0, 2000.0, 3000.0]
