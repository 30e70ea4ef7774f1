"""C17: the step count and the moments of Adam come along, or the next update has the wrong size."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

LR = 1e-3
ROWS, COLUMNS = 12, 30  # 360 elements: every rank of dp2 and dp3 owns a part


def _job(context: RankContext, beta2: float, **options: Any) -> Any:
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
    for _ in range(5):
        job.step(1.0)
    return job


def _sixth_update(context: RankContext, beta2: float, fault: str) -> dict[str, Any]:
    """Five steps at dp, the switch to tp, the sixth step; returns what a rank saw."""
    import torch

    from megatron_dynatrain.layout import ParallelLayout

    job = _job(context, beta2)
    before = [(type(one.state["step"]), one.state["step"].dtype) for one in job.owned().values()]
    job.switch(ParallelLayout(tp=context.world, dp=1))
    owned = job.owned()["weight"]
    after = (type(owned.state["step"]), owned.state["step"].dtype)
    found = {"step": float(owned.state["step"]), "kept": all(kind == after for kind in before)}
    if fault == "step restarts":
        owned.state["step"].zero_()
    elif fault == "moments are zeros":
        owned.state["exp_avg"].zero_()
        owned.state["exp_avg_sq"].zero_()
    weight = job.parameters()["weight"].detach().to(torch.float64)
    job.step(1.0)
    updates = (weight - job.parameters()["weight"].detach().to(torch.float64)) / LR
    found["updates"] = updates.flatten().tolist()
    return found


@pytest.mark.parametrize(
    ("world", "beta2", "fault", "ratio"),
    [
        (3, 0.95, "none", 1.000),
        (3, 0.999, "none", 1.000),
        (2, 0.999, "none", 1.000),
        # What a fault would look like, so that the ratio above is known to tell them apart.
        (2, 0.95, "step restarts", 2.036),
        (2, 0.999, "step restarts", 1.915),
        (2, 0.95, "moments are zeros", 0.491),
        (2, 0.999, "moments are zeros", 0.522),
    ],
)
def test_c17_the_sixth_update_is_one_learning_rate(
    ranks: RankPool, world: int, beta2: float, fault: str, ratio: float
) -> None:
    found = ranks.run(world, _sixth_update, beta2, fault)
    assert [record["step"] for record in found] == [5.0] * world
    assert all(record["kept"] for record in found)
    updates = [update for record in found for update in record["updates"]]
    assert len(updates) == ROWS * COLUMNS
    assert updates == pytest.approx([ratio] * len(updates), abs=5e-4)


def _switch_without(context: RankContext, state: str, everywhere: bool) -> tuple[str, str, str, bool]:
    from megatron_dynatrain.errors import SwitchRefused
    from megatron_dynatrain.layout import ParallelLayout

    job = _job(context, 0.999)
    if everywhere or context.rank == 1:
        del job.owned()["weight"].state[state]
    left = {name: value.clone() for name, value in job.owned()["weight"].state.items()}
    with pytest.raises(SwitchRefused) as refused:
        job.switch(ParallelLayout(tp=context.world, dp=1))
    now = job.owned()["weight"].state
    untouched = left.keys() == now.keys() and all(bool((now[name] == value).all()) for name, value in left.items())
    cause = refused.value.__cause__
    return str(refused.value), type(cause).__name__, str(getattr(cause, "subject", None)), untouched


@pytest.mark.parametrize(
    ("state", "everywhere"), [("exp_avg", False), ("exp_avg_sq", True), ("step", False), ("step", True)]
)
def test_c17_a_missing_state_is_an_error_that_names_it(ranks: RankPool, state: str, everywhere: bool) -> None:
    found = ranks.run(2, _switch_without, state, everywhere)
    texts = {record[0] for record in found}
    assert len(texts) == 1, texts
    for text, cause, subject, untouched in found:
        assert (cause, subject) == ("StateError", f"weight: {state}")
        assert untouched
        assert everywhere or "[rank 1, phase prepare]" in text
