"""Parameters without optimizer state, and parameters that a user adds to Megatron's modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ranks.pool import RankPool
from tests.states import customize
from tests.states.switched import BF16, FP16, FP32, assert_trains_on, small_args

FP16_FLAGS = "--fp16 --initial-loss-scale 1024 --loss-scale-window 4"


@pytest.mark.parametrize(("dtype", "within"), [({}, FP32), ({"bf16": True, "tied": False}, BF16)], ids=["fp32", "bf16"])
def test_frozen_parameters_are_moved_and_stay_frozen(ranks: RankPool, dtype: dict[str, Any], within: float) -> None:
    argv = small_args(tp=2, **dtype)
    run = assert_trains_on(ranks, argv, {"pp": 2}, {}, within=within, hooks=(customize.freeze_some,))
    bits = run.ranks[0].extra["after"].bits
    trained = {key for key, state in bits if state == "exp_avg"}
    frozen = {key for key, state in bits if state == "param"} - trained
    assert "embedding.word_embeddings.weight" in frozen
    assert "decoder.final_layernorm.weight" in frozen
    assert len(trained) > 5


def test_a_stage_that_is_frozen_as_a_whole_has_no_states_and_gets_them_again(ranks: RankPool) -> None:
    """At pp 2 rank 1 has no DDP buffer and no moments, only groups without parameters; at tp 2 it has its share."""
    argv = small_args(FP16_FLAGS, tied=False)
    hooks = (customize.freeze_the_end,)
    run = assert_trains_on(ranks, argv, {"pp": 2}, {"tp": 2}, within=FP16, hooks=hooks)
    assert [step.adam_steps for step in run.ranks[1].steps] == [(1,), (2,), (), (), (5,), (6,)]


def test_added_parameters_that_the_module_declares_are_moved(ranks: RankPool) -> None:
    argv = small_args(tp=2)
    run = assert_trains_on(ranks, argv, {"pp": 2}, {}, within=FP32, hooks=(customize.add_low_rank,))
    bits = run.ranks[0].extra["after"].bits
    for name in ("up", "down"):
        key = f"decoder.layers.self_attention.linear_qkv.{name}"
        assert {state for other, state in bits if other == key} == {"param", "main", "exp_avg", "exp_avg_sq"}
        assert np.count_nonzero(bits[key, "exp_avg_sq"]) > 0.9 * bits[key, "exp_avg_sq"].size
    assert {state for key, state in bits if key.endswith("linear_qkv.base.weight")} == {"param"}
