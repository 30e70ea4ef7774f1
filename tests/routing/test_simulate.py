"""No circular wait under unbuffered sends; the plan part of case C24."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynatrain.errors import TransferError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.simulate import Post, program_of, simulate, simulate_plans
from megatron_dynatrain.routing.windows import RankPlan, WindowBudget, check_pairs, plan_all
from megatron_dynatrain.vps.placement import Placement
from tests.pure.models import dense_model
from tests.routing.tables import one_each

EIGHT_MIB = 2 * 2**20  # elements of float32


def lists_match(plans: tuple[RankPlan, ...]) -> None:
    """Per ordered pair the send and receive lists are equal in order, size and dtype."""
    for sender in plans:
        for receiver in plans:
            sent = [m for w in sender.windows for m in w.sends if m.target_rank == receiver.rank]
            received = [m for w in receiver.windows for m in w.receives if m.source_rank == sender.rank]
            assert sent == received
            assert all(move.source.dtype == move.target.dtype for move in sent)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([0, 1, 2, 3], [1, 0, 3, 2]), ([0, 1, 2, 3], [1, 2, 3, 0])],
    ids=["a-swap", "b-ring"],
)
def test_c24_swap_and_ring_of_8_mib(sources: list[int], targets: list[int]) -> None:
    plans = plan_all(*one_each(EIGHT_MIB, sources, targets), budget=WindowBudget(bytes=2**20))
    lists_match(plans)
    assert {plan.sent_bytes for plan in plans} == {plan.received_bytes for plan in plans} == {8 * 2**20}
    for seed in range(5):
        assert simulate_plans(plans, seed) >= 4 * 8


def test_c24_reversed_rank_order() -> None:
    model = dense_model(layers=2)
    source = Placement(model, ParallelLayout(tp=4, dp=1))
    target = Placement(model, ParallelLayout(tp=2, dp=2, ranks=(3, 2, 1, 0)))
    plans = plan_all(source, target, budget=WindowBudget(bytes=8000))
    lists_match(plans)
    check_pairs(plans)
    assert all(plan.received_bytes == plan.minimum_received_bytes > 0 for plan in plans)
    assert plans == plan_all(source, target, budget=WindowBudget(bytes=8000))
    for seed in range(20):
        assert simulate_plans(plans, seed) > 0


def test_c24_300_small_messages_per_pair() -> None:
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b] * 300
    plans = plan_all(*one_each(3, [a for a, _ in pairs], [b for _, b in pairs]))
    lists_match(plans)
    assert all(plan.pair_summary(peer).sent.ops == 300 for plan in plans for peer in plan.peers)
    # Packed: one message per pair, direction and window, whatever the number of moves.
    assert simulate_plans(plans) <= 12 * len(plans[0].windows)


def test_c24_same_rank_uses_no_network() -> None:
    plans = plan_all(*one_each(EIGHT_MIB, [0, 1, 2, 3], [0, 1, 2, 3]))
    assert [program_of(plan) for plan in plans] == [()] * 4
    assert [plan.local_bytes for plan in plans] == [8 * 2**20] * 4
    assert simulate_plans(plans) == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 33), st.data())
def test_c24_no_circular_wait_for_any_rank_count(count: int, data: st.DataObject) -> None:
    ends = st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), min_size=1, max_size=80)
    pairs = data.draw(ends)
    source, target = one_each(2, [a for a, _ in pairs], [b for _, b in pairs])
    plans = plan_all(source, target, budget=WindowBudget(ops=data.draw(st.sampled_from((1, 5, 256)))))
    lists_match(plans)
    messages = simulate_plans(plans, data.draw(st.integers(0, 10**6)))
    assert messages == len({(w.index, m.source_rank, m.target_rank) for p in plans for w in p.windows for m in w.sends})


def post(peer: int, sends: bool, nbytes: int = 8) -> Post:
    return Post(peer, sends, 0, nbytes)


def test_a_circular_wait_is_found_and_named() -> None:
    """A ring in which everybody sends first, as a transport without rounds might."""
    ring = {r: (post((r + 1) % 4, True), post((r - 1) % 4, False)) for r in range(4)}
    with pytest.raises(TransferError, match=r"circular wait.*rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0"):
        simulate(ring)


def test_a_wait_for_a_rank_that_is_done_is_found() -> None:
    with pytest.raises(TransferError, match="rank 0 waits for rank 1, which is done"):
        simulate({0: (post(1, True), post(1, True)), 1: (post(0, False),)})


def test_ends_that_differ_are_found() -> None:
    with pytest.raises(TransferError, match="ends of a message differ"):
        simulate({0: (post(1, True, 8),), 1: (post(0, False, 9),)})
