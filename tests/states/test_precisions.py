"""Dtypes of parameters and gradients, several buckets, overlap: all go on after two switches as without any."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.states import watch
from tests.states.switched import BF16, FP16, FP32, assert_trains_on, small_args

BUCKETS = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"


@pytest.mark.parametrize(
    ("model", "extra", "within"),
    [
        pytest.param({}, f"{BUCKETS} --check-weight-hash-across-dp-replicas-interval 2", FP32, id="fp32-buckets"),
        pytest.param(
            {"bf16": True},
            f"{BUCKETS} --accumulate-allreduce-grads-in-fp32 --ddp-pad-buckets-for-high-nccl-busbw",
            BF16,
            id="bf16-fp32-gradients-padded-buckets",
        ),
        pytest.param({"bf16": True, "swiglu": True}, "--grad-reduce-in-bf16", BF16, id="bf16-gradients"),
    ],
)
def test_dtypes_and_buckets(ranks: RankPool, model: dict[str, Any], extra: str, within: float) -> None:
    assert_trains_on(ranks, small_args(extra, **model), {"tp": 2}, {}, within=within)


def test_fp16_with_a_dynamic_loss_scale(ranks: RankPool) -> None:
    """The scale doubles after every third good step, whatever happens between them."""
    argv = small_args("--fp16 --initial-loss-scale 1024 --loss-scale-window 3", tp=2)
    hooks = (watch.loss_scales,)
    run = assert_trains_on(ranks, argv, {"pp": 2}, {}, within=FP16, hooks=hooks)
    scales = [record.extra["scales"] for record in run.ranks]
    assert scales == [[(1024, 0), (1024, 1), (1024, 2), (2048, 0), (2048, 1), (2048, 2)]] * 2
