"""What a switch is told and what it tells: options, the current world, the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.parallel_state import ParallelState
from megatron_dynatrain.routing.windows import WindowBudget

BuildTarget = Callable[[ParallelLayout], tuple[list[torch.nn.Module], object]]
"""Builds the DDP-wrapped chunks and the optimizer of a layout; called with that layout's parallel state live.

The function wraps the making of modules in `mcore.build.hollow_build()`. Collective over the layout's ranks.
"""


@dataclass(frozen=True)
class Vocabulary:
    """How many rows of the vocabulary's tables are data, and how many `build` makes of them.

    Where two layouts pad differently, only the real rows are moved and compared, and the padding rows of the target are
    zeros in all states. Where they pad alike, padding is carried like data, so that losses don't change.

    Args:
        size: Rows that are data.
        padded: Rows of the tables that `build` makes for a layout; pure, the same on every rank.
    """

    size: int
    padded: Callable[[ParallelLayout], int]


@dataclass(frozen=True, kw_only=True)
class SwitchOptions:
    """Settings of all switches of a job, equal on every rank.

    Args:
        memory: `safe` keeps the source until commit; `auto` takes the first mode that fits.
        verify: `digest` compares order-sensitive digests, `full` compares every bit by sending it back, `off` trusts.
        timeout: Longest wait in any phase, in seconds.
        seed: The job's seed, for new random streams.
        budget: Bound of one window.
        memory_limit: Bytes of device memory that one rank may use; None asks the device.
    """

    memory: Literal["auto", "safe", "lean"] = "auto"
    verify: Literal["off", "digest", "full"] = "digest"
    timeout: float = 600.0
    seed: int = 1234
    budget: WindowBudget = field(default_factory=WindowBudget)
    memory_limit: int | None = None


@dataclass
class World:
    """A layout with everything built for it on this rank; only one world of a job is current."""

    layout: ParallelLayout
    chunks: list[torch.nn.Module]
    optimizer: object
    parallel_state: ParallelState


@dataclass
class SwitchReport:
    """What one switch did, in bytes and seconds; equal on every rank but for the times.

    `ahead_s` is the preparation beside training, `prepare_s` the part of it for which training stood;
    `swap_s` is the part of `commit_s` in which the new world becomes the current one, the rest lets go of the old one.
    `streams` says where the random streams come from; `shared` is what each rank gave by `Switcher.share`.
    """

    source: ParallelLayout
    target: ParallelLayout
    outcome: Literal["committed", "aborted", "refused"] = "refused"
    error: str | None = None
    number: int = 0
    ahead_s: float = 0.0
    prepare_s: float = 0.0
    transfer_s: float = 0.0
    verify_s: float = 0.0
    swap_s: float = 0.0
    commit_s: float = 0.0
    moved_bytes: int = 0
    minimum_bytes: int = 0
    local_bytes: int = 0
    max_send_bytes: int = 0
    max_recv_bytes: int = 0
    windows: int = 0
    peak_bytes: int = 0
    peak_step_bytes: int = 0
    memory_mode: str = "safe"
    verify: str = "digest"
    streams: str | None = None
    shared: Mapping[int, Any] = field(default_factory=dict)

    def add_totals(self, rows: Sequence[tuple[int, ...]], *, windows: int) -> None:
        """Fill in the bytes from what each rank has: (sent, received, local, least, peak, peak of a step); pure."""
        sent, received, local, least, peak, step = zip(*rows, strict=True)
        self.moved_bytes, self.local_bytes, self.minimum_bytes = sum(sent), sum(local), sum(least)
        self.max_send_bytes, self.max_recv_bytes = max(sent), max(received)
        self.peak_bytes, self.peak_step_bytes = max(peak), max(step)
        self.windows = windows
