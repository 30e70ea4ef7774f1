"""Optimizer states that Megatron keeps on the host (`--optimizer-cpu-offload`) move with the others.

There is no GPU here, so a hook lets host and device be told apart: memory that was pinned is the host's. Which shards
are on the host depends on their order and sizes, so each switch takes states across.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool
from tests.states.switched import BF16, FP16, assert_trains_on, small_args
from tests.states.two_devices import two_devices

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

FLAGS = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.4"
OVERLAP = "--overlap-cpu-optimizer-d2h-h2d"
WITHIN = {"fp16": FP16, "bf16": BF16}


def on_two_devices(run: PretrainRun) -> None:
    """Let the run tell host and device apart, and count what is on the host."""
    two_devices()
    run.before_step.append(_count_parts(run.record.extra))


def _count_parts(extra: dict[str, Any]) -> Any:
    def count(model: Any, optimizer: Any, scheduler: Any) -> None:
        inner = optimizer.chained_optimizers[0].optimizer
        extra.setdefault("on host", []).append(len(inner.gpu_params_map_cpu_copy))
        extra.setdefault("parts", []).append(len(inner.sub_optimizers))

    return count


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])  # Megatron 0.19 can't build this optimizer for fp32 parameters
def test_states_on_the_host_move_and_train_on(ranks: RankPool, dtype: str) -> None:
    half = dtype == "bf16"
    flags = f"{FLAGS} {OVERLAP if half else '--fp16 --initial-loss-scale 64 --accumulate-allreduce-grads-in-fp32'}"
    argv = small_args(flags, bf16=half, swiglu=half, tied=not half)
    run = assert_trains_on(ranks, argv, {"tp": 2}, {"pp": 2}, within=WITHIN[dtype], hooks=(on_two_devices,))
    assert {state for _, state in run.ranks[0].extra["after"].bits} == {"param", "main", "exp_avg", "exp_avg_sq"}
    for record in run.ranks:
        on_host = record.extra["on host"]
        assert min(on_host) > 0
        assert len({*on_host}) > 1  # other shards are on the host
        assert (min(record.extra["parts"]) > 2) == half  # with overlap an optimizer each, else two


def _switch_with_copies(context: RankContext) -> dict[str, Any]:
    """Switch an optimizer whose fp32 main parameters have copies on the host; spoil a copy of the target first."""
    import torch

    from megatron_dynatrain.errors import SwitchAborted
    from megatron_dynatrain.layout import ParallelLayout
    from tests.cases.job import CaseJob
    from tests.cases.models import T_SHAPE, gpt

    two_devices()
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    job = CaseJob(context, ParallelLayout(dp=2), gpt(), shape=T_SHAPE, dtype=torch.bfloat16, optimizer=offload)
    for number in (1, 2):
        job.step(lambda name, number=number: number + len(name) % 5)
    before = job.gather()

    @torch.no_grad()
    def spoil(phase: str) -> None:
        if phase == "verify/digest" and context.rank == 1:
            next(iter(_copies(job.target[1]))).add_(2.0**-20)

    job.on_phase = spoil
    with pytest.raises(SwitchAborted) as aborted:
        job.switch(ParallelLayout(tp=2, dp=1))
    job.on_phase = lambda _: None
    harmed = job.gather()
    job.switch(ParallelLayout(tp=2, dp=1))
    after = job.gather()
    copies = [torch.equal(copy, main) for main, copy in _pairs(job.optimizer)]
    same = [before.differences(other) for other in (harmed, after)] if before is not None else None
    return {"error": str(aborted.value), "same": same, "copies": copies}


def _pairs(optimizer: Any) -> Any:
    for inner in optimizer.chained_optimizers:
        yield from inner.optimizer.gpu_params_map_cpu_copy.items()


def _copies(optimizer: Any) -> Any:
    return (copy for _, copy in _pairs(optimizer))


def test_copies_on_the_host_follow_and_are_checked(ranks: RankPool) -> None:
    for record in (found := ranks.run(2, _switch_with_copies)):
        assert "the optimizer's copy is not the main parameter" in record["error"]
        assert record["copies"]
        assert all(record["copies"])
    assert found[0]["same"] == [[], []]
