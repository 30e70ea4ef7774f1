"""Views of boxes in flat memory as bits, and the cut of a pair's moves into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dynatrain.errors import PlacementError
from megatron_dynatrain.routing.moves import Move
from megatron_dynatrain.vps.placement import Piece
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import ITEMSIZE

Memory = Mapping[str, torch.Tensor]
"""Slab name to its flat tensor."""

LONG_MOVE = 2**20
"""Bytes from which a move is a message of its own, so that it needs no staging where it is contiguous."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Message:
    """Moves from one rank to another that travel as one tensor, one after the other."""

    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return sum(move.nbytes for move in self.moves)


def messages_of(moves: Sequence[Move]) -> tuple[Message, ...]:
    """Return the messages of one window from one rank to another; pure, so both ends get the same.

    Long moves go alone, all others together. In a packed message wide elements come first: then every move is aligned
    to its elements without padding.
    """
    small = [move for move in moves if move.nbytes < LONG_MOVE]
    small.sort(key=lambda move: -ITEMSIZE[move.source.dtype])  # stable: otherwise in order of the plan
    messages = [Message((move,)) for move in moves if move.nbytes >= LONG_MOVE]
    if small:
        messages.append(Message(tuple(small)))
    return tuple(messages)


def by_peer(moves: Sequence[Move], *, sent: bool) -> dict[int, tuple[Message, ...]]:
    """Return the messages of one window per peer."""
    found: dict[int, list[Move]] = {}
    for move in moves:
        found.setdefault(move.target_rank if sent else move.source_rank, []).append(move)
    return {peer: messages_of(of_peer) for peer, of_peer in found.items()}


class BitViews:
    """Boxes of a rank's memory as strided integer tensors: bits are moved, never values.

    Args:
        memory: Flat tensors by slab; read when a slab is first needed, so it may be filled while a plan runs.
        what: `source` or `target`, for errors.
        rank: Global rank, for errors.
    """

    def __init__(self, memory: Memory, what: str, rank: int) -> None:
        self._memory = memory
        self._what = what
        self._rank = rank
        self._flat: dict[str, torch.Tensor] = {}

    def box(self, piece: Piece, box: Box) -> torch.Tensor:
        """Return a box inside a piece, as a view.

        Raises:
            PlacementError: The slab is missing, or isn't the flat memory that the placement says.
        """
        flat = self._flat.get(piece.slab)
        if flat is None:
            flat = self._flat[piece.slab] = self._open(piece)
        stop = piece.offset + piece.box.numel
        if stop > flat.numel():
            raise self._error(piece, f"at least {stop} elements", f"{flat.numel()} elements")
        dense = flat[piece.offset : stop].view(piece.box.shape)
        return dense if box == piece.box else dense[box.relative_to(piece.box)]

    def _open(self, piece: Piece) -> torch.Tensor:
        tensor = self._memory.get(piece.slab)
        if tensor is None:
            raise self._error(piece, "a flat tensor", "nothing")
        if str(tensor.dtype) != f"torch.{piece.dtype}":
            raise self._error(piece, piece.dtype, str(tensor.dtype))
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise self._error(piece, "a contiguous tensor of one dim", f"{tuple(tensor.shape)}, {tensor.stride()}")
        return tensor.detach().view(_BITS[tensor.element_size()])

    def _error(self, piece: Piece, expected: str, got: str) -> PlacementError:
        return PlacementError(
            f"the {self._what} memory is not what its placement says",
            rank=self._rank,
            phase="transfer",
            subject=piece.slab,
            expected=expected,
            got=got,
        )


def as_bytes(view: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view as flat uint8, sharing its memory."""
    return view.reshape(-1).view(torch.uint8)


def part_of(message: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a packed message that starts at `offset` bytes, with the dtype and shape of `like`."""
    nbytes = like.numel() * like.element_size()
    return message[offset : offset + nbytes].view(like.dtype).view(like.shape)
