"""Which memory mode a switch uses, by arithmetic before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from megatron_dynatrain.errors import SwitchRefused
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import ITEMSIZE, StateKind


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What one rank holds and must hold for a switch, in bytes.

    Args:
        source_state: Parameters and optimizer state of the layout before.
        source_gradients: Gradient buffers of the layout before, free during the switch.
        target_state: Parameters and optimizer state of the layout after.
        target_gradients: Gradient buffers of the layout after, made when the source is gone.
        staging: Bound of one window's packed messages.
    """

    source_state: int
    source_gradients: int
    target_state: int
    target_gradients: int
    staging: int

    @classmethod
    def of(
        cls, source: Placement, target: Placement, rank: int, *, staging: int, gradient_itemsize: int = 4
    ) -> MemoryNeed:
        """Compute the need of a rank from two placements; pure.

        Args:
            source: Placement before.
            target: Placement after.
            rank: Global rank.
            staging: Bound of one window, in bytes.
            gradient_itemsize: Bytes per element of the gradient buffers.
        """
        return cls(
            source_state=_state_bytes(source, rank),
            source_gradients=_gradient_bytes(source, rank, gradient_itemsize),
            target_state=_state_bytes(target, rank),
            target_gradients=_gradient_bytes(target, rank, gradient_itemsize),
            staging=staging,
        )

    @property
    def safe_extra(self) -> int:
        """Bytes on top of the source's state that `safe` mode needs at its peak.

        The target is built without storage; its gradient buffers are made when the source is gone, and may still need
        more than the two states and staging together did.
        """
        return max(self.target_state + self.staging, self.target_state + self.target_gradients - self.source_state)


def _state_bytes(placement: Placement, rank: int) -> int:
    return sum(slab.numel * ITEMSIZE[slab.dtype] for slab in placement.slabs(rank))


def _gradient_bytes(placement: Placement, rank: int, itemsize: int) -> int:
    trainable = {spec.name for spec in placement.description.parameters if spec.trainable}
    slabs = [s for s in placement.slabs(rank) if s.state is StateKind.PARAM and s.parameter in trainable]
    return sum(slab.numel for slab in slabs) * itemsize


def available_bytes() -> int:
    """Return the bytes that this rank can still allocate: on CUDA its device's, on CPU its share of the node's."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return int(psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def choose_mode(
    wanted: Literal["auto", "safe", "lean"], need: MemoryNeed, *, limit: int | None, rank: int
) -> Literal["safe"]:
    """Return the memory mode of a switch; the caller lets all ranks agree on it.

    Args:
        wanted: The flag's value.
        need: What this rank needs.
        limit: Bytes of state, gradients and staging that this rank may hold in all; None asks the device.
        rank: For the message.

    Raises:
        SwitchRefused: It doesn't fit; the message has the numbers.
    """
    if wanted == "lean":
        raise SwitchRefused(
            "lean memory mode is not available yet",
            rank=rank,
            subject="--dynamic-parallelism-memory lean",
            expected="auto or safe",
        )
    if limit is not None:
        room, where = limit - need.source_state, f"limit of {limit} bytes less the source's {need.source_state}"
    else:
        room, where = available_bytes() + need.source_gradients, "free memory plus the source's gradient buffers"
    if need.safe_extra > room:
        raise SwitchRefused(
            "the switch doesn't fit in memory",
            rank=rank,
            phase="prepare",
            subject="--dynamic-parallelism-memory",
            expected=f"{need.safe_extra} bytes for the target (state {need.target_state}, then staging {need.staging}, "
            f"then gradients {need.target_gradients} in place of the source's state {need.source_state})",
            got=f"{room} bytes ({where})",
            hint="choose a layout that shards more, or free memory",
        )
    return "safe"
