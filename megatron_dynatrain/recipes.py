"""Whether the schedules of a recipe fit the flags it launches with; imports no Megatron.

The few flags that decide about layouts and batches are read here as Megatron's parser and `validate_args` would; all
others are Megatron's own business.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_dynatrain.errors import DynaTrainError
from megatron_dynatrain.schedule.batches import FLAG, BatchSchedule
from megatron_dynatrain.schedule.check import check_schedule
from megatron_dynatrain.schedule.problems import Problem, ScheduleProblemsError, nearest, say
from megatron_dynatrain.schedule.recipe import FlagValue, Phase, Recipe
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.training.arguments import batch_schedule, launch_target, model_sizes, refuse_unsupported

_REQUIRED = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size")
_BATCHES = ("global-batch-size", FLAG.lstrip("-"))
"""Flags of which a launch has one."""

_DEFAULTS: Mapping[str, FlagValue | None] = {
    **dict.fromkeys(_BATCHES),
    "group-query-attention": False,
    "num-query-groups": 1,
    "ffn-hidden-size": None,
    "kv-channels": None,
    "swiglu": False,
    "disable-bias-linear": False,
    "num-experts": None,
    "moe-ffn-hidden-size": None,
    "mtp-num-layers": None,
    "untie-embeddings-and-output-weights": False,
    "train-iters": None,
    "train-samples": None,
    "eval-iters": 100,
    "eval-global-batch-size": None,
    "tensor-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "pipeline-model-parallel-size": 1,
    "num-virtual-stages-per-pipeline-rank": None,
    "num-layers-per-virtual-pipeline-stage": None,
    "pipeline-model-parallel-layout": None,
    "sequence-parallel": False,
    "use-tp-pp-dp-mapping": False,
    "num-distributed-optimizer-instances": 1,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "account-for-embedding-in-pipeline-split": False,
    "account-for-loss-in-pipeline-split": False,
    "optimizer": "adam",
    "use-distributed-optimizer": False,
    "load": None,
    "finetune": False,
}
"""Megatron's defaults of the flags that are read here."""

_KINDS: Mapping[type, str] = {str: "a string", bool: "true or false", int: "an integer"}
_TEXTS = ("optimizer", "load", "pipeline-model-parallel-layout", FLAG.lstrip("-"))


@dataclass(frozen=True, slots=True)
class CheckedPhase:
    """One launch of a recipe whose schedule fits.

    Args:
        phase: The launch.
        launch: What it is launched on.
        switches: Its switches in full.
        batches: Samples per iteration at launch.
        starts_anew: Whether it starts at iteration 0; otherwise only its checkpoint says where.
    """

    phase: Phase
    launch: Target
    switches: tuple[PlannedSwitch, ...]
    batches: BatchSchedule
    starts_anew: bool


def check_recipe(recipe: Recipe) -> tuple[CheckedPhase, ...]:
    """Check every switch of every phase against the flags it is launched with; pure.

    Raises:
        ScheduleError: With all that is wrong, each at its line.
    """
    checked: list[CheckedPhase] = []
    problems: list[Problem] = []
    for phase in recipe.phases:
        try:
            checked.append(_check_phase(recipe, phase))
        except ScheduleProblemsError as error:
            problems += error.problems
    if problems:
        raise ScheduleProblemsError(sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0))
    return tuple(checked)


def _check_phase(recipe: Recipe, phase: Phase) -> CheckedPhase:
    problems = _value_problems(recipe, phase)
    if problems:
        raise ScheduleProblemsError(problems)
    args = _arguments(phase.flags, recipe.world_size)
    try:
        refuse_unsupported(args)
        place = f"{recipe.source.file}:{recipe.source.line(phase.path)}"
        launch = replace(launch_target(args), where=f"{place} launch flags")
        batches = batch_schedule(args)
    except DynaTrainError as error:
        raise ScheduleProblemsError([_launch_problem(recipe, phase, error)]) from error
    starts_anew = args.load is None or args.finetune
    switches = check_schedule(
        phase.schedule,
        model_sizes(args),
        launch,
        recipe.world_size,
        train_iters=None if args.train_samples else args.train_iters,
        train_samples=args.train_samples,
        check_times=starts_anew,
        batches=batches,
    )
    return CheckedPhase(phase, launch, switches, batches, starts_anew)


def _value_problems(recipe: Recipe, phase: Phase) -> list[Problem]:
    """Return flags that are missing, and those read here whose value has the wrong type."""
    problems = [_missing_problem(recipe, phase, name) for name in _REQUIRED if name not in phase.flags]
    given = [name for name in _BATCHES if name in phase.flags]
    if not given:
        problems.append(_missing_problem(recipe, phase, _BATCHES[0]))
    if len(given) > 1:
        message = f"two flags say the batch size (phase {phase.name!r})"
        expected = f"{given[0]} or {given[1]}, not both"
        problems.append(recipe.source.problem(phase.flag_paths[given[1]], message, expected=expected))
    for name in (*_REQUIRED, *_DEFAULTS):
        value = phase.flags.get(name)
        kind = str if name in _TEXTS else bool if _DEFAULTS.get(name) is False else int
        if value is not None and type(value) is not kind:
            place, expected = phase.flag_paths[name], _KINDS[kind]
            problems.append(
                recipe.source.problem(place, f"wrong value for {name!r}", expected=expected, got=say(value))
            )
    return problems


def _missing_problem(recipe: Recipe, phase: Phase, name: str) -> Problem:
    near = nearest(name, [flag for flag in phase.flags if flag not in (*_REQUIRED, *_DEFAULTS)])
    return recipe.source.problem(
        phase.flag_paths[near] if near else ("flags",),
        f"missing flag {name!r} (phase {phase.name!r})",
        expected="its value",
        got=repr(near) if near else "nothing",
    )


def _arguments(flags: Mapping[str, FlagValue], world_size: int) -> Namespace:
    """Return the flags as Megatron's arguments, with what `validate_args` derives from them."""
    values: dict[str, Any] = {**_DEFAULTS, **flags}
    args = Namespace(**{name.replace("-", "_"): value for name, value in values.items()}, world_size=world_size)
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = int(wide * 2 / 3 / 64) * 64 if args.swiglu else wide
    args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.add_bias_linear = not args.disable_bias_linear
    if args.global_batch_size is None:
        model = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
        args.global_batch_size = args.micro_batch_size * max(1, world_size // model)
    args.eval_global_batch_size = args.eval_global_batch_size or args.global_batch_size
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage:
        per_rank = args.num_layers // args.pipeline_model_parallel_size
        args.virtual_pipeline_model_parallel_size = per_rank // args.num_layers_per_virtual_pipeline_stage
    return args


def _launch_problem(recipe: Recipe, phase: Phase, error: DynaTrainError) -> Problem:
    """Return what is wrong with the launch, at the flag that says so, or else at the phase."""
    name = str(error.subject or "").lstrip("-").replace("_", "-")
    return recipe.source.problem(
        phase.flag_paths.get(name, phase.path),
        f"{error.message} (launch of phase {phase.name!r})",
        expected=None if error.expected is None else str(error.expected),
        got=None if error.got is None else str(error.got),
        hint=error.hint,
    )
