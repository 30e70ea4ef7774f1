"""C14: at ep 1 experts are in the dense optimizer, above in one of their own; states go by parameter, not by place."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

TOGETHER, APART = ParallelLayout(dp=4), ParallelLayout(ep=2, dp=4)
STEPS = 7
SETTINGS = {"lr": 2e-3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6, "weight_decay": 0.1}


def _train(context: RankContext, dtype: str, stops: list[ParallelLayout]) -> dict[str, Any]:
    """Seven steps with a gradient of each parameter's own, the switches, and the eighth step."""
    import torch

    from tests.cases.experts import places
    from tests.cases.job import CaseJob
    from tests.cases.models import EXPERT_SHAPE, moe

    job = CaseJob(context, TOGETHER, moe(), shape=EXPERT_SHAPE, optimizer=SETTINGS, dtype=getattr(torch, dtype))

    def step(number: int) -> None:
        where = places(job)
        job.step(lambda name: 0.01 * number * (1 + len(name) % 7 + 10 * (where[name].expert or 0)))

    for number in range(1, STEPS + 1):
        step(number)
    found: dict[str, Any] = {"states": [job.gather()], "optimizers": [_optimizers(job)]}
    for layout in stops:
        job.switch(layout)
        found["states"].append(job.gather())
        found["optimizers"].append(_optimizers(job))
    step(STEPS + 1)
    found["last"] = job.gather()
    return found


def _optimizers(job: Any) -> list[dict[str, Any]]:
    """For each inner optimizer: its distinct step counts, and the settings of the group of each parameter."""
    names = {parameter: name for name, parameter in job.parameters().items()}
    found = []
    for inner in job.optimizer.chained_optimizers:
        groups = inner.optimizer.param_groups
        settings = {
            names[parameter]: {key: groups[group][key] for key in ("lr", "betas", "eps", "weight_decay")}
            for parameter, (group, _) in inner.model_param_group_index_map.items()
        }
        steps = sorted({float(state["step"]) for state in inner.optimizer.state.values()})
        found.append({"steps": steps, "settings": settings})
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c14_two_inner_optimizers_and_back(ranks: RankPool, dtype: str) -> None:
    found = ranks.run(4, _train, dtype, [APART, TOGETHER])
    for record in found:
        assert [len(optimizers) for optimizers in record["optimizers"]] == [1, 2, 1]
        for optimizers in record["optimizers"]:
            assert all(inner["steps"] in ([], [float(STEPS)]) for inner in optimizers)
            assert any(inner["steps"] for inner in optimizers)
            for inner in optimizers:
                assert inner["settings"]
                for name, settings in inner["settings"].items():
                    assert settings == {"lr": 2e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}, name
        experts = record["optimizers"][1][1]["settings"]
        assert all(".local_experts." in name for name in experts)
    first, *others = found[0]["states"]
    for state in others:
        assert first.differences(state) == []
        assert state.steps == (float(STEPS),)
    (alone, *_) = ranks.run(4, _train, dtype, [])
    assert alone["last"].differences(found[0]["last"]) == []  # the eighth update, bit for bit
    assert alone["last"].steps == (float(STEPS + 1),)
