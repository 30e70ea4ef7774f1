"""Canonical dims of a parameter, from what Megatron declares: plain shards, and fused parameters part by part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_dynatrain.errors import PlacementError, UnsupportedError
from megatron_dynatrain.vps.tensor import Segment

Declared = ShardedTensor | ShardedTensorFactory


def declared_tensors(value: object) -> Iterator[Declared]:
    """Yield every sharded tensor and factory inside a (nested) sharded state dict."""
    if isinstance(value, ShardedTensor | ShardedTensorFactory):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from declared_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from declared_tensors(item)


def segments_of(
    name: str, key: str, tensor: torch.Tensor, declared: Declared, *, shard_dim: int | None, parts: int
) -> tuple[Segment, ...]:
    """Return the logical tensors inside a parameter, in memory order; local.

    Args:
        name: Global name, for messages.
        key: Key of the logical tensor, or the stem of the keys where there are several.
        tensor: The local parameter.
        declared: What the model's sharded_state_dict says of it.
        shard_dim: Dim that tensor parallelism splits, by the parameter's attributes; None where it doesn't.
        parts: Ranks that it splits over (tp, for experts etp).

    Raises:
        PlacementError: Attributes and declaration disagree; names both.
        UnsupportedError: A fused parameter whose parts are not understood.
    """
    if isinstance(declared, ShardedTensorFactory):
        return _fused(name, key, tensor, declared, shard_dim, parts)
    shape = tuple(declared.global_shape[declared.prepend_axis_num :])
    if not shape:
        return (Segment(key, (1,)),)
    _check_plain(name, tensor, declared, shape, shard_dim, parts)
    return (Segment(key, shape, shard_dim),)


def _check_plain(
    name: str, tensor: torch.Tensor, declared: ShardedTensor, shape: tuple[int, ...], shard_dim: int | None, parts: int
) -> None:
    local = tuple(tensor.shape)
    expected = tuple(n // parts if dim == shard_dim else n for dim, n in enumerate(shape))
    offset = tuple(declared.global_offset[declared.prepend_axis_num :])
    if local != expected or any(o % n for o, n in zip(offset, local, strict=True) if n):
        raise PlacementError(
            "a parameter's attributes and its declared sharding disagree",
            subject=name,
            expected=f"local shape {expected} of {shape} split over {parts} ranks on dim {shard_dim} (partition_dim)",
            got=f"local shape {local} at offset {offset} (sharded_state_dict)",
            hint="the module's partition_dim or its sharded_state_dict is wrong",
        )


def _fused(
    name: str,
    key: str,
    tensor: torch.Tensor,
    declared: ShardedTensorFactory,
    shard_dim: int | None,
    parts: int,
) -> tuple[Segment, ...]:
    """Return the segments of a factory parameter: parts along dim 0, each split by tensor parallelism on its own.

    The factory's own build function is applied to the tensor of local element numbers, which shows where each element
    belongs. Parts of one key become one segment with a dim more (gate and up of a gated fc1: `[2, ffn, h]`); parts of
    different keys become a segment each (packed projections). Anything else is refused.
    """
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    pieces = list(declared_tensors(declared.build_fn(declared.key, numbers, declared.replica_id, None)))
    if shard_dim not in (0, None) or not pieces or not _in_order(pieces, numbers):
        raise _not_understood(name, pieces)
    splits = parts if shard_dim == 0 else 1
    if len({piece.key for piece in pieces}) == len(pieces) and len(pieces) > 1:
        return tuple(_own_segment(name, key, declared.key, piece, pieces, splits) for piece in pieces)
    return (_equal_parts(name, key, pieces, splits),)


def _in_order(pieces: list[ShardedTensor], numbers: torch.Tensor) -> bool:
    """Return whether the pieces are the local parameter's rows, one after the other."""
    row = 0
    for piece in pieces:
        count = piece.data.shape[0]
        if not torch.equal(piece.data.reshape(piece.data.shape), numbers[row : row + count]):
            return False
        row += count
    return row == numbers.shape[0]


def _equal_parts(name: str, key: str, pieces: list[ShardedTensor], splits: int) -> Segment:
    count, rows = len(pieces), pieces[0].data.shape[0]
    rest = tuple(pieces[0].data.shape[1:])
    whole = rows * splits
    first = _offset(pieces[0])
    for index, piece in enumerate(pieces):
        understood = (
            piece.key == pieces[0].key
            and _shape(piece) == (count * whole, *rest)
            and _offset(piece)[0] == index * whole + first[0]
            and first[0] % rows == 0
            and first[0] < whole
        )
        if not understood:
            raise _not_understood(name, pieces)
    return Segment(key, (count, whole, *rest), 1 if splits > 1 or count > 1 else 0)


def _own_segment(
    name: str, key: str, stem: str, piece: ShardedTensor, pieces: list[ShardedTensor], splits: int
) -> Segment:
    rows = piece.data.shape[0]
    shape = _shape(piece)
    if shape != (rows * splits, *piece.data.shape[1:]) or _offset(piece)[0] % max(rows, 1):
        raise _not_understood(name, pieces)
    suffix = piece.key.removeprefix(stem)
    return Segment(f"{key}{suffix}", shape, 0)


def _shape(piece: ShardedTensor) -> tuple[int, ...]:
    return tuple(piece.global_shape[piece.prepend_axis_num :])


def _offset(piece: ShardedTensor) -> tuple[int, ...]:
    return tuple(piece.global_offset[piece.prepend_axis_num :])


def _not_understood(name: str, pieces: list[ShardedTensor]) -> UnsupportedError:
    return UnsupportedError(
        "a fused parameter has parts that are not understood",
        subject=name,
        expected="parts along dim 0, in order, each split by tensor parallelism on its own",
        got=[(p.key, tuple(p.global_offset), tuple(p.local_shape), tuple(p.global_shape)) for p in pieces],
        hint="add a fused layout for it in mcore/fused.py, with a test that fails first",
    )
