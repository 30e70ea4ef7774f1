"""Functions that the fork server runs on a rank; importing this imports no Megatron."""

from __future__ import annotations

from typing import Any

from tests.ranks.context import RankContext


def check(context: RankContext, case: Any) -> Any:
    """See `tests.te.job.check`."""
    from tests.te import job

    return job.check(context, case)


def check_fault(context: RankContext, case: Any, spoil: Any) -> Any:
    """See `tests.te.job.check_fault`."""
    from tests.te import job

    return job.check_fault(context, case, spoil)


def refused_extra_state(context: RankContext, case: Any) -> str:
    """See `tests.te.job.refused_extra_state`."""
    from tests.te import job

    return job.refused_extra_state(context, case)
