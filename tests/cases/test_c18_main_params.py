"""C18: main parameters come along bit for bit, and the 16-bit weights are their cast on every data-parallel rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

FIRST, SECOND, WRONG = 1 + 2**-12, 5.0, 0.9
ONE_AND_FIVE = {"bfloat16": (0x3F80, 0x40A0), "float16": (0x3C00, 0x4500)}
"""Bits of 1.0, which the first value is cast to, and of 5.0."""


def _job(context: RankContext, dtype: str) -> Any:
    """A 16-bit job at tp2 dp2 with the case's main parameters; targets start with other values in both copies."""
    import torch

    from megatron_dynatrain.layout import ParallelLayout
    from tests.cases.job import CaseJob, owned_by
    from tests.cases.models import BARE_SHAPE, bare

    job = CaseJob(
        context,
        ParallelLayout(tp=2, dp=2),
        bare(first=((16, 20), 0), second=((12, 30), 1)),
        shape=BARE_SHAPE,
        dtype=getattr(torch, dtype),
        optimizer={"initial_loss_scale": 1024},  # of fp16 alone
    )
    values = {"first": FIRST, "second": SECOND}

    def wrong(chunks: list[Any], optimizer: Any) -> None:
        for parameter in chunks[0].parameters():
            parameter.data.fill_(WRONG)
        for item in owned_by(optimizer):
            item.main.data.fill_(WRONG)

    job.on_empty = wrong
    job.step(0.0)  # makes the moments
    for name, parameter in job.parameters().items():
        parameter.data.fill_(values[name])
    for name, item in job.owned().items():
        item.main.data.fill_(values[name])
    return job


def _bits(job: Any) -> dict[str, list[int]]:
    """The distinct bit patterns of each 16-bit parameter on this rank."""
    import torch

    return {
        name: sorted(set((parameter.detach().clone().view(torch.int16).flatten().int() & 0xFFFF).tolist()))
        for name, parameter in job.parameters().items()
    }


def _switch(context: RankContext, dtype: str) -> dict[str, Any]:
    from megatron_dynatrain.layout import ParallelLayout

    job = _job(context, dtype)
    report = job.switch(ParallelLayout(dp=4))
    found = {
        "bytes": (report.moved_bytes, report.minimum_bytes),
        "right after": (job.gather(), _bits(job), _owned(job)),
    }
    job.step(0.0)
    found["after a step"] = (job.gather(), _bits(job), _owned(job))
    return found


def _owned(job: Any) -> dict[str, set[float]]:
    return {name: set(item.main.detach().flatten().tolist()) for name, item in job.owned().items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_c18_main_parameters_and_their_casts_on_all_ranks(ranks: RankPool, dtype: str) -> None:
    found = ranks.run(4, _switch, dtype)
    one, five = ONE_AND_FIVE[dtype]
    for when in ("right after", "after a step"):
        # Before any step: no rank has waited for the gather of the data-parallel group.
        assert [record[when][1] for record in found] == [{"first": [one], "second": [five]}] * 4
        owned = [record[when][2] for record in found]
        assert {name for held in owned for name in held} == {"first", "second"}
        for held in owned:
            assert held == {name: {{"first": FIRST, "second": SECOND}[name]} for name in held}
        state = found[0][when][0]
        for key, value in (("first", FIRST), ("second", SECOND)):
            assert np.array_equal(
                state.bits[key, "main"].view(np.float32), np.full_like(state.bits[key, "main"], value, np.float32)
            )
            assert state.copies[key, "param"] == 4
            assert state.copies[key, "main"] == 1
    assert found[0]["bytes"][0] == found[0]["bytes"][1] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("copy", "spoiled", "words"),
    [("param", 3, "first param and main_param"), ("main", 0, "second param and main_param")],
)
def test_c18_a_stale_copy_is_found_before_the_commit(
    ranks: RankPool, copy: str, spoiled: int, words: str, dtype: str
) -> None:
    found = ranks.run(4, _switch_with_stale, copy, spoiled, dtype)
    assert len({record["error"] for record in found}) == 1
    assert words in found[0]["error"]
    assert f"rank {spoiled}" in found[0]["error"]
    assert [record["layout"] for record in found] == ["tp2 dp2"] * 4


def _switch_with_stale(context: RankContext, copy: str, spoiled: int, dtype: str) -> dict[str, Any]:
    """One rank of the target keeps one of the two copies at its initial value."""
    from megatron_dynatrain.errors import SwitchAborted
    from megatron_dynatrain.layout import ParallelLayout
    from tests.cases.job import owned_by

    job = _job(context, dtype)

    def stale(phase: str) -> None:
        if phase != "verify/digest" or context.rank != spoiled:
            return
        chunks, optimizer = job.target
        if copy == "param":
            dict(chunks[0].module.module.named_parameters())["first"].data.fill_(WRONG)
        else:
            for item in owned_by(optimizer):
                item.main.data.fill_(WRONG)

    job.on_phase = stale
    with pytest.raises(SwitchAborted) as aborted:
        job.switch(ParallelLayout(dp=4))
    return {"error": str(aborted.value), "layout": job.layout.describe()}
