"""C20: the schedules of learning rate and weight decay and the loss scale go on as if there had been no switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks.dynamic import layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

# lr linear 1e-3 -> 0 over 240 samples, weight decay linear 0 -> 0.1 over 200; 12 samples a step.
_FLAGS = """
--train-samples 200 --lr-decay-samples 240 --lr 1e-3 --min-lr 0 --lr-decay-style linear
--start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear
--fp16 --initial-loss-scale 1024 --loss-scale-window 1000 --exit-interval 11
"""
_DROPPED = (
    "--lr",
    "--min-lr",
    "--lr-decay-style",
    "--lr-warmup-iters",
    "--lr-decay-iters",
    "--weight-decay",
    "--train-iters",
)


def _argv(**layout: int) -> list[str]:
    words = gpt_args(layers=1, hidden=16, seq=8, global_batch=12, **layout)
    kept = []
    skip = False
    for word in words:
        if not skip and word not in _DROPPED:
            kept.append(word)
        skip = word in _DROPPED
    return [*kept, *_FLAGS.split()]


def spies(run: PretrainRun) -> None:
    """Count what must not be called during the switch, and record what the scheduler and the scaler hold around it."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from megatron_dynatrain.training.job import DynamicJob

    calls = run.record.extra["calls"] = {"in the switch": [], "outside": set()}
    state: dict[str, Any] = {"where": "outside"}

    def spy(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            label = f"{kind.__name__}.{name}"
            if state["where"] == "outside":
                calls["outside"].add(label)
            else:
                calls["in the switch"].append(label)
            return method(self, *args, **kwargs)

        setattr(kind, name, called)

    for kind, name in (
        (DistributedOptimizer, "step"),
        (DistributedOptimizer, "step_with_ready_grads"),
        (ChainedOptimizer, "step"),
        (torch.optim.AdamW, "step"),
        (DynamicGradScaler, "update"),
        (OptimizerParamScheduler, "step"),
    ):
        spy(kind, name)
    change = DynamicJob.change_layout

    def change_layout(job: Any, *args: Any, **kwargs: Any) -> Any:
        for inner in job.roles.optimizer.chained_optimizers:
            inner.grad_scaler._growth_tracker = 3
        run.record.extra["before"] = _numbers(job.roles.optimizer, job.roles.scheduler)
        state["where"] = "in the switch"
        try:
            return change(job, *args, **kwargs)
        finally:
            state["where"] = "outside"
            if job.roles.optimizer is not None:  # a rank that has left has none
                run.record.extra["right after"] = _numbers(job.roles.optimizer, job.roles.scheduler)

    DynamicJob.change_layout = change_layout  # type: ignore[method-assign]
    run.record.extra["steps"] = []
    run.before_step.append(lambda _, *both: run.record.extra["steps"].append(_numbers(*both)))


def _numbers(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    groups = [group for inner in optimizer.chained_optimizers for group in inner.optimizer.param_groups]
    scalers = [inner.grad_scaler for inner in optimizer.chained_optimizers]
    return {
        "num_steps": scheduler.num_steps,
        "lr": sorted({group["lr"] for group in groups}),
        "weight decay": sorted({group["weight_decay"] for group in groups if group["wd_mult"]}),
        "scale": [float(scaler.scale) for scaler in scalers],
        "growth tracker": [scaler._growth_tracker for scaler in scalers],
    }


def test_c20_schedules_and_loss_scale_go_on(ranks: RankPool) -> None:
    run = run_switched(ranks, 4, _argv(), {10: layout_keys(tp=2)}, hooks=(spies,))
    assert [(r.iteration, r.source, r.target, r.outcome) for r in run.switches] == [(10, "dp4", "tp2 dp2", "committed")]
    for record in run.ranks:
        extra = record.extra
        expected = {"num_steps": 120, "scale": [1024.0], "growth tracker": [3]}
        expected |= {"lr": [pytest.approx(5.0e-4)], "weight decay": [pytest.approx(0.06)]}
        assert extra["before"] == expected
        assert extra["right after"] == expected  # not 240, not 132
        assert len(extra["steps"]) == 11
        assert extra["steps"][10] == expected  # what the first step under the new layout uses
        assert extra["calls"]["in the switch"] == []
        assert extra["calls"]["outside"] >= {
            "ChainedOptimizer.step",
            "DistributedOptimizer.step_with_ready_grads",
            "AdamW.step",
            "DynamicGradScaler.update",
            "OptimizerParamScheduler.step",
        }
        assert record.steps[10].lr == pytest.approx(5.0e-4)
        assert record.steps[10].adam_steps == (11,)
        assert record.steps[10].consumed_samples == 120


def test_c20_on_a_world_that_grows(ranks: RankPool) -> None:
    """The case as it stands, dp2 -> dp3: the third rank is outside until the tenth iteration is done."""
    switches = {1: layout_keys(ranks=[0, 1]), 10: layout_keys(ranks=[0, 1, 2])}
    run = run_switched(ranks, 3, _argv(), switches, hooks=(spies,))
    assert [(r.source, r.target, r.outcome) for r in run.switches] == [
        ("dp3", "dp2", "committed"),
        ("dp2", "dp3", "committed"),
    ]
    for record in run.ranks:
        expected = {"num_steps": 120, "scale": [1024.0], "growth tracker": [3]}
        expected |= {"lr": [pytest.approx(5.0e-4)], "weight decay": [pytest.approx(0.06)]}
        assert record.extra["steps"][-1] == expected
        assert record.steps[-1].lr == pytest.approx(5.0e-4)
        assert (record.steps[-1].adam_steps, record.steps[-1].consumed_samples) == ((11,), 120)
