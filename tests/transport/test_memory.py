"""Plans executed in one process: every case, random layouts, and faults."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynatrain.errors import PlacementError, StateError, TransferError
from megatron_dynatrain.routing.windows import RankPlan, WindowBudget, plan_all
from megatron_dynatrain.transport import messages
from megatron_dynatrain.transport.execute import TransferReport
from megatron_dynatrain.transport.memory import Delivery, Fault, run_all
from tests.routing.layouts import placements
from tests.routing.test_windows import without_first_send
from tests.transport.cases import CASES, AnyPlacement
from tests.transport.witness import differences, empty, filled

Memories = dict[int, dict[str, torch.Tensor]]


def switch(
    pair: tuple[AnyPlacement, AnyPlacement],
    plans: tuple[RankPlan, ...],
    *,
    sources: Memories | None = None,
    fault: Fault | None = None,
    in_place: bool = True,
    check_writes: bool = True,
) -> tuple[Memories, tuple[TransferReport, ...]]:
    source, target = pair
    if sources is None:
        sources = {rank: filled(source, rank) for rank in source.layout.ranks}
    targets = {plan.rank: empty(target, plan.rank) for plan in plans}
    reports = run_all(plans, sources, targets, fault=fault, in_place=in_place, check_writes=check_writes)
    return targets, reports


def wrong(placement: AnyPlacement, memories: Memories) -> dict[int, list[str]]:
    return {
        rank: names
        for rank in placement.layout.ranks
        if (names := [*differences(memories[rank], filled(placement, rank))])
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("in_place", [True, False])
def test_case(name: str, in_place: bool) -> None:
    case = CASES[name]
    source, target = case.placements()
    plans = plan_all(source, target, budget=case.budget)
    moved, reports = switch((source, target), plans, in_place=in_place)
    assert wrong(target, moved) == {}
    for plan, report in zip(plans, reports, strict=True):
        assert (report.sent_bytes, report.received_bytes) == (plan.sent_bytes, plan.received_bytes)
        assert report.received_bytes == plan.minimum_received_bytes
        assert report.copied_bytes == plan.local_bytes
        assert report.staging_bytes <= (plan.staging_bytes if not in_place else case.budget.bytes)
        assert report.windows == len(plans[0].windows)
    if case.messages is not None:
        assert sum(report.messages for report in reports) == 2 * case.messages


@settings(max_examples=40, deadline=None)
@given(placements(), st.sampled_from((2000, 6000, 2**28)), st.booleans())
def test_there_and_back_on_any_layouts(pair: tuple[AnyPlacement, AnyPlacement], budget: int, in_place: bool) -> None:
    limits = WindowBudget(bytes=budget)
    there, reports = switch(pair, plan_all(*pair, budget=limits), in_place=in_place)
    assert wrong(pair[1], there) == {}
    assert all(report.staging_bytes <= budget for report in reports)
    back, _ = switch(pair[::-1], plan_all(*pair[::-1], budget=limits), sources=there, in_place=in_place)
    assert wrong(pair[0], back) == {}


def test_long_moves_go_in_place_and_small_ones_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = CASES["c24-a-swap"].placements()
    _, reports = switch(pair, plan_all(*pair))
    assert [report.staging_bytes for report in reports] == [0] * 4
    _, reports = switch(pair, plan_all(*pair), in_place=False)
    assert [report.staging_bytes for report in reports] == [16 * 2**20] * 4
    pair = CASES["c24-d-300-small"].placements()
    plans = plan_all(*pair)
    _, reports = switch(pair, plans)
    assert sum(report.messages for report in reports) == 2 * 12 * len(plans[0].windows)
    monkeypatch.setattr(messages, "LONG_MOVE", 1)
    _, reports = switch(pair, plans)
    assert sum(report.messages for report in reports) == 2 * 3600


def test_the_source_is_left_as_it_was() -> None:
    source, target = CASES["tp2dp2-to-pp2dp2"].placements()
    sources = {rank: filled(source, rank) for rank in range(4)}
    switch((source, target), plan_all(source, target), sources=sources)
    assert wrong(source, sources) == {}


def drop_first(delivery: Delivery) -> bool:
    return (delivery.window, delivery.index) != (0, 0)


def flip_a_bit(delivery: Delivery) -> bool:
    delivery.tensor[-1] ^= 1
    return True


@pytest.mark.parametrize("fault", [drop_first, flip_a_bit])
def test_a_fault_is_seen_and_the_source_untouched(fault: Fault) -> None:
    source, target = CASES["tp2-to-pp2"].placements()
    sources = {rank: filled(source, rank) for rank in range(2)}
    moved, _ = switch((source, target), plan_all(source, target), sources=sources, fault=fault)
    assert set(wrong(target, moved)) == {0, 1}
    assert wrong(source, sources) == {}


def test_a_move_that_is_dropped_on_one_side_is_refused() -> None:
    source, target = CASES["tp2-to-pp2"].placements()
    first, second = plan_all(source, target)
    with pytest.raises(TransferError, match=r"what is sent is not what is received.*rank 0 to rank 1"):
        switch((source, target), (without_first_send(first), second))


def test_writes_are_counted() -> None:
    source, target = CASES["tp2-to-pp2"].placements()
    first, second = plan_all(source, target)
    window = first.windows[0]
    object.__setattr__(window, "copies", window.copies[1:])
    with pytest.raises(StateError, match=r"rank 0.*not written exactly once.*0 writes"):
        switch((source, target), (first, second))
    object.__setattr__(window, "copies", (*window.copies, *window.copies[:1], *window.copies[:1]))
    with pytest.raises(StateError, match=r"not written exactly once"):
        switch((source, target), (first, second))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda flat: flat.to(torch.float64), r"expected: float32; got: torch.float64"),
        (lambda flat: flat[:-1], r"at least 15 elements; got: 14 elements"),
        (lambda flat: flat.view(3, 5), r"a contiguous tensor of one dim; got: \(3, 5\)"),
        (lambda flat: flat.repeat_interleave(2)[::2], r"a contiguous tensor of one dim"),
        (None, r"expected: a flat tensor; got: nothing"),
    ],
)
def test_memory_that_is_not_what_the_placement_says(spoil, message: str) -> None:
    from tests.routing.tables import one_each

    source, target = one_each(15, [0], [1])
    sources = {0: filled(source, 0)}
    (name,) = sources[0]
    if spoil is None:
        sources[0].clear()
    else:
        sources[0][name] = spoil(sources[0][name])
    with pytest.raises(PlacementError, match=rf"rank 0.*source memory.*param@0:t0.*{message}"):
        switch((source, target), plan_all(source, target), sources=sources)
