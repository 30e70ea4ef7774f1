"""The wait of a process that is outside of the current world."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from megatron_dynatrain.elastic.calls import Call, Calls
from megatron_dynatrain.errors import SwitchFailure

if TYPE_CHECKING:
    from megatron_dynatrain.switch import Switcher
    from megatron_dynatrain.switch_types import SwitchReport

logger = logging.getLogger(__name__)

OnCall = Callable[[Call], AbstractContextManager[object]]
"""Gives a context for what a parked process does because of a call."""


def join_next(
    job: Switcher, calls: Calls, seconds: float | None, inside: OnCall | None, around: OnCall | None
) -> SwitchReport | None:
    """Do what this parked process is called to, until a switch has brought it back; see `Switcher.join_next`."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        call = calls.next(None if end is None else max(0.0, end - time.monotonic()))
        if call is None or call.stage == "end":
            job.cancel_preparation()
            return None
        if call.stage == "cancel":
            job.cancel_preparation()
            continue
        if job.preparing is None:
            job.learn(call)
            if call.apart:
                job.prepare_ahead(call.target, inside=inside(call) if inside is not None else None)
        if call.stage == "switch":
            try:
                with around(call) if around is not None else nullcontext():
                    return job.switch(call.target)
            except SwitchFailure as refused:
                logger.error("rank %d stays outside: %s", job.rank, refused)
