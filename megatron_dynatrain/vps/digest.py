"""Digests of state: order-sensitive, and additive over any partition of a tensor into boxes."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import StateKind

BLOCK = 2**20
"""Elements worked on at a time; bounds temporary memory."""

MASK = 2**64 - 1

_ROWS, _COLUMNS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
"""Odd constants that keep the streams of row and column weights apart."""

_BIAS = 0x632BE59BD9B4E019
"""Added to the bits of each element, so that zeros count too."""


def digest_key(tensor: str, state: StateKind) -> int:
    """Return the salt of one state of a logical tensor: 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{state}\0{tensor}".encode(), digest_size=8).digest(), "little")


def digest_box(bits: NDArray[np.unsignedinteger], box: Box, shape: tuple[int, ...], salt: int) -> int:
    """Return the digest of a box of a tensor, modulo 2**64.

    The sum over the elements of `(bits + constant) * u * v`, where u is a pseudo-random odd number of the element's
    linear index over all dims but the last, and v one of its index in the last dim. Digests of boxes that make up a
    tensor add up, modulo 2**64, to the digest of the tensor, whatever the partition.

    Args:
        bits: The raw bits of the elements as unsigned integers of their width, of shape `box.shape`. Copied where it is
            not contiguous; otherwise no temporary is larger than `BLOCK` elements.
        box: Where they lie in the tensor.
        shape: Shape of the tensor.
        salt: `digest_key` of the tensor and state.

    Raises:
        ValueError: The bits are not unsigned integers, or not of the shape of the box, or the box is not in the tensor.
    """
    if bits.dtype.kind != "u" or bits.shape != box.shape:
        raise ValueError(f"need unsigned integers of shape {box.shape}, got {bits.dtype} of shape {bits.shape}")
    if not Box.whole(shape).contains(box):
        raise ValueError(f"{box} is not inside a tensor of shape {shape}")
    if not box.numel:
        return 0
    if bits.dtype.itemsize == 8:
        # Products lose the high bits of an element where weights differ by a multiple of a power of two, and a 64-bit
        # element can differ in its highest bits alone. Two halves have their own weights.
        bits, box, shape = _halves(bits, box, shape)
    columns = box.shape[-1] if box.shape else 1
    table = np.ascontiguousarray(bits).reshape(-1, columns)
    first_column = box.lo[-1] if box.shape else 0
    row_step = max(1, BLOCK // columns)
    column_step = min(columns, BLOCK)
    total = 0
    for column in range(0, columns, column_step):
        block = slice(column, min(column + column_step, columns))
        v = _weights(np.arange(first_column + block.start, first_column + block.stop, dtype=np.uint64), salt, _COLUMNS)
        bias = int(v.sum()) * _BIAS & MASK
        for row in range(0, len(table), row_step):
            part = table[row : row + row_step, block]
            u = _weights(_row_numbers(box, shape, row, row + len(part)), salt, _ROWS)
            sums = np.einsum("rc,c->r", part, v)
            total += int(np.dot(sums, u)) + bias * int(u.sum())
    return total & MASK


def _halves(
    bits: NDArray[np.unsignedinteger], box: Box, shape: tuple[int, ...]
) -> tuple[NDArray[np.unsignedinteger], Box, tuple[int, ...]]:
    """See a tensor of 64-bit elements as one of 32-bit elements with twice the columns, low half first."""
    halves = np.ascontiguousarray(bits).astype("<u8", copy=False).reshape(*bits.shape[:-1], -1).view("<u4")
    if not box.shape:
        return halves, Box((0,), (2,)), (2,)
    wide = Box((*box.lo[:-1], 2 * box.lo[-1]), (*box.hi[:-1], 2 * box.hi[-1]))
    return halves, wide, (*shape[:-1], 2 * shape[-1])


def _row_numbers(box: Box, shape: tuple[int, ...], start: int, stop: int) -> NDArray[np.uint64]:
    """Return the linear index, over all dims of the tensor but the last, of rows `[start, stop)` of the box."""
    rest = np.arange(start, stop, dtype=np.uint64)
    numbers = np.zeros(stop - start, dtype=np.uint64)
    extent, stride = box.shape[:-1], 1
    for dim in reversed(range(len(extent))):
        inside = rest % np.uint64(extent[dim])
        rest //= np.uint64(extent[dim])
        numbers += (inside + np.uint64(box.lo[dim])) * np.uint64(stride)
        stride = math.prod(shape[dim:-1])
    return numbers


def _weights(index: NDArray[np.uint64], salt: int, stream: int) -> NDArray[np.uint64]:
    """Return odd pseudo-random 64-bit numbers, a function of (index, salt, stream): the finalizer of SplitMix64."""
    z = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64((salt ^ stream) & MASK)
    for _ in range(2):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    z |= np.uint64(1)
    return z
