"""What the switches of a schedule mean for one job: every layout in full, chained from the launch layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_dynatrain.errors import DynaTrainError
from megatron_dynatrain.layout import ParallelLayout, PipelineSplit
from megatron_dynatrain.pipeline_split import LAYOUT_FLAG
from megatron_dynatrain.schedule.problems import Problem, ScheduleProblemsError
from megatron_dynatrain.schedule.schema import LAYOUT_KEYS, Schedule, SwitchSpec
from megatron_dynatrain.schedule.source import Path
from megatron_dynatrain.schedule.triggers import Trigger

SPLIT_KEYS: tuple[str, ...] = tuple(field.name for field in fields(PipelineSplit))
"""Keys of a layout that say how layers are spread over stages."""

_STAGE_KEYS = ("vpp", "first", "last", "layout")
"""Keys that were chosen for a number of stages and mean nothing for another."""


_OFF = {field.name: field.default for field in fields(PipelineSplit)}
"""What a dropped key of the split becomes."""

_SPLIT_WAYS = (("first", "last"), ("account_for_embedding", "account_for_loss"), ("layout",))
"""The ways of splitting a pipeline, of which one can be used at a time."""

_MODEL_SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("pp", "vpp", *SPLIT_KEYS),
    "num_attention_heads": ("tp",),
    "num_query_groups": ("tp",),
    "ffn_hidden_size": ("tp",),
    "padded_vocab_size": ("tp",),
    "seq_length": ("tp", "cp", "sequence_parallel"),
    "num_experts": ("ep",),
    "moe_ffn_hidden_size": ("etp", "tp"),
    "global_batch_size": ("global_batch_size", "micro_batch_size", "tp", "cp", "pp", "vpp"),
    "mtp_num_layers": ("pp",),
    "eval_global_batch_size": ("micro_batch_size", "tp", "cp", "pp", "vpp"),
}
"""Keys a layout can write behind a size of the model that it doesn't divide."""

_BEHIND: Mapping[str, tuple[str, ...]] = {
    "world size": ("tp", "cp", "pp"),
    "pipeline split": SPLIT_KEYS,
    LAYOUT_FLAG: ("layout",),
    **_MODEL_SIZES,
}
"""Keys a layout can write behind the subject of an error, where the subject is not such a key."""


@dataclass(frozen=True, slots=True)
class Target:
    """A layout to train under, in full.

    Args:
        name: Its name in the schedule; None for one written in place and for the launch layout.
        layout: The parallel layout.
        micro_batch_size: Samples per micro-batch.
        where: Its source as `file:line`, or `launch flags`.
        global_batch_size: Samples per iteration; None as long as no layout named one and the launch isn't known.
    """

    name: str | None
    layout: ParallelLayout
    micro_batch_size: int
    where: str
    global_batch_size: int | None = None

    def describe(self) -> str:
        """Return it as logs and records show it, e.g. `tp2 dp2`, with the name in front where there is one."""
        return f"{self.name}: {self.layout.describe()}" if self.name else self.layout.describe()


@dataclass(frozen=True, slots=True)
class PlannedSwitch:
    """One switch of a job.

    Args:
        trigger: When.
        target: What to train under afterwards.
        where: The switch in the schedule as `file:line`.
        index: Its place in `Schedule.switches`, from 0.
    """

    trigger: Trigger
    target: Target
    where: str
    index: int


def resolve(schedule: Schedule, launch: Target, world_size: int) -> tuple[PlannedSwitch, ...]:
    """Return the switches of a schedule with every layout in full.

    A key that a layout doesn't name keeps the value the running job has just before that switch: the launch layout's
    at first, then that of the layout switched to last. Some keys follow others where they aren't named:
    `sequence_parallel` becomes false where tp becomes 1; `vpp`, `first`, `last` and `layout` are dropped where pp
    changes, and `layout` where vpp changes (they describe the stages of another pipeline); naming one way of
    splitting the pipeline turns the other ways off; `etp` follows tp for as
    long as it was equal to tp at launch and no layout named it; `dp` is always what is left of the world.
    `null` turns a key off.

    Raises:
        ScheduleError: With every switch whose layout can't exist on this world.
    """
    planned, problems = resolve_or_explain(schedule, launch, world_size)
    if problems:
        raise ScheduleProblemsError(problems)
    return planned


def resolve_or_explain(
    schedule: Schedule, launch: Target, world_size: int
) -> tuple[tuple[PlannedSwitch, ...], tuple[Problem, ...]]:
    """Return the switches that can be resolved, and what is wrong with the others; see resolve.

    A layout that can't exist still gives later ones the values of the keys they don't name.
    """
    state = _launch_values(launch)
    planned: list[PlannedSwitch] = []
    problems: list[Problem] = []
    for index, switch in enumerate(schedule.switches):
        state = _next_values(state, switch.layout.named())
        if state["sequence_parallel"] and state["tp"] == 1:
            problems.append(_sequence_parallel_problem(schedule, switch))
            continue
        try:
            layout = _layout(state, world_size)
        except DynaTrainError as error:
            problems.append(layout_problem(schedule, switch, error))
            continue
        source = schedule.source
        target = Target(
            switch.name,
            layout,
            state["micro_batch_size"],
            f"{source.file}:{source.line(switch.layout_path)}",
            state["global_batch_size"],
        )
        planned.append(PlannedSwitch(switch.trigger, target, f"{source.file}:{source.line(switch.path)}", index))
    return tuple(planned), tuple(problems)


def place_of(switch: SwitchSpec, subject: str | None) -> Path:
    """Return the place in the file to blame: the one key behind a subject that the layout writes, else `to`.

    Args:
        switch: The switch.
        subject: The `subject` of an error of the layout or of the model's fit, e.g. `vpp`.
    """
    if subject is not None and subject.startswith((LAYOUT_FLAG, "pipeline layout")):
        subject = LAYOUT_FLAG  # the written layout itself follows
    keys = _BEHIND.get(subject or "", (subject,))
    written = [key for key in keys if key in switch.layout.model_fields_set]
    if len(written) == 1:
        return (*switch.layout_path, str(written[0]))
    return (*switch.path, "to")


def name_layout(schedule: Schedule, switch: SwitchSpec) -> str:
    """Return words for the layout of a switch: its trigger, and its name with the line where it is written."""
    if switch.name is None:
        return f"{switch.trigger}"
    return f"{switch.trigger}, layout {switch.name!r} of line {schedule.source.line(switch.layout_path)}"


def layout_problem(schedule: Schedule, switch: SwitchSpec, error: DynaTrainError) -> Problem:
    """Return a layout's own complaint, placed in the file."""
    place = place_of(switch, error.subject)
    size = f": {error.subject}" if error.subject in _MODEL_SIZES else ""
    return schedule.source.problem(
        place,
        f"{error.message}{size} ({name_layout(schedule, switch)})",
        expected=None if error.expected is None else str(error.expected),
        got=None if error.got is None else str(error.got),
        hint=error.hint,
    )


def _sequence_parallel_problem(schedule: Schedule, switch: SwitchSpec) -> Problem:
    return schedule.source.problem(
        place_of(switch, "sequence_parallel"),
        f"sequence_parallel needs tensor parallelism ({name_layout(schedule, switch)})",
        expected="tp of at least 2",
        got="tp 1",
        hint="leave sequence_parallel out: it is off where tp is 1",
    )


def _launch_values(launch: Target) -> dict[str, Any]:
    """Return the value of every key of a layout at launch; `etp` is None while it follows tp."""
    layout = launch.layout
    values = {name: getattr(layout, name) for name in LAYOUT_KEYS if hasattr(layout, name)}
    values |= {name: getattr(layout.split, name) for name in SPLIT_KEYS}
    values["micro_batch_size"] = launch.micro_batch_size
    values["global_batch_size"] = launch.global_batch_size
    values["etp"] = None if layout.etp == layout.tp else layout.etp
    return values


def _next_values(before: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values after a switch that names some keys."""
    after = dict(before) | dict(named)
    if after["vpp"] == 1:
        after["vpp"] = None  # Megatron says None where every stage is one chunk
    dropped: set[str] = set()
    if after["pp"] != before["pp"]:
        dropped |= set(_STAGE_KEYS)
    if after["vpp"] != before["vpp"]:
        dropped.add("layout")
    for way in _SPLIT_WAYS:
        if any(named.get(key) for key in way):
            dropped |= set(SPLIT_KEYS) - set(way)
    after |= {key: _OFF.get(key) for key in dropped - set(named)}
    if after["tp"] == 1 and "sequence_parallel" not in named:
        after["sequence_parallel"] = False
    return after


def _layout(values: Mapping[str, Any], world_size: int) -> ParallelLayout:
    sizes = {name: values[name] for name in ("tp", "cp", "ep", "pp", "vpp", "sequence_parallel", "order", "instances")}
    if values["etp"] is not None:
        sizes["etp"] = values["etp"]
    ranks = values["ranks"]
    return ParallelLayout.for_world(
        world_size if ranks is None else tuple(ranks),
        split=PipelineSplit(**{name: values[name] for name in SPLIT_KEYS}),
        **sizes,
    )
