"""The padded vocabulary that fits every tp of a schedule."""

from __future__ import annotations

import pytest

from megatron_dynatrain.schedule.check import pinned_padded_vocab_size


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "tps", "padded"),
    [
        (70, 8, [1], 72),
        (70, 8, [2], 80),
        (70, 8, [4], 96),
        (70, 8, [8], 128),
        (70, 8, [1, 2, 4, 8, 1], 128),
        (70, 8, [1, 2, 4], 96),
        (256, 128, [1, 2, 4], 512),
        (50257, 128, [1, 2, 4], 50688),
        (70, 8, [2, 3], 96),
        (96, 8, [3, 4], 96),
        (97, 8, [3, 4], 192),
    ],
)
def test_c01_the_pinned_size_is_the_smallest_that_every_tp_accepts(
    vocab_size: int, divisible_by: int, tps: list[int], padded: int
) -> None:
    assert pinned_padded_vocab_size(vocab_size, divisible_by, tps) == padded
    assert all(padded % (divisible_by * tp) == 0 for tp in tps)
    accepted = (n for n in range(vocab_size, padded + 1) if all(n % (divisible_by * tp) == 0 for tp in tps))
    assert next(accepted) == padded


@pytest.mark.parametrize("wrong", [(0, 8, [1]), (70, 0, [1]), (70, 8, [0]), (70, 8, [])])
def test_sizes_that_are_not_positive_are_refused(wrong: tuple[int, int, list[int]]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        pinned_padded_vocab_size(*wrong)
