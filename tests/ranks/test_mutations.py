"""Faults that train on without an error: each is caught before the commit, by name, and the job goes on unharmed."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest

from tests.ranks import mutations, wrong_targets
from tests.ranks.attempts import Act, attempted
from tests.ranks.dynamic import Layout, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool
from tests.ranks.test_aborts import check_unharmed, everywhere

_FC1, _FC2 = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc2.weight"
_QKV, _PROJ = (f"decoder.layers.1.self_attention.linear_{part}.weight" for part in ("qkv", "proj"))
_TABLE = "embedding.word_embeddings.weight"
_REPLICAS = ("differ between data-parallel replicas", "decoder.layers.1.input_layernorm.weight param")

# Fault -> what the message must name.
_FP32: dict[Act, tuple[str, ...]] = {
    mutations.dropped_move: (_FC2, "exp_avg"),
    mutations.swapped_gate_and_up: (_FC1, "param"),
    mutations.permuted_slice: (_QKV, "exp_avg_sq"),
    mutations.wrong_replica: (_TABLE, "param"),
    mutations.stale_step: ("subject: step", "rank 1"),
    mutations.stream_off_by_one: ("random stream torch", "rank 0"),
    mutations.changed_lr: ("lr of",),
    mutations.changed_weight_decay: ("weight_decay of",),
    mutations.groups_left_out: ("lr of",),
}
# Sums over all replicas don't see these, and every rank gets back what it gave.
_UNEQUAL: dict[Act, tuple[str, ...]] = {mutations.opposite_replicas: _REPLICAS, mutations.unequal_before: _REPLICAS}
_BF16: dict[Act, tuple[str, ...]] = {
    mutations.dropped_move: (_FC2, "exp_avg"),
    mutations.permuted_slice: (_QKV, "exp_avg_sq"),
    mutations.main_left_out: (_PROJ, "main_param"),
    mutations.main_rounded: (_PROJ, "main_param"),
    mutations.wrong_tied_copy: ("param",),
    mutations.stale_step: ("subject: step", "rank 1"),
}
_FP16: dict[Act, tuple[str, ...]] = {
    mutations.changed_scale: ("grad_scaler.scale", "rank 1"),
    mutations.scaler_left_out: ("grad_scaler",),
}


_ANOTHER = "declares a parameter in another way than the job's model"
_DISAGREE = "attributes and its declared sharding disagree"
_TARGETS: dict[Act, tuple[str, ...]] = {
    wrong_targets.not_gated: (_ANOTHER, wrong_targets.GATED),
    wrong_targets.other_shape: (_DISAGREE, wrong_targets.SPLIT),
    wrong_targets.not_declared: ("is not in the model's sharded_state_dict", wrong_targets.PLAIN),
    wrong_targets.split_by_attribute: (_ANOTHER, wrong_targets.PLAIN),
    wrong_targets.other_dtype: ("predicted placement and the real model disagree", wrong_targets.TABLE),
    wrong_targets.no_longer_trained: (_ANOTHER, wrong_targets.PLAIN),
    wrong_targets.one_parameter_more: ("is not in the model's sharded_state_dict", "layers.1.mlp.scale"),
}


def _check_caught(
    ranks: RankPool,
    faults: Mapping[Act, tuple[str, ...]],
    target: Layout,
    verify: str,
    rounding: float = 1e-6,
    kind: str = "SwitchAborted",
    **model: object,
) -> None:
    argv = gpt_args(layers=2, hidden=32, seq=64, global_batch=2, train_iters=len(faults) + 3, **model)
    switches = {number + 1: target for number in range(len(faults) + 1)}
    hook = functools.partial(attempted, acts=(*faults, None))
    run = run_switched(ranks, 2, argv, switches, hooks=(hook,), verify=verify, timeout=30, ahead=0)
    *failed, last = everywhere(run)
    for (fault, words), attempt in zip(faults.items(), failed, strict=True):
        assert attempt.kind == kind, f"{fault.__name__} was not caught"
        assert attempt.error is not None
        assert ("phase verify" if kind == "SwitchAborted" else "rank 1, phase prepare") in attempt.error
        missing = [word for word in words if word not in attempt.error]
        assert not missing, f"{fault.__name__}: {missing} not in: {attempt.error}"
    assert last.kind is None
    check_unharmed(run, ranks, 2, argv, len(faults), rounding=rounding)


@pytest.mark.parametrize("verify", ["digest", "full"])
def test_faults_of_an_fp32_job_are_caught(ranks: RankPool, verify: str) -> None:
    faults = _FP32 | _UNEQUAL if verify == "digest" else _FP32
    _check_caught(ranks, faults, layout_keys(), verify, tp=2, swiglu=True, tied=False)


@pytest.mark.parametrize("verify", ["digest", "full"])
def test_faults_of_a_bf16_job_are_caught(ranks: RankPool, verify: str) -> None:
    _check_caught(ranks, _BF16, layout_keys(pp=2), verify, rounding=1e-4, bf16=True)


def test_faults_of_the_loss_scale_are_caught(ranks: RankPool) -> None:
    _check_caught(ranks, _FP16, layout_keys(pp=2), "digest", rounding=1e-4, extra="--fp16 --initial-loss-scale 1024")


def test_a_target_that_is_another_model_is_refused(ranks: RankPool) -> None:
    _check_caught(ranks, _TARGETS, layout_keys(), "digest", kind="SwitchRefused", tp=2, swiglu=True, tied=False)
