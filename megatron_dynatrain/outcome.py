"""How a switch ends: seconds of its parts, the error that the caller gets, the record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dynatrain.errors import DynaTrainError, SwitchAborted, SwitchRefused, TransferError
from megatron_dynatrain.records import SwitchRecord
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


def record_of(report: SwitchReport, *, trigger: str, iteration: int, stall_s: float) -> SwitchRecord:
    """Return the record of a switch from its report."""
    return SwitchRecord(
        iteration=iteration,
        source=report.source.describe(),
        target=report.target.describe(),
        trigger=trigger,
        outcome=report.outcome,
        error=report.error,
        ahead_s=report.ahead_s,
        prepare_s=report.prepare_s,
        stall_s=stall_s,
        transfer_s=report.transfer_s,
        moved_bytes=report.moved_bytes,
        minimum_bytes=report.minimum_bytes,
        local_bytes=report.local_bytes,
        max_send_bytes=report.max_send_bytes,
        max_recv_bytes=report.max_recv_bytes,
        windows=report.windows,
        peak_bytes=report.peak_bytes,
        peak_step_bytes=report.peak_step_bytes,
        memory_mode=report.memory_mode,
        verify=report.verify,
        number=report.number,
        streams=report.streams,
    )
