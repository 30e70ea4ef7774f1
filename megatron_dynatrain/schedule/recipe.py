"""The recipe file: Megatron's flags and the schedules of a pretraining, one launch after the other (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from megatron_dynatrain.schedule.complaints import complain
from megatron_dynatrain.schedule.problems import Problem, ScheduleProblemsError, say
from megatron_dynatrain.schedule.schema import Schedule, Size, Strict, build_schedule
from megatron_dynatrain.schedule.source import Path, Source, read_source

FlagValue = bool | int | float | str | list[Any]


class _PhaseFile(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    flags: dict[str, Any] = Field(default_factory=dict)
    schedule: dict[str, Any]


class _RecipeFile(Strict):
    version: Literal[1]
    world_size: Size
    flags: dict[str, Any]
    phases: Annotated[list[_PhaseFile], Field(min_length=1)]


@dataclass(frozen=True)
class Phase:
    """One launch of a recipe.

    Args:
        name: Its name, unique in the recipe.
        path: Where it stands in the file.
        flags: Megatron's flags without `--`: those of the recipe, and over them those of the phase.
        flag_paths: Where each flag is written.
        schedule: Its switches.
    """

    name: str
    path: Path
    flags: Mapping[str, FlagValue]
    flag_paths: Mapping[str, Path]
    schedule: Schedule

    def words(self) -> list[str]:
        """Return the flags as words of a command line."""
        words: list[str] = []
        for name, value in self.flags.items():
            if value is False:
                continue
            words.append(f"--{name}")
            if value is not True:
                words += [str(item) for item in (value if isinstance(value, list) else [value])]
        return words


@dataclass(frozen=True)
class Recipe:
    """A recipe whose form is right; whether its schedules fit its flags is for `check_recipe` to say.

    Args:
        source: The file.
        world_size: Ranks of every launch.
        phases: The launches, in order.
    """

    source: Source
    world_size: int
    phases: tuple[Phase, ...]


def is_recipe(source: Source) -> bool:
    """Return whether a file means to be a recipe and not a schedule: by its keys."""
    keys = set(source.data) if isinstance(source.data, dict) else set()
    return bool(keys & {"phases", "flags", "world_size"}) and not keys & {"layouts", "switches"}


def load_recipe(path: str | FilePath) -> Recipe:
    """Read and validate a recipe file.

    Raises:
        ScheduleError: With all that is wrong, each with file, line, key, expected and got.
    """
    return build_recipe(read_source(path))


def build_recipe(source: Source) -> Recipe:
    """Validate a recipe that was read; see load_recipe."""
    problems = list(source.problems)
    parsed = None
    try:
        parsed = _RecipeFile.model_validate(source.data)
    except ValidationError as error:
        problems += complain(error, source, _keys_at)
    if parsed is None or problems:
        raise ScheduleProblemsError(sorted(problems, key=lambda problem: problem.line or 0))
    phases = []
    names: set[str] = set()
    for index, phase in enumerate(parsed.phases):
        path = ("phases", index)
        if phase.name in names:
            problems.append(
                source.problem((*path, "name"), "two phases have one name", expected="each once", got=phase.name)
            )
        names.add(phase.name)
        problems += _flag_problems(source, parsed.flags, ("flags",)) if index == 0 else []
        problems += _flag_problems(source, phase.flags, (*path, "flags"))
        places: dict[str, Path] = {name: ("flags", name) for name in parsed.flags}
        places |= {name: (*path, "flags", name) for name in phase.flags}
        try:
            schedule = build_schedule(source.part((*path, "schedule"), phase.schedule))
        except ScheduleProblemsError as error:
            problems += error.problems
        else:
            phases.append(Phase(phase.name, path, parsed.flags | phase.flags, places, schedule))
    if problems:
        raise ScheduleProblemsError(sorted(problems, key=lambda problem: problem.line or 0))
    return Recipe(source, parsed.world_size, tuple(phases))


def _flag_problems(source: Source, flags: Mapping[str, Any], path: Path) -> list[Problem]:
    """Return the flags that are not written as `name: value`."""
    problems = []
    for name, value in flags.items():
        if name.startswith("-") or "_" in name:
            plain = name.lstrip("-").replace("_", "-")
            problems.append(source.problem((*path, name), "a flag is written without --", expected=plain, got=name))
        if not isinstance(value, bool | int | float | str | list) or (isinstance(value, list) and not value):
            expected = "a number, a string, a list of them, or true"
            problems.append(source.problem((*path, name), "a flag without a value", expected=expected, got=say(value)))
    return problems


def _keys_at(path: Path) -> tuple[str, ...]:
    return tuple((_RecipeFile if path == () else _PhaseFile).model_fields)
