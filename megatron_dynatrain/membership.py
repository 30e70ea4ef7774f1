"""Which processes take part in a switch; pure."""

from __future__ import annotations

from collections.abc import Collection

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import ParallelLayout


def members_of(source: ParallelLayout, target: ParallelLayout) -> tuple[int, ...]:
    """Return the ranks that take part in a switch: those of either layout, ascending."""
    return tuple(sorted({*source.ranks, *target.ranks}))


def check_ranks(processes: Collection[int], target: ParallelLayout) -> None:
    """Check that a layout has ranks of the job only.

    Raises:
        LayoutError: Names those that the job doesn't have.
    """
    unknown = sorted(set(target.ranks) - set(processes))
    if unknown:
        raise LayoutError(
            "a layout asks for ranks that the job doesn't have",
            phase="prepare",
            subject="ranks",
            expected=f"some of ranks {sorted(processes)}, in any order",
            got=f"ranks {unknown} of {target.describe()}",
        )
