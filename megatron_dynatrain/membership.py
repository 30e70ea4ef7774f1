"""Which processes take part in a switch; pure."""

from __future__ import annotations

from collections.abc import Collection

from megatron_dynatrain.errors import LayoutError, MissingSourceError, StateError
from megatron_dynatrain.layout import ParallelLayout


def members_of(source: ParallelLayout, target: ParallelLayout, lost: Collection[int] = ()) -> tuple[int, ...]:
    """Return the ranks that take part in a switch: those of either layout that are not lost, ascending."""
    return tuple(sorted({*source.ranks, *target.ranks} - set(lost)))


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


def no_live_copy(error: MissingSourceError, lost: Collection[int]) -> StateError:
    """Return what it means that a plan has no source for some elements, where ranks are lost."""
    return StateError(
        f"a state has no live copy: it was on ranks {sorted(lost)}, which are gone ({error.message})",
        phase="prepare",
        subject=error.subject,
        expected=error.expected,
        got=error.got,
        hint="start again from the last checkpoint; more --num-distributed-optimizer-instances keep copies",
    )
