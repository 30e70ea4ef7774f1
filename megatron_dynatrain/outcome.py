"""How a switch ends: seconds of its parts, and the error that the caller gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dynatrain.errors import DynaTrainError, SwitchAborted, SwitchRefused, TransferError
from megatron_dynatrain.switch_types import SwitchReport


def unexpected(error: Exception, rank: int) -> DynaTrainError:
    """Return an error that no part of the switch foresaw as one that says where it was."""
    return TransferError(
        f"{type(error).__name__}: {error}", rank=rank, hint=f"see the log of rank {rank}; this is a fault of the plugin"
    )


@contextmanager
def timed(report: SwitchReport, name: str) -> Iterator[None]:
    """Put the seconds of the block into a field of the report; local."""
    began = time.perf_counter()
    try:
        yield
    finally:
        setattr(report, name, time.perf_counter() - began)


def failure(report: SwitchReport, error: DynaTrainError) -> SwitchRefused | SwitchAborted:
    """Return what the caller gets for a switch whose outcome is `refused` or `aborted`."""
    kind = SwitchAborted if report.outcome == "aborted" else SwitchRefused
    outcome = kind(
        f"the switch from {report.source.describe()} to {report.target.describe()} was {report.outcome}; "
        f"training goes on with {report.source.describe()}: {error}"
    )
    outcome.report = report
    return outcome
