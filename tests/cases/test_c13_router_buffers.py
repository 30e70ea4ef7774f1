"""C13: the router's bias is an fp32 buffer in a 16-bit model; it is moved in its own bits, counters start at zero."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

BIAS = [1.0, 1 + 2**-10, 1 - 2**-10, 1 + 2**-9]
COUNTERS = [5.0, 0.0, 7.0, 2.0]
SPLIT, SPREAD = ParallelLayout(pp=2, dp=2), ParallelLayout(ep=4, dp=4)


def _switch(context: RankContext, dtype: str) -> list[dict[str, Any]]:
    import torch

    from tests.cases.job import CaseJob
    from tests.cases.models import EXPERT_SHAPE, moe

    shape = {
        **EXPERT_SHAPE,
        "moe_router_topk": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    }
    job = CaseJob(context, SPLIT, moe(), shape=shape, dtype=getattr(torch, dtype))
    job.step(0.0)
    for router in _routers(job):
        router.expert_bias.copy_(torch.tensor(BIAS))
        router.local_tokens_per_expert.copy_(torch.tensor(COUNTERS))
    found = [_look(job)]
    for layout in (SPREAD, SPLIT):
        job.switch(layout)
        found.append(_look(job))
    return found


def _routers(job: Any) -> list[Any]:
    return [module for module in job.chunks[0].modules() if hasattr(module, "expert_bias")]


def _look(job: Any) -> dict[str, Any]:
    """What each router of this rank holds, and which expert it chooses where all logits are equal."""
    import torch

    routers = _routers(job)
    chosen = set()
    for router in routers:
        with torch.no_grad():
            _, routing_map = router.routing(torch.zeros(3, 1, 4))
        chosen |= {tuple(row.nonzero().flatten().tolist()) for row in routing_map}
    return {
        "layers": len(routers),
        "bias": {tuple(router.expert_bias.tolist()) for router in routers},
        "dtypes": {str(router.expert_bias.dtype) for router in routers},
        "counters": {tuple(router.local_tokens_per_expert.tolist()) for router in routers},
        "chosen": chosen,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_c13_the_bias_keeps_its_bits_and_the_choice(ranks: RankPool, dtype: str) -> None:
    found = ranks.run(4, _switch, dtype)
    for record in found:
        assert [stop["layers"] for stop in record] == [2, 4, 2]
        for stop in record:
            assert stop["bias"] == {tuple(BIAS)}
            assert stop["dtypes"] == {"torch.float32"}
            assert stop["chosen"] == {(3,)}  # rounded to bf16 all four would be 1.0
        assert [stop["counters"] for stop in record] == [{tuple(COUNTERS)}, {(0.0,) * 4}, {(0.0,) * 4}]
