"""Digests add up over any partition, and see every change of order or place."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_dynatrain.vps import digest as digest_module
from megatron_dynatrain.vps.digest import digest_box, digest_key
from megatron_dynatrain.vps.region import Box, cut_flat_run
from megatron_dynatrain.vps.tensor import StateKind

PINNED_KEY = 17020583990841261357
PINNED_DIGEST = 822519910363016064

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Each example has many elements already, and a loaded machine draws slowly."""

SALT = digest_key("decoder.layers.3.mlp.linear_fc1.weight", StateKind.MAIN)
DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64]
SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def arrays(draw: st.DrawFn, dtypes: list[Any] = DTYPES, shapes: Any = SHAPES) -> Any:
    """Bits of few or of many values, in the low or in the high bits; numpy draws them, which is quicker."""
    dtype, shape = np.dtype(draw(st.sampled_from(dtypes))), draw(shapes)
    width = draw(st.integers(1, 8 * dtype.itemsize))
    values = np.random.default_rng(draw(st.integers(0, 2**32))).integers(
        0, 2**width - 1, shape, np.uint64, endpoint=True
    )
    shift = draw(st.sampled_from([0, 8 * dtype.itemsize - width]))
    return np.asarray(np.asarray(values) << np.uint64(shift)).astype(dtype)


def whole(bits: Any, salt: int = SALT) -> int:
    bits = np.asarray(bits)
    return digest_box(bits, Box.whole(bits.shape), bits.shape, salt)


@few
@given(arrays(), st.data())
def test_adds_up_over_runs_and_boxes(bits: Any, data: st.DataObject) -> None:
    expected = whole(bits)
    cuts = sorted(data.draw(st.lists(st.integers(0, bits.size), max_size=4)))
    total = 0
    for start, stop in zip([0, *cuts], [*cuts, bits.size], strict=True):
        for box, _ in cut_flat_run(bits.shape, start, stop):
            total += digest_box(bits[box.relative_to(Box.whole(bits.shape))], box, bits.shape, SALT)
    assert total % 2**64 == expected


@few
@given(arrays([np.uint16], st.just((3, 4, 5))), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_adds_up_over_a_grid(bits: Any, at: list[int]) -> None:
    cuts = [(0, min(c, n), n) for c, n in zip(at, bits.shape, strict=True)]
    total = 0
    for corner in np.ndindex(2, 2, 2):
        box = Box(
            tuple(c[i] for c, i in zip(cuts, corner, strict=True)),
            tuple(c[i + 1] for c, i in zip(cuts, corner, strict=True)),
        )
        total += digest_box(bits[box.relative_to(Box.whole(bits.shape))], box, bits.shape, SALT)
    assert total % 2**64 == whole(bits)


@few
@given(arrays(), st.data())
def test_sees_a_swap_of_two_unequal_elements(bits: Any, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, bits.size - 1))
    others = np.flatnonzero(bits.reshape(-1) != bits.reshape(-1)[i])
    assume(others.size)
    j = int(others[data.draw(st.integers(0, others.size - 1))])
    swapped = bits.copy()
    flat = swapped.reshape(-1)
    flat[[i, j]] = flat[[j, i]]
    assert whole(swapped) != whole(bits)


@few
@given(arrays(), st.data())
def test_sees_one_flipped_bit(bits: Any, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, bits.size - 1))
    bit = data.draw(st.integers(0, 8 * bits.dtype.itemsize - 1))
    flipped = bits.copy()
    flipped.reshape(-1)[i] ^= bits.dtype.type(1 << bit)
    assert whole(flipped) != whole(bits)


@few
@given(arrays([np.uint32], st.tuples(st.integers(2, 5), st.integers(2, 5))), st.data())
def test_sees_permuted_rows_columns_and_shifts(bits: Any, data: st.DataObject) -> None:
    changed = [
        bits[list(data.draw(st.permutations(range(bits.shape[0]))))],
        bits[:, list(data.draw(st.permutations(range(bits.shape[1]))))],
        np.roll(bits, data.draw(st.integers(1, bits.size)), axis=None),
        np.roll(bits, 1, axis=0),
    ]
    for other in changed:
        assert (whole(other) == whole(bits)) == bool((other == bits).all())


@few
@given(arrays([np.uint16], st.just((2, 3, 4))))
def test_sees_gate_and_up_swapped(bits: Any) -> None:
    assume((bits[0] != bits[1]).any())
    assert whole(bits[::-1]) != whole(bits)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_sees_swaps_of_values_that_differ_in_their_highest_bit_alone(dtype: Any) -> None:
    top = 1 << (8 * np.dtype(dtype).itemsize - 1)
    values = np.zeros((16, 16), dtype)
    digests = set()
    for row, column in np.ndindex(16, 16):
        values[row, column] = top
        digests.add(whole(values))
        values[row, column] = 0
    assert len(digests) == 256


def test_zeros_count_and_salts_matter() -> None:
    zeros = np.zeros((2, 3), np.uint32)
    assert whole(zeros) != whole(np.zeros((3, 2), np.uint32))
    assert digest_box(zeros[:1], Box((0, 0), (1, 3)), (2, 3), SALT) != digest_box(
        zeros[1:], Box((1, 0), (2, 3)), (2, 3), SALT
    )
    assert whole(zeros) != 0
    assert whole(zeros, SALT) != whole(zeros, SALT ^ 1)
    assert digest_box(np.zeros((0, 3), np.uint8), Box((1, 0), (1, 3)), (2, 3), SALT) == 0


@few
@given(arrays(), st.integers(1, 7))
def test_blocks_do_not_matter(bits: Any, block: int) -> None:
    expected, before = whole(bits), digest_module.BLOCK
    digest_module.BLOCK = block
    try:
        assert whole(bits) == expected
        assert whole(np.asfortranarray(bits)) == expected
    finally:
        digest_module.BLOCK = before


def test_temporary_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "BLOCK", 2**14)
    bits = np.ones((2**10, 2**8), np.uint16)
    peaks = []
    for view in (bits, bits.reshape(-1), bits.reshape(-1, 1), bits.view(np.uint64)):
        tracemalloc.start()
        whole(view)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) <= 8 * 8 * 2**14


def test_is_the_same_in_every_process() -> None:
    """Digests are compared between processes: the numbers are pinned (a salt from `hash()` would not stay)."""
    bits = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    assert digest_key("a", StateKind.PARAM) == PINNED_KEY
    assert whole(bits, digest_key("a", StateKind.PARAM)) == PINNED_DIGEST


def test_keys_differ_by_tensor_and_state() -> None:
    assert len({digest_key(name, state) for name in ("a", "b") for state in StateKind}) == 2 * len(StateKind)


@pytest.mark.parametrize(
    ("bits", "box", "words"),
    [
        (np.zeros((2, 3), np.int32), Box((0, 0), (2, 3)), "need unsigned integers"),
        (np.zeros((3, 2), np.uint32), Box((0, 0), (2, 3)), "of shape"),
        (np.zeros((2, 3), np.uint32), Box((1, 0), (3, 3)), "not inside"),
    ],
)
def test_wrong_bits_are_refused(bits: Any, box: Box, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        digest_box(bits, box, (2, 3), SALT)
