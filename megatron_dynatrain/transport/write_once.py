"""Check that a plan writes every target element exactly once; for tests and for debugging."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.vps.placement import Piece
from megatron_dynatrain.vps.region import Box


class WriteCounter:
    """Counts the writes to every element of a rank's target memory.

    Args:
        target: Slab name to flat tensor.
        rank: Global rank, for errors.
    """

    def __init__(self, target: Mapping[str, torch.Tensor], rank: int) -> None:
        self._rank = rank
        self._counts = {name: torch.zeros(tensor.numel(), dtype=torch.int32) for name, tensor in target.items()}

    def record(self, piece: Piece, box: Box) -> None:
        """Count one write of a box."""
        dense = self._counts[piece.slab][piece.offset : piece.offset + piece.box.numel].view(piece.box.shape)
        dense[box.relative_to(piece.box)] += 1

    def verify(self) -> None:
        """Raise unless every element of every slab was written once.

        Raises:
            StateError: Names the slab, the first element and how often it was written.
        """
        for name, counts in self._counts.items():
            wrong = torch.nonzero(counts != 1)
            if wrong.numel():
                first = int(wrong[0])
                raise StateError(
                    f"{wrong.numel()} elements of the target were not written exactly once",
                    rank=self._rank,
                    phase="transfer",
                    subject=f"{name}[{first}]",
                    expected="1 write",
                    got=f"{int(counts[first])} writes",
                )
