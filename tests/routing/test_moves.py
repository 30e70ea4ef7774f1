"""Which replica a box comes from: exact tables, and the limits that windows rely on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynatrain.errors import PlanError
from megatron_dynatrain.routing.cells import Held
from megatron_dynatrain.routing.items import Item, spread
from megatron_dynatrain.routing.moves import Move, route
from megatron_dynatrain.vps.placement import Piece
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import StateKind


def item(*shape: int) -> Item:
    return Item("w", StateKind.MAIN, "float32", shape, 0, False, 1)


def rows(rank: int, start: int, stop: int, width: int = 4, *, slab: str = "s", dtype: str = "float32") -> Held:
    box = Box((start, 0), (stop, width))
    return Held(rank, Piece("w", StateKind.MAIN, box, slab, 0, dtype), box)


def brief(moves: tuple[Move, ...]) -> list[tuple[int, int, int, int]]:
    return [(m.source_rank, m.target_rank, m.box.lo[0], m.box.hi[0]) for m in moves]


def test_shards_of_other_sizes_are_intersected() -> None:
    sources = [rows(0, 0, 3), rows(1, 3, 6)]
    targets = [rows(0, 0, 2), rows(1, 2, 4), rows(2, 4, 6)]
    assert brief(route(item(6, 4), sources, targets)) == [(0, 0, 0, 2), (0, 1, 2, 3), (1, 1, 3, 4), (1, 2, 4, 6)]


def test_only_what_the_target_rank_lacks_crosses() -> None:
    moves = route(item(6, 4), [rows(0, 0, 4), rows(1, 4, 6)], [rows(0, 0, 6)])
    assert brief(moves) == [(0, 0, 0, 4), (1, 0, 4, 6)]
    assert [move.nbytes for move in moves] == [64, 32]


def test_same_node_is_preferred_to_a_less_loaded_replica() -> None:
    sources = [rows(rank, 0, 8) for rank in (0, 1)]
    targets = [rows(rank, 0, 8) for rank in (10, 11, 12)]
    near = {0: "a", 1: "b", 10: "a", 11: "a", 12: "a"}
    moves = route(item(8, 4), sources, targets, node_of=near.__getitem__)
    # An even share of 3 requests is one and a half, plus one: the third must come from the other node.
    assert brief(moves) == [(0, 10, 0, 8), (0, 11, 0, 8), (1, 12, 0, 8)]


def test_replicas_take_turns() -> None:
    sources = [rows(rank, 0, 8) for rank in range(4)]
    firsts = Counter(route(item(8, 4), sources, [rows(9, 0, 8)], turn=turn)[0].source_rank for turn in range(64))
    assert set(firsts) == {0, 1, 2, 3}
    assert max(firsts.values()) - min(firsts.values()) <= 2


def test_receivers_are_spread_over_replicas() -> None:
    sources = [rows(rank, 0, 8) for rank in range(4)]
    moves = route(item(8, 4), sources, [rows(rank, 0, 8) for rank in range(10, 18)])
    assert sorted(Counter(move.source_rank for move in moves).values()) == [2, 2, 2, 2]


def test_tied_copies_with_other_cuts() -> None:
    """Two stages hold the same moments in optimizer shards that are cut at different rows."""
    sources = [rows(0, 0, 2), rows(1, 2, 6), rows(2, 0, 4), rows(3, 4, 6)]
    moves = route(item(6, 4), sources, [rows(2, 0, 6)])
    assert [(m.target_rank, m.box.lo[0], m.box.hi[0]) for m in moves if m.source_rank == 2] == [(2, 0, 2), (2, 2, 4)]
    crossing = [m for m in moves if m.source_rank != 2]
    assert [(m.box.lo[0], m.box.hi[0]) for m in crossing] == [(4, 6)]
    assert crossing[0].source_rank in (1, 3)


def test_two_slabs_of_one_tensor_on_a_rank() -> None:
    sources = [rows(0, 0, 4, slab="first"), rows(0, 0, 4, slab="last")]
    moves = route(item(4, 4), sources, [rows(0, 0, 4, slab="first"), rows(0, 0, 4, slab="last"), rows(1, 0, 4)])
    assert [(m.source_rank, m.target_rank, m.target.slab) for m in moves] == [
        (0, 0, "first"),
        (0, 0, "last"),
        (0, 1, "s"),
    ]


def test_an_element_without_a_source_is_refused_by_name() -> None:
    with pytest.raises(PlanError) as refusal:
        route(item(6, 4), [rows(0, 0, 2), rows(1, 4, 6)], [rows(3, 1, 5)])
    text = str(refusal.value)
    assert "box (2, 0)..(4, 4) that rank 3 needs" in text
    assert "w (main_param)" in text


def test_a_dtype_does_not_change() -> None:
    with pytest.raises(PlanError, match=r"dtype of a state differs.*bfloat16.*float32"):
        route(item(2, 4), [rows(0, 0, 2, dtype="bfloat16")], [rows(0, 0, 2)])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_replica_gives_more_than_its_share_and_one_request(data: st.DataObject) -> None:
    holders = sorted(data.draw(st.sets(st.integers(0, 9), min_size=1)))
    targets = [
        rows(rank, a, b)
        for rank in sorted(data.draw(st.sets(st.integers(0, 15), max_size=12)))
        for a, b in [sorted(data.draw(st.tuples(st.integers(0, 7), st.integers(8, 12))))]
    ]
    node_of = (lambda rank: rank // 4) if data.draw(st.booleans()) else None
    turn = data.draw(st.integers(0, 99))
    moves = route(item(12, 4), [rows(rank, 0, 12) for rank in holders], targets, turn=turn, node_of=node_of)
    crossing = [move for move in moves if move.source_rank != move.target_rank]
    assert all(move.target_rank not in holders for move in crossing)
    sent = Counter()
    for move in crossing:
        sent[move.source_rank] += move.nbytes
    total, largest = sum(sent.values()), max((move.nbytes for move in crossing), default=0)
    assert all(nbytes <= total // len(holders) + largest for nbytes in sent.values())


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 64])
def test_spread_indices_are_even_for_any_stride(stride: int) -> None:
    bins = Counter(spread(i * stride) >> 61 for i in range(800))
    assert all(85 <= count <= 115 for count in bins.values())
    assert len(bins) == 8
