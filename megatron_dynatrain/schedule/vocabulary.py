"""The padded vocabulary of a run whose tensor parallelism changes."""

from __future__ import annotations

import math
from collections.abc import Iterable


def pinned_padded_vocab_size(vocab_size: int, divisible_by: int, tps: Iterable[int]) -> int:
    """Return the rows of the embedding table that fit every tp of a schedule.

    Megatron pads the vocabulary to a multiple of `--make-vocab-size-divisible-by` x tp, so that the shapes, and with
    them the losses, would change with tp. The size is pinned instead: the smallest multiple of
    `divisible_by * lcm(tps)` that holds the vocabulary. It is at least what Megatron would give for every single tp,
    and Megatron would accept it for each. Source of the rule: `calculate_padded_vocab_size` in
    `megatron/training/vocab_utils.py` (0.19), taken for all tp at once.

    Args:
        vocab_size: Rows that are data.
        divisible_by: `--make-vocab-size-divisible-by`.
        tps: Tensor-parallel size of the launch layout and of every layout of the schedule.

    Raises:
        ValueError: A size is not positive, or no tp is given.
    """
    sizes = tuple(tps)
    if not sizes or min((vocab_size, divisible_by, *sizes)) < 1:
        raise ValueError(
            f"vocab_size, divisible_by and every tp must be positive, got {vocab_size}, {divisible_by}, {sizes}"
        )
    multiple = divisible_by * math.lcm(*sizes)
    return -(-vocab_size // multiple) * multiple
