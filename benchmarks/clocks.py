"""Hooks that note times in each rank; a module of its own, as ranks import what they are given by name."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun


def clocked(run: PretrainRun, *, prepared: list[bool]) -> None:
    """Note when each step begins and when each preparation begins and ends; prepare the chosen switches only."""
    from megatron_dynatrain.preparation import Preparation
    from megatron_dynatrain.switch import Switcher

    begins = run.record.extra.setdefault("begins", [])
    spans = run.record.extra.setdefault("spans", [])
    swaps = run.record.extra.setdefault("swaps", [])
    run.before_step.append(lambda *_: begins.append(time.perf_counter()))
    prepare, run_thread, switch = Switcher.prepare_ahead, Preparation._run, Switcher.switch

    def prepare_ahead(self: Switcher, *args: Any, **kwargs: Any) -> None:
        if prepared[self.committed]:
            prepare(self, *args, **kwargs)

    def timed(self: Preparation) -> None:
        began = time.perf_counter()
        run_thread(self)
        spans.append((began, time.perf_counter()))

    def noted(self: Switcher, *args: Any) -> Any:
        report = switch(self, *args)
        swaps.append(report.swap_s)
        return report

    Switcher.prepare_ahead, Preparation._run, Switcher.switch = prepare_ahead, timed, noted  # type: ignore[method-assign]


def note_begins(run: PretrainRun) -> None:
    begins = run.record.extra.setdefault("begins", [])
    run.before_step.append(lambda *_: begins.append(time.perf_counter()))
