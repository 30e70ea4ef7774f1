"""Memory of a switch by replay, and case C04."""

from __future__ import annotations

import pytest

from megatron_dynatrain.errors import PlanError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.estimate import MemoryMode, peak_bytes, replay, state_bytes
from megatron_dynatrain.routing.windows import WindowBudget, plan_all
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import Home, ModelDescription, Where
from tests.pure.models import dense_model, parameter

MIB = 2**20
TP2, DP2 = ParallelLayout(tp=2, dp=1), ParallelLayout(dp=2)


def eight_parameters() -> ModelDescription:
    """8 parameters of 1 MiB in fp32, each with 3 fp32 states: 24 MiB."""
    specs = [parameter(f"p{i}", (512, 512), 0, Home(Where.LAYER, i)) for i in range(8)]
    return ModelDescription(tuple(specs), num_layers=8)


@pytest.mark.parametrize(("before", "after"), [(DP2, TP2), (TP2, DP2)], ids=["dp2-tp2", "tp2-dp2"])
@pytest.mark.parametrize("mode", list(MemoryMode))
def test_c04_memory_stays_within_both_shares_and_the_staging(
    before: ParallelLayout, after: ParallelLayout, mode: MemoryMode
) -> None:
    source, target = (Placement(eight_parameters(), layout) for layout in (before, after))
    shares = {DP2: 16 * MIB, TP2: 12 * MIB}  # dp2: whole parameters and half the moments; tp2: half of all
    for plan in plan_all(source, target, budget=WindowBudget(bytes=MIB)):
        assert state_bytes(source, plan.rank) == shares[before]
        assert state_bytes(target, plan.rank) == shares[after]
        events = replay(plan, source, target, mode)
        assert all(event.live <= 28 * MIB + MIB for event in events)
        assert events[-1].live == shares[after]
        assert plan.received_bytes > 0
        # Nobody holds more than one state of one parameter in staging, so never a gathered copy of two.
        assert 0 < plan.staging_bytes <= MIB


@pytest.mark.parametrize(("before", "after"), [(DP2, TP2), (TP2, DP2)], ids=["dp2-tp2", "tp2-dp2"])
def test_c04_a_budget_too_small_for_one_row_is_refused(before: ParallelLayout, after: ParallelLayout) -> None:
    source, target = (Placement(eight_parameters(), layout) for layout in (before, after))
    with pytest.raises(PlanError, match=r"too small to move one row.*p\d \(param\).*2047 bytes"):
        plan_all(source, target, budget=WindowBudget(bytes=2047))


def test_safe_peak_is_source_and_target_and_staging() -> None:
    model = dense_model(layers=4, dtype="bfloat16")
    source, target = (Placement(model, layout) for layout in (DP2, TP2))
    for plan in plan_all(source, target, budget=WindowBudget(bytes=4000)):
        expected = state_bytes(source, plan.rank) + state_bytes(target, plan.rank) + plan.staging_bytes
        assert peak_bytes(plan, source, target, MemoryMode.SAFE) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [({"pp": 4}, {"tp": 4}), ({}, {"pp": 4}), ({"tp": 2}, {"pp": 2}), ({"pp": 2}, {})],
)
def test_lean_peak_is_near_the_larger_share(before: dict[str, int], after: dict[str, int]) -> None:
    model = dense_model(layers=32, hidden=24, ffn=24, vocab=24)
    source, target = (Placement(model, ParallelLayout.for_world(4, **sizes)) for sizes in (before, after))
    for plan in plan_all(source, target, budget=WindowBudget(bytes=30_000)):
        shares = state_bytes(source, plan.rank), state_bytes(target, plan.rank)
        lean = peak_bytes(plan, source, target, MemoryMode.LEAN)
        assert max(shares) <= lean < sum(shares)
        assert lean - max(shares) < 0.25 * min(shares) + plan.staging_bytes


def test_a_rank_that_comes_or_goes() -> None:
    model = dense_model(layers=4)
    source = Placement(model, ParallelLayout(tp=2, dp=1, ranks=(0, 1)))
    target = Placement(model, ParallelLayout(tp=2, dp=1, ranks=(1, 2)))
    leaving, _, coming = plan_all(source, target)
    assert state_bytes(target, 0) == state_bytes(source, 2) == 0
    assert [replay(p, source, target, MemoryMode.LEAN)[0].live for p in (leaving, coming)] == [
        state_bytes(source, 0),
        0,
    ]
    assert replay(leaving, source, target, MemoryMode.LEAN)[-1].live == 0
    assert replay(coming, source, target, MemoryMode.LEAN)[-1].live == state_bytes(target, 2)
