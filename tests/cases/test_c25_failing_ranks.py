"""C25: a rank that raises, is late or dies stops the switch on every rank; the job goes on, without the dead one."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

WORLD = 8
BEFORE, AFTER = ParallelLayout(tp=2, dp=4), ParallelLayout(tp=4, dp=2)
LIMIT = 5.0
SLEEP = 60.0


def _job(context: RankContext) -> Any:
    from megatron_dynatrain.switch import SwitchOptions
    from tests.cases.job import CaseJob
    from tests.cases.models import BARE_SHAPE, bare

    job = CaseJob(
        context,
        BEFORE,
        bare(weight=((8, 96), 0), other=((16, 64), 1)),
        shape={**BARE_SHAPE, "num_attention_heads": 8},
        options=SwitchOptions(timeout=LIMIT),
    )
    job.step(1.0)
    return job


def _attempt(context: RankContext, job: Any) -> dict[str, Any]:
    """Try the switch that fails, look at what is left and step on; then take the fault away and switch after all."""
    from megatron_dynatrain.errors import SwitchFailure

    world, before, mine = job.switcher.world, job.gather(), _bits(job)
    began = time.monotonic()
    with pytest.raises(SwitchFailure) as failure:
        job.switch(AFTER)
    seconds = time.monotonic() - began
    cause: Any = failure.value.__cause__
    found = {
        "seconds": seconds,
        "error": (type(failure.value).__name__, type(cause).__name__, cause.phase, cause.rank, str(cause)),
        "outcome": failure.value.report.outcome,
        "same world": job.switcher.world is world and job.layout == BEFORE and _bits(job) == mine,
    }
    job.on_phase = lambda _: None
    left = job.gather()
    found["steps"] = [job.step(1.0)[0]]
    stepped = job.gather()
    report = job.switch(AFTER)
    now = job.gather()
    if before is not None:
        found["differences"] = [before.differences(left), stepped.differences(now)]
    found["retry"] = (report.outcome, job.layout.describe())
    found["steps"].append(job.step(1.0)[0])
    return found


def _bits(job: Any) -> dict[str, bytes]:
    """Everything of this rank, as bytes."""
    tensors: dict[str, Any] = dict(job.parameters())
    for name, item in job.owned().items():
        tensors |= {f"{name} {state}": value for state, value in item.state.items()}
    return {name: tensor.detach().clone().numpy().tobytes() for name, tensor in tensors.items()}


def _raise_while_planning(context: RankContext) -> dict[str, Any]:
    job = _job(context)

    def bad(phase: str) -> None:
        if phase == "prepare/plan" and context.rank == 3:
            raise ValueError("bad plan")

    job.on_phase = bad
    return _attempt(context, job)


def _sleep(context: RankContext, where: str) -> dict[str, Any]:
    """Rank 6 sleeps until every other rank has its error: at most the 60 s of the case."""
    job = _job(context)
    store = context.store("awake")

    def slow(phase: str) -> None:
        if phase == where and context.rank == 6:
            end = time.monotonic() + SLEEP
            while store.add("failed", 0) < WORLD - 1 and time.monotonic() < end:
                time.sleep(0.05)

    job.on_phase = slow
    switch = job.switcher.switch

    def counted(layout: ParallelLayout) -> Any:
        try:
            return switch(layout)
        finally:
            store.add("failed", 1)

    job.switcher.switch = counted
    return _attempt(context, job)


def _check(found: list[dict[str, Any]]) -> None:
    assert len({record["error"] for record in found}) == 1
    for record in found:
        assert record["same world"]
        assert record["retry"] == ("committed", "tp4 dp2")
        assert record["steps"] == [True, True]
    assert found[0]["differences"] == [[], []]


def test_c25b_an_error_while_planning_reaches_every_rank(ranks: RankPool) -> None:
    found = ranks.run(WORLD, _raise_while_planning)
    _check(found)
    kind, _, phase, rank, text = found[0]["error"]
    assert (kind, phase, rank) == ("SwitchRefused", "prepare", 3)
    assert "ValueError: bad plan" in text
    assert {record["outcome"] for record in found} == {"refused"}


@pytest.mark.parametrize(
    ("where", "kind", "outcome"),
    [("prepare/plan", "SwitchRefused", "refused"), ("transfer/bytes", "SwitchAborted", "aborted")],
)
def test_c25c_a_late_rank_is_named_within_the_limit(ranks: RankPool, where: str, kind: str, outcome: str) -> None:
    found = ranks.run(WORLD, _sleep, where)
    _check(found)
    error, _, phase, _, text = found[0]["error"]
    assert (error, phase) == (kind, where.split("/")[0])
    assert re.search(r"missing ranks \[6\]|(from|to) rank 6\b", text), text
    assert {record["outcome"] for record in found} == {outcome}
    assert all(record["seconds"] < LIMIT + 10 for record in found), [record["seconds"] for record in found]


# --- a rank that dies -------------------------------------------------------------------------------------------------

VICTIM = 5
BETWEEN = ParallelLayout.for_world([0, 1, 2, 3], tp=2)  # what is left to train on


def _kill(context: RankContext, instances: int) -> dict[str, Any]:
    """Rank 5 is killed after its first window; the others look at what is left and go on without it."""
    import dataclasses
    import os
    import signal

    from megatron_dynatrain.errors import SwitchFailure
    from megatron_dynatrain.routing.windows import WindowBudget
    from megatron_dynatrain.switch import SwitchOptions
    from tests.cases.job import CaseJob
    from tests.cases.models import BARE_SHAPE, bare

    job = CaseJob(
        context,
        BEFORE.replace(instances=instances),
        bare(weight=((8, 96), 0), other=((16, 64), 1)),
        shape={**BARE_SHAPE, "num_attention_heads": 8},
        options=SwitchOptions(timeout=LIMIT, budget=WindowBudget(bytes=4096)),
    )
    job.step(1.0)
    job.step(-0.5)
    whole = job.gather()

    def die(phase: str) -> None:
        if phase == "transfer/window 0" and context.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)

    job.on_phase = die
    mine, began = _bits(job), time.monotonic()
    with pytest.raises(SwitchFailure) as failure:
        job.switch(AFTER)
    cause: Any = failure.value.__cause__
    found: dict[str, Any] = {
        "seconds": time.monotonic() - began,
        "error": (failure.value.report.outcome, cause.phase, str(cause)),
        "same": _bits(job) == mine and job.layout == BEFORE.replace(instances=instances),
    }
    try:
        report = job.switch(BETWEEN, lost=[VICTIM])
    except SwitchFailure as refused:
        found["without it"] = (refused.report.outcome, str(refused.__cause__), _bits(job) == mine)
        return found
    found["without it"] = (report.outcome, job.layout.describe(), job.switcher.parked)
    if not job.switcher.parked:
        now = job.gather()
        if whole is not None:
            found["differences"] = whole.differences(now)
        found["step"] = job.step(1.0)[0]
        with pytest.raises(SwitchFailure, match="ranks that the job doesn't have"):
            job.switch(dataclasses.replace(BEFORE))
    return found


def _survivors(ranks: RankPool, instances: int) -> list[dict[str, Any]]:
    found = ranks.run(WORLD, _kill, instances, may_die=[VICTIM], timeout=90)
    assert found[VICTIM] is None
    left = [record for record in found if record is not None]
    assert len(left) == WORLD - 1
    for record in left:
        outcome, phase, text = record["error"]
        assert (outcome, phase) == ("aborted", "transfer")
        assert re.search(r"missing ranks \[5\]|ranks \[5\] have not come|(from|to) rank 5\b", text), text
        assert record["same"]
        assert record["seconds"] < LIMIT + 10
    return left


def test_c25a_c25d_a_killed_rank_whose_state_has_copies_is_left_behind(ranks: RankPool) -> None:
    left = _survivors(ranks, instances=2)
    assert [record["without it"] for record in left] == [
        ("committed", "tp2 dp2", rank >= 4) for rank in (0, 1, 2, 3, 4, 6, 7)
    ]
    assert left[0]["differences"] == []
    assert [record["step"] for record in left[:4]] == [True] * 4


def test_c25a_c25d_a_killed_rank_with_the_only_copy_of_a_shard_is_named(ranks: RankPool) -> None:
    left = _survivors(ranks, instances=1)
    texts = {record["without it"] for record in left}
    assert len(texts) == 1, texts
    outcome, text, same = texts.pop()
    assert (outcome, same) == ("refused", True)
    assert re.search(r"no live copy.*ranks \[5\].*subject: (weight|other) \((exp_avg|exp_avg_sq)\)", text), text
    assert "last checkpoint" in text
