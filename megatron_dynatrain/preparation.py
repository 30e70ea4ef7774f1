"""A target that is built in a background thread while training goes on, until the switch takes it over or drops it."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from megatron_dynatrain.errors import DeadlineError
from megatron_dynatrain.transport.device import current_gpu, use_gpu

if TYPE_CHECKING:
    from megatron_dynatrain.attempt import Attempt
    from megatron_dynatrain.layout import ParallelLayout
    from megatron_dynatrain.switch_types import SwitchReport

logger = logging.getLogger(__name__)


class Preparation:
    """One background thread that builds one attempt's target; it starts at once. Made by every rank at one boundary.

    Args:
        attempt: The attempt, not yet begun.
        layout: The layout it goes to.
        report: Its report; `ahead_s` is set here.
        inside: Entered by the thread while it builds.
        after: A preparation that was given up and whose thread may still have to notice; this one waits for its end.
    """

    def __init__(
        self,
        attempt: Attempt,
        layout: ParallelLayout,
        report: SwitchReport,
        inside: AbstractContextManager[object] | None = None,
        after: Preparation | None = None,
    ) -> None:
        self.attempt = attempt
        self.layout = layout
        self._report = report
        self._inside = inside or nullcontext()
        self._after = after
        self._gpu = current_gpu()
        self._error: BaseException | None = None
        attempt.begin()
        self._thread = threading.Thread(target=self._run, name="dynatrain-prepare", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            use_gpu(self._gpu)
            if self._after is not None:
                self._after._thread.join()  # its waits have deadlines; opening data has none
                self._after.abort()
                self._after = None
            with self._inside:
                self.attempt.build_ahead()
        except BaseException as error:  # whatever it is, the training thread must hear of it
            self._error = error
        finally:
            self._report.ahead_s = time.perf_counter() - began

    @property
    def done(self) -> bool:
        """Whether the thread has ended, well or not; local."""
        return not self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait until the target is built; at the boundary, on every rank.

        Raises:
            DynaTrainError: What went wrong in the thread, of this rank or, after the vote there, of another one.
            DeadlineError: The thread didn't end in time.
        """
        self._thread.join(seconds)
        if not self.done:
            self.attempt.council.cancelled = True
            raise DeadlineError(
                "the preparation of the switch did not end in time",
                rank=self.attempt.rank,
                phase="prepare",
                subject=self.layout.describe(),
                expected=f"done {seconds:g} s after the boundary",
                hint="raise --dynamic-parallelism-timeout, or prepare earlier (--dynamic-parallelism-prepare-ahead)",
            )
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def cancel(self, seconds: float) -> None:
        """Give the target up: stop the thread at its next vote, wait for it and let go of all that was built; local."""
        self.attempt.council.cancelled = True
        self._thread.join(seconds)
        self.abort()

    def abort(self) -> None:
        """Let go of all that was built; local. Where the thread still builds, it keeps what it has until it ends."""
        if self.done:
            self.attempt.abort()
        else:
            logger.error("rank %d: the preparation of %s goes on in vain", self.attempt.rank, self.layout.describe())
