"""Pair ranks into rounds such that every pair meets once: the circle method of round-robin tournaments."""

from __future__ import annotations

from collections.abc import Sequence


class Rounds:
    """Symmetric rounds of a set of ranks: in each round every rank has at most one peer; every pair meets once.

    With an odd number of ranks one has a bye in each round. Nothing is a power of two.

    Args:
        ranks: The ranks; their order decides the rounds, so it must be the same everywhere.

    Source: the circle method; places `i` and `j` on the circle meet in round `i + j` modulo its size, and the place
    that would meet itself meets the last rank, which stands in the middle.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._place = {rank: i for i, rank in enumerate(self.ranks)}
        if len(self._place) != len(self.ranks):
            raise ValueError(f"ranks are listed twice: {self.ranks}")
        self._circle = len(self.ranks) - 1 + len(self.ranks) % 2

    def __len__(self) -> int:
        """Return the number of rounds."""
        return self._circle if len(self.ranks) > 1 else 0

    def of(self, a: int, b: int) -> int:
        """Return the round in which two different ranks meet."""
        i, j = sorted((self._place[a], self._place[b]))
        if i == j:
            raise ValueError(f"rank {a} doesn't meet itself")
        return (2 * i if j == self._circle else i + j) % self._circle


def rounds(ranks: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the pairs of every round; in a pair the rank that is listed first comes first."""
    table = Rounds(ranks)
    found: list[list[tuple[int, int]]] = [[] for _ in range(len(table))]
    for i, a in enumerate(table.ranks):
        for b in table.ranks[i + 1 :]:
            found[table.of(a, b)].append((a, b))
    return tuple(tuple(pairs) for pairs in found)
