"""The schedule file: layouts by name, and the switches between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from megatron_dynatrain.schedule.complaints import complain
from megatron_dynatrain.schedule.problems import Problem, ScheduleProblemsError, nearest, say
from megatron_dynatrain.schedule.source import Path, Source, parse_source, read_source
from megatron_dynatrain.schedule.triggers import Trigger

Size = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """A mapping of a file, with these keys and no others, and no conversion of types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class LayoutSpec(Strict):
    """The sizes a layout names; `model_fields_set` tells which. `null` means: off, as if never given."""

    tp: Size = 1
    cp: Size = 1
    ep: Size = 1
    etp: Size | None = None
    pp: Size = 1
    vpp: Size | None = None
    sequence_parallel: bool = False
    order: str = "tp-cp-ep-dp-pp"
    instances: Size = 1
    first: Size | None = None
    last: Size | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: str | None = None
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    micro_batch_size: Size = 1
    global_batch_size: Size = 1

    def named(self) -> dict[str, Any]:
        """Return the keys that were written, with their values."""
        return {name: getattr(self, name) for name in LAYOUT_KEYS if name in self.model_fields_set}


LAYOUT_KEYS: tuple[str, ...] = tuple(LayoutSpec.model_fields)


def _form(value: object) -> str | None:
    """Return the tag of the form that `to` of a switch has."""
    if isinstance(value, str):
        return "name"
    return "inline" if isinstance(value, dict) else None


class _SwitchFile(Strict):
    at_iteration: Size | None = None
    at_samples: Size | None = None
    to: Annotated[Annotated[str, Tag("name")] | Annotated[LayoutSpec, Tag("inline")], Discriminator(_form)]


class _ScheduleFile(Strict):
    version: Literal[1]
    layouts: dict[str, LayoutSpec] = Field(default_factory=dict)
    switches: Annotated[list[_SwitchFile], Field(min_length=1)]


@dataclass(frozen=True)
class SwitchSpec:
    """One switch as it is written: what it names, not yet what it means.

    Args:
        trigger: When.
        name: Name of the layout; None for one written in place.
        layout: The sizes it names.
        path: Where the switch stands in the file.
        layout_path: Where the layout stands in the file.
    """

    trigger: Trigger
    name: str | None
    layout: LayoutSpec
    path: Path
    layout_path: Path


@dataclass(frozen=True)
class Schedule:
    """A schedule whose form is right; whether it fits a job is for `check_schedule` to say.

    Args:
        source: The file, for the place of everything in it.
        layouts: The named layouts.
        switches: In the order in which they happen.
        problems: What can't be read, where the schedule was built from the rest (`partly`); none otherwise.
    """

    source: Source
    layouts: Mapping[str, LayoutSpec]
    switches: tuple[SwitchSpec, ...]
    problems: tuple[Problem, ...] = ()


def load_schedule(path: str | FilePath, *, partly: bool = False) -> Schedule:
    """Read and validate a schedule file.

    Args:
        path: The file.
        partly: Return the switches before the first one that can't be read, so that `check_schedule` tells what is
            wrong with them too. What can't be read is in the schedule's `problems`.

    Raises:
        ScheduleError: With all that is wrong, each with file, line, key, expected and got.
    """
    return build_schedule(read_source(path), partly=partly)


def parse_schedule(text: str, file: str = "<schedule>", *, partly: bool = False) -> Schedule:
    """Validate a schedule given as text; see load_schedule."""
    return build_schedule(parse_source(text, file), partly=partly)


def build_schedule(source: Source, *, partly: bool = False) -> Schedule:
    """Validate a schedule that was read; see load_schedule."""
    problems = list(source.problems)
    parsed = None
    try:
        parsed = _ScheduleFile.model_validate(source.data)
    except ValidationError as error:
        problems += complain(error, source, _keys_at)
        data = _readable(source.data, {detail["loc"][:2] for detail in error.errors(include_url=False)})
        parsed = None if data is None else _ScheduleFile.model_validate(data)
    if parsed is None or source.problems or (problems and not partly):
        raise ScheduleProblemsError(sorted(problems, key=lambda problem: problem.line or 0))
    switches: list[SwitchSpec] = []
    unread = 0
    for index, switch in enumerate(parsed.switches):
        spec = _switch(source, parsed, switch, ("switches", index))
        if isinstance(spec, Problem):
            problems.append(spec)
            unread += 1
        elif not unread or not partly:
            switches.append(spec)
    problems += _order_problems(source, switches)
    if problems and not (partly and switches):
        raise ScheduleProblemsError(sorted(problems, key=lambda problem: problem.line or 0))
    return Schedule(source, dict(parsed.layouts), tuple(switches), tuple(problems))


def _readable(data: object, bad: set[tuple[str | int, ...]]) -> dict[str, Any] | None:
    """Return a schedule up to its first switch that is bad or names a layout that is; None where that is nothing.

    The switches after it are left out, because nobody knows the values of the keys that they don't name.

    Args:
        data: The whole schedule.
        bad: Places of what is wrong, down to the switch or layout.
    """
    if not isinstance(data, dict) or any(len(place) < 2 for place in bad):
        return None
    layouts = {name: value for name, value in data.get("layouts", {}).items() if ("layouts", name) not in bad}
    switches = []
    for index, switch in enumerate(data["switches"]):
        if ("switches", index) in bad or (isinstance(switch["to"], str) and ("layouts", switch["to"]) in bad):
            break
        switches.append(switch)
    return {**data, "layouts": layouts, "switches": switches} if switches else None


def _keys_at(path: Path) -> tuple[str, ...]:
    """Return the keys that are valid in the mapping at a path."""
    if path == ():
        return tuple(_ScheduleFile.model_fields)
    if path[0] == "switches" and len(path) == 2:
        return tuple(_SwitchFile.model_fields)
    return LAYOUT_KEYS


def _switch(source: Source, parsed: _ScheduleFile, switch: _SwitchFile, path: Path) -> SwitchSpec | Problem:
    """Return one switch with its layout looked up, or what is wrong with it."""
    given: list[Trigger] = []
    if switch.at_iteration is not None:
        given.append(Trigger("at_iteration", switch.at_iteration))
    if switch.at_samples is not None:
        given.append(Trigger("at_samples", switch.at_samples))
    if len(given) != 1:
        got = "both" if given else "neither"
        return source.problem(path, "a switch needs one trigger", expected="either at_iteration or at_samples", got=got)
    if isinstance(switch.to, LayoutSpec):
        return SwitchSpec(given[0], None, switch.to, path, (*path, "to"))
    layout = parsed.layouts.get(switch.to)
    if layout is None:
        near = nearest(switch.to, tuple(parsed.layouts))
        return source.problem(
            (*path, "to"),
            f"unknown layout {switch.to!r}",
            expected=f"one of {', '.join(parsed.layouts)}" if parsed.layouts else "a layout under `layouts`",
            got=say(switch.to),
            hint=f"did you mean {near!r}?" if near else None,
        )
    return SwitchSpec(given[0], switch.to, layout, path, ("layouts", switch.to))


def _order_problems(source: Source, switches: list[SwitchSpec]) -> list[Problem]:
    """Return the switches that don't come after the one of the same kind before them.

    Iterations are compared with samples by `check_schedule`, which knows the global batch size.
    """
    problems = []
    latest: dict[str, SwitchSpec] = {}
    for switch in switches:
        kind, value = switch.trigger.kind, switch.trigger.value
        before = latest.get(kind)
        if before is not None and value <= before.trigger.value:
            problems.append(
                source.problem(
                    (*switch.path, kind),
                    "switches must be in the order in which they happen, each at its own boundary",
                    expected=f"more than {before.trigger.value}, of the switch on line {source.line(before.path)}",
                    got=str(value),
                )
            )
        else:
            latest[kind] = switch
    return problems
