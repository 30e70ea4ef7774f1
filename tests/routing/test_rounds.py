"""Pair rounds of any number of ranks."""

from __future__ import annotations

import itertools

import pytest

from megatron_dynatrain.routing.rounds import Rounds, rounds


@pytest.mark.parametrize("count", range(34))
def test_every_pair_meets_once_and_no_rank_twice_in_a_round(count: int) -> None:
    ranks = [7 * i + 3 for i in range(count)]
    table = rounds(ranks)
    for pairs in table:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
    met = sorted(pair for pairs in table for pair in pairs)
    assert met == sorted(itertools.combinations(ranks, 2))
    assert len(table) == (0 if count < 2 else count - 1 + count % 2)


def test_of_is_symmetric_and_agrees_with_the_table() -> None:
    ranks = (4, 0, 9, 2, 6)
    table = Rounds(ranks)
    for number, pairs in enumerate(rounds(ranks)):
        for a, b in pairs:
            assert table.of(a, b) == table.of(b, a) == number


def test_a_rank_does_not_meet_itself_and_is_listed_once() -> None:
    with pytest.raises(ValueError, match="meet itself"):
        Rounds((1, 2)).of(1, 1)
    with pytest.raises(ValueError, match="twice"):
        Rounds((1, 2, 1))
