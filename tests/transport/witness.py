"""State whose every element tells where it belongs, for any placement."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch

from megatron_dynatrain.routing.items import Item, items_of
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import ITEMSIZE

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON = 0xA5


def logical(item: Item) -> np.ndarray:
    """The bits of a whole logical tensor: any pattern may occur, also that of a NaN."""
    kind = _BITS[item.itemsize]
    salt = zlib.crc32(f"{item.tensor}/{item.state}".encode())
    numel = Box.whole(item.shape).numel
    return (
        ((np.arange(numel, dtype=np.uint64) * np.uint64(40503) + np.uint64(salt)) & np.iinfo(kind).max)
        .astype(kind)
        .reshape(item.shape)
    )


def filled(placement: Placement, rank: int) -> dict[str, torch.Tensor]:
    """The memory of a rank as it must be."""
    memory = empty(placement, rank)
    items = {(item.tensor, item.state): item for item in items_of(placement.description)}
    cache: dict[Item, np.ndarray] = {}
    for piece in placement.pieces(rank):
        item = items[piece.tensor, piece.state]
        if item not in cache:
            cache[item] = logical(item)
        bits = np.ascontiguousarray(cache[item][piece.box.relative_to(Box.whole(item.shape))]).reshape(-1)
        part = memory[piece.slab][piece.offset : piece.offset + piece.box.numel]
        part.view(torch.uint8).copy_(torch.from_numpy(bits.view(np.uint8).copy()))
    return memory


def empty(placement: Placement, rank: int) -> dict[str, torch.Tensor]:
    """The memory of a rank before anything is written."""
    memory = {}
    for slab in placement.slabs(rank) if rank in placement.layout.ranks else ():
        raw = torch.full((slab.numel * ITEMSIZE[slab.dtype],), POISON, dtype=torch.uint8)
        memory[slab.name] = raw.view(getattr(torch, slab.dtype))
    return memory


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Iterator[str]:
    """Names of the slabs whose bits differ."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        if not torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)):
            yield name
