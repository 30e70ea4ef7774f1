"""A layout that somebody asks for while the job runs: read and checked by the rules of a schedule (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_dynatrain.errors import ScheduleError
from megatron_dynatrain.schedule.check import ModelSizes, check_schedule, scheduled_misfits
from megatron_dynatrain.schedule.clock import Clock
from megatron_dynatrain.schedule.problems import Problem, ScheduleProblemsError
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target, layout_problem
from megatron_dynatrain.schedule.schema import Schedule, build_schedule
from megatron_dynatrain.schedule.source import Source
from megatron_dynatrain.schedule.triggers import Trigger

_PLACE = "switches[0].to"
"""Where what was asked for stands in the schedule that is made of it."""


@dataclass(frozen=True, slots=True)
class Asked(Trigger):
    """The trigger of a switch that somebody asked for; the ranks agree on its boundary.

    Args:
        request: Id of the request.
    """

    request: str = ""

    def __str__(self) -> str:
        """Return it as logs and records show it."""
        return f"request {self.request}"


def read_asked(to: str | Mapping[str, Any], request: str, schedule: Schedule | None) -> Schedule:
    """Return what was asked for as a schedule of one switch.

    Args:
        to: Name of a layout, or the keys of one.
        request: Id of the request.
        schedule: The job's own schedule, for its named layouts.

    Raises:
        ScheduleError: An unknown layout, an unknown key or a wrong value, with the nearest valid one.
    """
    own = schedule.source if schedule is not None else None
    layouts = own.data.get("layouts", {}) if own is not None and isinstance(own.data, dict) else {}
    data = {"version": 1, "layouts": layouts, "switches": [{"at_iteration": 1, "to": to}]}
    lines = {} if own is None else {path: line for path, line in own.key_lines.items() if path[:1] == ("layouts",)}
    source = Source("request" if own is None else own.file, data, lines)
    try:
        asked = build_schedule(source)
    except ScheduleProblemsError as error:
        raise _in_words_of_request(error) from None
    spec = replace(asked.switches[0], trigger=Asked("at_iteration", 1, request))
    return replace(asked, switches=(spec,))


def check_asked(
    asked: Schedule, current: Target, model: ModelSizes, now: Clock | None = None, until: int | None = None
) -> PlannedSwitch:
    """Return the switch that was asked for in full: a key that it doesn't name keeps the value of now.

    Args:
        asked: What `read_asked` returned.
        current: What the job trains under now.
        model: Sizes of its model and batches.
        now: The boundary of now, with the batch sizes to come; needed where these follow Megatron's step schedule.
        until: Samples consumed where the next planned switch or the end of the training comes; None where none does.

    Raises:
        ScheduleError: It doesn't fit the model, the world or the batches, or is what the job trains under already.
    """
    try:
        batches = None if now is None else now.batches
        world = current.layout.world_size
        (switch,) = check_schedule(asked, model, current, world, check_times=False, batches=batches)
        if now is not None:
            found = scheduled_misfits(switch.target, now.batches, now.samples, until)
            problems = [layout_problem(asked, asked.switches[0], error) for error in found]
            if problems:
                raise ScheduleProblemsError(problems)
    except ScheduleProblemsError as error:
        raise _in_words_of_request(error) from None
    if set(switch.target.layout.ranks) != set(current.layout.ranks):
        raise ScheduleError(
            "a request can't change which ranks take part yet",
            subject="--to ranks",
            expected=f"ranks {sorted(current.layout.ranks)}, in any order",
            got=list(switch.target.layout.ranks),
            hint="a switch of the schedule can",
        )
    if _sizes(switch.target) == _sizes(current):
        raise ScheduleError("already so: the job trains under this layout", got=switch.target.describe())
    return switch


def _sizes(target: Target) -> tuple[object, ...]:
    return target.layout, target.micro_batch_size, target.global_batch_size


def _in_words_of_request(error: ScheduleProblemsError) -> ScheduleProblemsError:
    """Return the problems without the places of a schedule that nobody wrote; those of a named layout keep theirs."""

    def mend(problem: Problem) -> Problem:
        if not problem.key.startswith("switches"):
            return problem
        key = problem.key.removeprefix(_PLACE).lstrip(".")
        return replace(problem, file="--to", line=None, key=key)

    return ScheduleProblemsError(mend(problem) for problem in error.problems)
