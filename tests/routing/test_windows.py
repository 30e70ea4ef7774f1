"""Windows and plans: equal on every rank, within the budget, minimal in bytes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynatrain.errors import AgreementError, PlanError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.cut import cut_windows
from megatron_dynatrain.routing.items import items_of
from megatron_dynatrain.routing.windows import RankPlan, WindowBudget, check_pairs, plan_all, plan_rank
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import ModelDescription, StateKind
from tests.pure.models import dense_model
from tests.routing.layouts import DENSE, HALF, placements
from tests.routing.tables import TablePlacement, frozen_model, one_each

budgets = st.builds(WindowBudget, bytes=st.sampled_from((2000, 6000, 2**28)), ops=st.sampled_from((1, 7, 256)))


def dense(
    source: dict[str, int], target: dict[str, int], model: ModelDescription = DENSE
) -> tuple[Placement, Placement]:
    return tuple(Placement(model, ParallelLayout.for_world(**sizes)) for sizes in (source, target))


@settings(max_examples=60, deadline=None)
@given(placements(), budgets, st.booleans())
def test_plans_hold_on_any_layouts(pair: tuple[Placement, Placement], budget: WindowBudget, nodes: bool) -> None:
    node_of = (lambda rank: rank // 4) if nodes else None
    plans = plan_all(*pair, budget=budget, node_of=node_of)
    check_pairs(plans)
    for plan in plans:
        assert plan.received_bytes == plan.minimum_received_bytes
        assert plan.staging_bytes <= budget.bytes
        assert [window.index for window in plan.windows] == list(range(len(plans[0].windows)))
    assert sum(plan.sent_bytes for plan in plans) == sum(plan.received_bytes for plan in plans)
    for plan in plans[:: max(1, len(plans) // 3)]:
        assert plan_rank(*pair, plan.rank, budget=budget, node_of=node_of) == plan


class Watched(Placement):
    """Counts whose pieces are asked for."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.asked: Counter[int] = Counter()

    def pieces_of(self, rank: int, tensor: str):
        self.asked[rank] += 1
        return super().pieces_of(rank, tensor)


def test_planning_is_local() -> None:
    """A rank of the first stage asks nothing about ranks with which it shares no tensor."""
    layout = ParallelLayout.for_world(8, pp=4)
    source, target = Watched(HALF, layout), Watched(HALF, layout.replace(tp=2, dp=1))
    plan_rank(source, target, 0)
    assert set(source.asked) == set(target.asked) == {0, 1}


def test_windows_need_only_holders() -> None:
    source, target = dense({"world_size": 4, "tp": 2}, {"world_size": 4, "pp": 2})
    windows = cut_windows(items_of(DENSE), source, target, WindowBudget(bytes=4000))
    for placement in (source, target):
        placement.pieces_of = placement.pieces = None  # any use of them fails
    assert cut_windows(items_of(DENSE), source, target, WindowBudget(bytes=4000)) == windows
    assert len(windows) > 3


def test_slices_cover_every_item_once() -> None:
    source, target = dense({"world_size": 6, "tp": 3}, {"world_size": 6, "pp": 2}, HALF)
    windows = cut_windows(items_of(HALF), source, target, WindowBudget(bytes=900))
    elements = Counter()
    regions: dict[object, list[Box]] = {}
    for window in windows:
        for part in window:
            elements[part.item] += part.region.numel
            others = regions.setdefault(part.item, [])
            assert all(part.region.intersect(other) is None for other in others)
            others.append(part.region)
    assert elements == {item: Box.whole(item.shape).numel for item in items_of(HALF)}


def test_big_tensors_are_sliced_along_dim_0_and_then_finer() -> None:
    model = frozen_model({"w": (2, 6, 10)})  # 40 bytes a row, 240 per step of dim 0
    source = TablePlacement(model, (0, 1), {0: [("w", Box.whole((2, 6, 10)))]})
    target = TablePlacement(model, (0, 1), {1: [("w", Box.whole((2, 6, 10)))]})

    def shapes(budget: int) -> list[tuple[int, ...]]:
        windows = cut_windows(items_of(model), source, target, WindowBudget(bytes=budget))
        return [part.region.shape for window in windows for part in window]

    # Bounds of 2 ranks of one layout: 2 copies sent or received of each element, 1 received.
    assert shapes(480 * 3) == [(2, 6, 10)]
    assert shapes(480 * 3 - 1) == [(1, 6, 10), (1, 6, 10)]
    assert shapes(240 * 3 - 1) == [(1, 5, 10), (1, 1, 10), (1, 5, 10), (1, 1, 10)]
    assert shapes(40 * 3) == [(1, 1, 10)] * 12
    with pytest.raises(PlanError, match=r"too small to move one row.*w \(param\).*120 bytes.*119 bytes"):
        shapes(40 * 3 - 1)


def test_ops_bound_the_slices_of_a_window() -> None:
    source, target = one_each(4, [0] * 300, [1] * 300)
    plans = plan_all(source, target, budget=WindowBudget(ops=256))
    assert [len(window.sends) for window in plans[0].windows] == [256, 44]


def test_bytes_bound_the_slices_of_a_window() -> None:
    """By the bounds rank 0 may send each tensor of 16 bytes twice: three of them fill 96 bytes."""
    source, target = one_each(4, [0] * 5, [1] * 5)
    plans = plan_all(source, target, budget=WindowBudget(bytes=95))
    assert [len(window.sends) for window in plans[0].windows] == [2, 2, 1]
    plans = plan_all(source, target, budget=WindowBudget(bytes=96))
    assert [len(window.sends) for window in plans[0].windows] == [3, 2]


@pytest.mark.parametrize("limits", [{"bytes": 0}, {"ops": 0}])
def test_an_empty_budget_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="budget"):
        WindowBudget(**limits)


def test_stages_and_shards_progress_together() -> None:
    """In the first half of the windows every rank sends and receives about half of its bytes."""
    model = dense_model(layers=24, hidden=12, ffn=24, vocab=24)
    source, target = dense({"world_size": 4, "pp": 4}, {"world_size": 4, "tp": 4}, model)
    for plan in plan_all(source, target, budget=WindowBudget(bytes=8000)):
        half = plan.windows[: len(plan.windows) // 2]
        assert 0.35 < sum(m.nbytes for w in half for m in w.sends) / plan.sent_bytes < 0.65
        assert 0.35 < sum(m.nbytes for w in half for m in w.receives) / plan.received_bytes < 0.65


def test_replicas_share_the_sending() -> None:
    """dp4 -> dp8: four new ranks receive the parameters; the four old ones send about the same."""
    source, target = dense({"world_size": 4}, {"world_size": 8}, dense_model(layers=16, hidden=12, ffn=24, vocab=24))
    skip = set(StateKind) - {StateKind.PARAM}
    sent = [plan.sent_bytes for plan in plan_all(source, target, skip_states=skip)]
    assert sent[4:] == [0] * 4
    assert max(sent[:4]) < 1.1 * sum(sent) / 4


def test_skipped_states_do_not_move() -> None:
    source, target = dense({"world_size": 2, "tp": 2}, {"world_size": 2, "pp": 2}, HALF)
    for plan in plan_all(source, target, skip_states={StateKind.PARAM}):
        states = {m.state for w in plan.windows for m in (*w.sends, *w.receives, *w.copies)}
        assert StateKind.PARAM not in states
        assert StateKind.MAIN in states
        assert plan.received_bytes == plan.minimum_received_bytes


def test_a_switch_to_the_same_layout_moves_nothing() -> None:
    source, target = dense({"world_size": 4, "tp": 2}, {"world_size": 4, "tp": 2})
    for plan in plan_all(source, target):
        assert plan.sent_bytes == plan.received_bytes == plan.minimum_received_bytes == 0
        assert plan.peers == ()


def test_refusals() -> None:
    source, target = dense({"world_size": 2}, {"world_size": 2, "tp": 2})
    with pytest.raises(PlanError, match="the rank is in neither layout"):
        plan_rank(source, target, 2)
    with pytest.raises(PlanError, match="different models"):
        plan_rank(source, Placement(HALF, target.layout), 0)


def test_an_element_without_a_source_is_found_by_the_plan() -> None:
    model = frozen_model({"w": (4, 2)})
    source = TablePlacement(model, (0, 1), {0: [("w", Box((0, 0), (3, 2)))]})
    target = TablePlacement(model, (0, 1), {1: [("w", Box.whole((4, 2)))]})
    with pytest.raises(PlanError, match=r"box \(3, 0\)\.\.\(4, 2\) that rank 1 needs.*w \(param\)"):
        plan_rank(source, target, 1)


def without_first_send(plan: RankPlan) -> RankPlan:
    at = next(i for i, window in enumerate(plan.windows) if window.sends)
    window = dataclasses.replace(plan.windows[at], sends=plan.windows[at].sends[1:])
    return dataclasses.replace(plan, windows=(*plan.windows[:at], window, *plan.windows[at + 1 :]))


def swapped_sends(plan: RankPlan) -> RankPlan:
    """The same moves in another order: the same bytes and count, only the digest tells."""
    at = next(i for i, w in enumerate(plan.windows) if len({m.target_rank for m in w.sends[:2]}) == 1 < len(w.sends))
    first, second, *rest = plan.windows[at].sends
    window = dataclasses.replace(plan.windows[at], sends=(second, first, *rest))
    return dataclasses.replace(plan, windows=(*plan.windows[:at], window, *plan.windows[at + 1 :]))


@pytest.mark.parametrize("spoil", [without_first_send, swapped_sends])
def test_pairs_that_disagree_are_named(spoil) -> None:
    source, target = dense({"world_size": 2, "tp": 2}, {"world_size": 2, "pp": 2})
    first, second = plan_all(source, target)
    check_pairs((first, second))
    with pytest.raises(AgreementError, match=r"ranks 0 and 1 don't agree.*rank 0 to rank 1.*digest.*digest"):
        check_pairs((spoil(first), second))


def test_plans_of_other_windows_disagree() -> None:
    source, target = dense({"world_size": 2, "tp": 2}, {"world_size": 2, "pp": 2})
    first = plan_rank(source, target, 0, budget=WindowBudget(bytes=5000))
    with pytest.raises(AgreementError, match=r"number of windows"):
        check_pairs((first, plan_rank(source, target, 1)))


def test_the_plan_is_the_same_on_every_run() -> None:
    """The digest of a pair is fixed: it does not depend on hashes that Python salts."""
    source, target = one_each(4, [0, 1], [1, 0])
    first, _ = plan_all(source, target)
    assert str(first.pair_summary(1).sent) == "16 bytes in 1 moves, digest 24469ea9d4a051ef"
