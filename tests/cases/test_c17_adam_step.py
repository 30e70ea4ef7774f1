"""C17: the step count and the moments of Adam come along, or the next update has the wrong size."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

LR = 1e-3
ROWS, COLUMNS = 12, 30  # 360 elements: every rank of dp2 and dp3 owns a part


def _count_in_groups() -> None:
    """Let Megatron build an Adam that counts steps per parameter group, as Transformer Engine's does."""
    import torch

    class FusedAdam(torch.optim.Optimizer):
        """The counting of the real one, and its update; its name and module are what the product knows it by."""

        __module__ = "transformer_engine.stand_in"

        def __init__(self, params: Any, *, capturable: bool, **settings: Any) -> None:
            del capturable
            super().__init__(params, settings)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            del closure
            for group in self.param_groups:
                step = group["step"] = group.get("step", 0) + 1
                beta1, beta2 = group["betas"]
                for shard in group["params"]:
                    state = self.state[shard]
                    for name in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(name, torch.zeros_like(shard))
                    state["exp_avg"].lerp_(shard.grad, 1 - beta1)
                    state["exp_avg_sq"].lerp_(shard.grad**2, 1 - beta2)
                    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
                    shard.sub_(group["lr"] * state["exp_avg"] / (1 - beta1**step) / root)

    torch.optim.AdamW = FusedAdam  # Megatron looks it up when it builds the optimizer


def _steps(job: Any) -> list[Any]:
    """Return the step counts of what this rank owns, in the optimizer's own type."""
    inner = job.optimizer.chained_optimizers[0].optimizer
    if type(inner).__name__ == "FusedAdam":
        return [group["step"] for group in inner.param_groups if group["params"]]
    return [item.state["step"] for item in job.owned().values()]


def _restart(job: Any) -> None:
    for group in job.optimizer.chained_optimizers[0].optimizer.param_groups:
        if "step" in group:
            group["step"] = 0
    for item in job.owned().values():
        if "step" in item.state:
            item.state["step"].zero_()


def _job(context: RankContext, beta2: float, *, steps: int = 5, **options: Any) -> Any:
    import torch

    from megatron_dynatrain.layout import ParallelLayout
    from megatron_dynatrain.switch import SwitchOptions
    from tests.cases.job import CaseJob
    from tests.cases.models import BARE_SHAPE, bare

    job = CaseJob(
        context,
        ParallelLayout(dp=context.world),
        bare(weight=((ROWS, COLUMNS), 0)),
        shape=BARE_SHAPE,
        optimizer={"lr": LR, "adam_beta1": 0.9, "adam_beta2": beta2, "adam_eps": 0.0},
        options=SwitchOptions(timeout=30, **options),
    )
    with torch.no_grad():
        job.parameters()["weight"].fill_(0.5)
    for _ in range(steps):
        job.step(1.0)
    return job


def _sixth_update(context: RankContext, place: str, beta2: float, fault: str) -> dict[str, Any]:
    """Five steps at dp, the switch to tp, the sixth step; returns what a rank saw."""
    import torch

    from megatron_dynatrain.layout import ParallelLayout

    if place == "group":
        _count_in_groups()
    job = _job(context, beta2)
    before = [(type(step), getattr(step, "dtype", None)) for step in _steps(job)]
    job.switch(ParallelLayout(tp=context.world, dp=1))
    owned = job.owned()["weight"]
    (step,) = _steps(job)
    after = (type(step), getattr(step, "dtype", None))
    found = {"step": float(step), "kept": all(kind == after for kind in before), "states": sorted(owned.state)}
    if fault == "step restarts":
        _restart(job)
    elif fault == "moments are zeros":
        owned.state["exp_avg"].zero_()
        owned.state["exp_avg_sq"].zero_()
    weight = job.parameters()["weight"].detach().to(torch.float64)
    job.step(1.0)
    updates = (weight - job.parameters()["weight"].detach().to(torch.float64)) / LR
    found["updates"] = updates.flatten().tolist()
    return found


@pytest.mark.parametrize(
    ("place", "world", "beta2", "fault", "ratio"),
    [
        ("state", 3, 0.95, "none", 1.000),
        ("state", 3, 0.999, "none", 1.000),
        ("state", 2, 0.999, "none", 1.000),
        ("group", 3, 0.95, "none", 1.000),
        ("group", 2, 0.999, "none", 1.000),
        # What a fault would look like, so that the ratio above is known to tell them apart.
        ("state", 2, 0.95, "step restarts", 2.036),
        ("state", 2, 0.999, "step restarts", 1.915),
        ("group", 2, 0.999, "step restarts", 1.915),
        ("state", 2, 0.95, "moments are zeros", 0.491),
        ("state", 2, 0.999, "moments are zeros", 0.522),
    ],
)
def test_c17_the_sixth_update_is_one_learning_rate(
    ranks: RankPool, place: str, world: int, beta2: float, fault: str, ratio: float
) -> None:
    found = ranks.run(world, _sixth_update, place, beta2, fault)
    assert [record["step"] for record in found] == [5.0] * world
    assert all(("step" in record["states"]) == (place == "state") for record in found)
    assert all(record["kept"] for record in found)
    updates = [update for record in found for update in record["updates"]]
    assert len(updates) == ROWS * COLUMNS
    assert updates == pytest.approx([ratio] * len(updates), abs=5e-4)


def _switch_without(context: RankContext, place: str, state: str, everywhere: bool) -> tuple[str, str, str, bool]:
    from megatron_dynatrain.errors import SwitchRefused
    from megatron_dynatrain.layout import ParallelLayout

    if place == "group":
        _count_in_groups()
    job = _job(context, 0.999)
    if everywhere or context.rank == 1:
        groups = job.optimizer.chained_optimizers[0].optimizer.param_groups
        for holder in groups if (place, state) == ("group", "step") else [job.owned()["weight"].state]:
            holder.pop(state, None)
    left = {name: value.clone() for name, value in job.owned()["weight"].state.items()}
    with pytest.raises(SwitchRefused) as refused:
        job.switch(ParallelLayout(tp=context.world, dp=1))
    now = job.owned()["weight"].state
    untouched = left.keys() == now.keys() and all(bool((now[name] == value).all()) for name, value in left.items())
    cause = refused.value.__cause__
    return str(refused.value), type(cause).__name__, str(getattr(cause, "subject", None)), untouched


@pytest.mark.parametrize("place", ["state", "group"])
@pytest.mark.parametrize(
    ("state", "everywhere"), [("exp_avg", False), ("exp_avg_sq", True), ("step", False), ("step", True)]
)
def test_c17_a_missing_state_is_an_error_that_names_it(
    ranks: RankPool, place: str, state: str, everywhere: bool
) -> None:
    found = ranks.run(2, _switch_without, place, state, everywhere)
    texts = {record[0] for record in found}
    assert len(texts) == 1, texts
    for text, cause, subject, untouched in found:
        assert (cause, subject) == ("StateError", f"weight: {state}")
        assert untouched
        assert everywhere or "[rank 1, phase prepare]" in text


def _sixth_update_on_another_world(context: RankContext, place: str, beta2: float) -> dict[str, Any]:
    """Five steps of two ranks while the third is parked, then all three: the case as it stands, dp2 -> dp3."""
    import torch

    from megatron_dynatrain.layout import ParallelLayout

    if place == "group":
        _count_in_groups()
    job = _job(context, beta2, steps=0)
    two, three = ParallelLayout.for_world([0, 1]), ParallelLayout.for_world(3)
    job.switch(two)
    if job.switcher.parked:
        job.switcher.join_next(60)
    else:
        for _ in range(5):
            job.step(1.0)
        job.switch(three)
    (step,) = map(float, _steps(job))
    weight = job.parameters()["weight"].detach().to(torch.float64)
    job.step(1.0)
    updates = (weight - job.parameters()["weight"].detach().to(torch.float64)) / LR
    return {"step": step, "updates": updates.flatten().tolist()}


@pytest.mark.parametrize("place", ["state", "group"])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_c17_the_sixth_update_on_a_world_that_grew(ranks: RankPool, place: str, beta2: float) -> None:
    found = ranks.run(3, _sixth_update_on_another_world, place, beta2)
    assert [record["step"] for record in found] == [5.0] * 3
    updates = [update for record in found for update in record["updates"]]
    assert updates == pytest.approx([1.000] * len(updates), abs=5e-4)
