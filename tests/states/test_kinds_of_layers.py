"""Kinds of layers and routers beyond the plain ones: each trains on through two switches as without any."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.states.local_mla import attend_with_other_widths
from tests.states.switched import FP32, assert_trains_on, small_args

MODERN: dict[str, Any] = {"swiglu": True}
EXPERTS: dict[str, Any] = {"swiglu": True, "experts": 4}
MLA = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
)
BIAS = (
    "--moe-shared-expert-intermediate-size 32 --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
    " --moe-router-bias-update-rate 1e-2"
)


@pytest.mark.parametrize(
    ("model", "extra", "source", "second"),
    [
        # Learned positions, LayerNorm and biases are what the oracle's models have; rope and RMSNorm are MODERN.
        pytest.param(MODERN, "--qk-layernorm --add-qkv-bias", {"tp": 2}, {}, id="qk-norm"),
        pytest.param({**MODERN, "tied": False}, f"{MLA} --qk-layernorm", {"tp": 2}, {}, id="mla"),
        pytest.param(EXPERTS, BIAS, {}, {"ep": 2}, id="expert-bias-and-shared-experts"),
        pytest.param(
            {**EXPERTS, "sp": True}, "--moe-layer-freq [1,0]", {"tp": 2}, {"ep": 2}, id="a-stage-without-experts"
        ),
    ],
)
def test_layers_of_other_kinds(
    ranks: RankPool, model: dict[str, Any], extra: str, source: dict[str, Any], second: dict[str, Any]
) -> None:
    argv = small_args(extra, **source, **model)
    hooks = (attend_with_other_widths,) if "multi-latent" in extra else ()
    assert_trains_on(ranks, argv, {"pp": 2}, second, within=FP32, hooks=hooks)


def test_quantile_balancing(ranks: RankPool) -> None:
    """Its bias is a parameter-like buffer, `qb_beta`; its accumulators are empty between two steps."""
    argv = small_args("--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0", **EXPERTS)
    assert_trains_on(ranks, argv, {"pp": 2}, {"ep": 2}, within=FP32)


def test_decoupled_learning_rate(ranks: RankPool) -> None:
    """The embeddings' learning rate is a third parameter group; at pp 3 the rank in the middle has nothing in it."""
    argv = small_args("--decoupled-lr 5e-4 --decoupled-min-lr 1e-5", layers=3, tied=False, pp=3, global_batch=6)
    assert_trains_on(ranks, argv, {}, {"pp": 3}, within=FP32, world=3)
