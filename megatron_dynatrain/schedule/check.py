"""Whether every switch of a schedule fits the job, found out before the first iteration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.model_fit import batch_misfits, misfits, padded_vocab_size
from megatron_dynatrain.schedule.batches import FLAG, BatchSchedule
from megatron_dynatrain.schedule.clock import Clock, walk
from megatron_dynatrain.schedule.problems import Problem, ScheduleProblemsError
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target, layout_problem, name_layout, resolve_or_explain
from megatron_dynatrain.schedule.schema import Schedule, SwitchSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model and its batches that a layout has to divide.

    Args:
        num_layers: Transformer layers.
        hidden_size: Width of the model.
        num_attention_heads: Attention heads.
        num_query_groups: Key/value heads; the attention heads where it isn't given.
        ffn_hidden_size: Width of the MLP; 4 x hidden where it isn't given, as in Megatron.
        padded_vocab_size: Rows of the embedding, where they are fixed; None where they are pinned to fit the
            schedule (see `pinned_padded_vocab_size`).
        seq_length: Tokens per sample; None skips its checks.
        num_experts: Routed experts per MoE layer; None for a dense model.
        moe_ffn_hidden_size: Width of one expert; `ffn_hidden_size` where it isn't given.
        kv_channels: Width of an attention head; hidden size / heads where it isn't given.
        add_bias_linear: Whether linears have biases.
        global_batch_size: Samples per iteration at launch; None where they follow a schedule of batch sizes.
        eval_global_batch_size: Samples per step of an evaluation, the same under every layout; None without any.
        mtp_num_layers: Layers of multi-token prediction; None or 0 for none.
        tied_embeddings: Whether input and output embeddings are one parameter, as is Megatron's default.
        hybrid: Whether it is a HybridModel (`--hybrid-layer-pattern`).
        split_by_tp: Names and values of further sizes that tp must divide.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    padded_vocab_size: int | None = None
    seq_length: int | None = None
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    add_bias_linear: bool = False
    global_batch_size: int | None = None
    eval_global_batch_size: int | None = None
    mtp_num_layers: int | None = None
    tied_embeddings: bool = False
    hybrid: bool = False
    split_by_tp: tuple[tuple[str, int], ...] = ()


def check_schedule(
    schedule: Schedule,
    model: ModelSizes,
    launch: Target,
    world_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
    start_iteration: int = 0,
    start_samples: int | None = None,
    check_times: bool = True,
    batches: BatchSchedule | None = None,
) -> tuple[PlannedSwitch, ...]:
    """Return the switches of a schedule in full, each checked against the job; pure, the same on every rank.

    Args:
        schedule: The schedule; one that was read `partly` is checked as far as it goes, and refused.
        model: Sizes of the model and its batches.
        launch: What the job was launched on.
        world_size: Number of ranks.
        train_iters: Iterations of the whole training; None where it is given in samples.
        train_samples: Samples of the whole training; None where it is given in iterations.
        start_iteration: Completed iterations where this run starts: 0, or that of the checkpoint it resumes from.
        start_samples: Samples consumed there; those of `start_iteration` iterations where it isn't given.
        check_times: Whether the start is known, so that switches in the past, after the end and out of order are found,
            and which of several batch sizes each layout meets.
        batches: The batch sizes, where they follow Megatron's step schedule; None for those of launch and layouts.

    Raises:
        ScheduleError: With everything that is wrong: what could not be read, layouts that don't fit the world or the
            model, switches in the past, after the end or at the same boundary, keys that are not supported yet.
        ValueError: Nobody says how many samples an iteration has.
    """
    if batches is None:
        if model.global_batch_size is None:
            raise ValueError("an iteration has global_batch_size samples, or what a schedule of batch sizes says")
        batches = BatchSchedule.constant(model.global_batch_size)
    launch = replace(launch, global_batch_size=launch.global_batch_size or model.global_batch_size)
    planned, layout_problems = resolve_or_explain(schedule, launch, world_size)
    if start_samples is None:
        start_samples = batches.samples_after(0, start_iteration)
    start = Clock(iteration=start_iteration, samples=start_samples, batches=batches)
    times = _Times(start, train_iters, train_samples)
    tps = [launch.layout.tp, *(switch.target.layout.tp for switch in planned)]

    problems = [*schedule.problems, *_launch_problems(model, launch, tps), *layout_problems]
    for switch in planned:
        problems += _fit_problems(schedule, switch, model, launch, tps)
    if not batches.fixed:
        problems += _two_batch_sizes(schedule)
        if check_times:
            problems += _batch_problems(schedule, launch, planned, times)
    if check_times:
        told = {(problem.key, problem.message) for problem in problems}
        found = _time_problems(schedule, times)
        problems += [problem for problem in found if (problem.key, problem.message) not in told]
    if problems:
        raise ScheduleProblemsError(sorted(problems, key=lambda problem: problem.line or 0))
    return planned


def pinned_padded_vocab_size(vocab_size: int, divisible_by: int, tps: Iterable[int]) -> int:
    """Return the rows of the embedding table that fit every tp of a schedule.

    Megatron pads the vocabulary to a multiple of `--make-vocab-size-divisible-by` x tp, so that shapes, and with them
    losses, would change with tp. The size is pinned for the whole run instead: the smallest multiple of
    `divisible_by * lcm(tps)` that holds the vocabulary. It is at least what Megatron gives for every single tp, and a
    size that Megatron accepts for each. A tp met later (asked for at run time) that doesn't divide it is refused.
    Source: `calculate_padded_vocab_size` in `megatron/training/vocab_utils.py` of 0.19, for all tp at once.

    Args:
        vocab_size: Rows that are data.
        divisible_by: `--make-vocab-size-divisible-by`.
        tps: Tensor-parallel size of the launch layout and of every layout of the schedule.

    Raises:
        ValueError: A size is not positive, or no tp is given.
    """
    sizes = tuple(tps)
    if not sizes or min((vocab_size, divisible_by, *sizes)) < 1:
        raise ValueError(
            f"vocab_size, divisible_by and every tp must be positive, got {vocab_size}, {divisible_by}, {sizes}"
        )
    return padded_vocab_size(vocab_size, divisible_by, sizes)


@dataclass(frozen=True, slots=True)
class _Times:
    """Where a run starts, and where its training ends: in iterations, or else in samples, or else nobody knows."""

    start: Clock
    train_iters: int | None
    train_samples: int | None

    def end(self, clock: Clock) -> int | None:
        """Return the completed iterations at the end, if the batch size stays."""
        if self.train_iters is not None:
            return self.train_iters
        return None if self.train_samples is None else clock.last_iteration(self.train_samples)

    def last_boundary(self, clock: Clock, global_batch_size: int) -> int | None:
        """Return the last boundary after which an iteration of `global_batch_size` samples is left."""
        if self.train_iters is not None or self.train_samples is None:
            return None if self.train_iters is None else self.train_iters - 1
        if not clock.batches.fixed:
            return clock.last_iteration(self.train_samples) - 1
        return clock.last_iteration(self.train_samples - global_batch_size)


def _misfits(model: ModelSizes, target: Target, tps: Iterable[int]) -> list[LayoutError]:
    """Return everything of the model that doesn't fit a layout."""
    sizes = asdict(model) | {
        "num_query_groups": model.num_query_groups or model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size,
        "padded_vocab_size": model.padded_vocab_size or math.lcm(*tps),
        # Without a size at launch there is a schedule of batch sizes: see scheduled_misfits.
        "global_batch_size": model.global_batch_size and (target.global_batch_size or model.global_batch_size),
    }
    return list(misfits(target.layout, micro_batch_size=target.micro_batch_size, **sizes))


def _launch_problems(model: ModelSizes, launch: Target, tps: Iterable[int]) -> list[Problem]:
    return [_launch_problem(launch, error) for error in _misfits(model, launch, tps)]


def _launch_problem(launch: Target, error: LayoutError) -> Problem:
    return Problem(
        message=error.message,
        file=launch.where,
        key=error.subject or "",
        expected=str(error.expected),
        got=str(error.got),
        hint=error.hint,
    )


def scheduled_misfits(target: Target, batches: BatchSchedule, start: int, end: int | None) -> Iterator[LayoutError]:
    """Yield what is wrong with a layout under Megatron's step schedule, for each step that it meets; pure.

    Args:
        target: The layout.
        batches: The batch sizes; nothing is wrong with a fixed one, which `misfits` looks at.
        start: Samples consumed before its first iteration.
        end: Samples consumed after its last iteration, or more than before it; None where there is no last one.
    """
    met = () if batches.fixed else batches.met(start, end)
    for step in met:
        for error in batch_misfits(target.layout, "global_batch_size", step.size, target.micro_batch_size):
            expected, got = error.expected, f"{error.got} ({step})"
            yield LayoutError(error.message, subject=error.subject, expected=expected, got=got)
    for before, step in pairwise(met):
        if step.size < before.size:
            yield LayoutError(
                "Megatron stops where an iteration has fewer micro-batches than the one before",
                subject=FLAG,
                expected=f"at least {before.size}",
                got=f"{step.size} ({step})",
            )


def _batch_problems(
    schedule: Schedule, launch: Target, planned: Sequence[PlannedSwitch], times: _Times
) -> Iterator[Problem]:
    """Yield what is wrong with the batch sizes that launch and layouts meet."""
    clocks = (times.start, *walk(times.start, planned))
    end = times.end(clocks[-1])
    ends = [*(clock.samples for clock in clocks[1:]), None if end is None else clocks[-1].samples_at(end)]
    batches = times.start.batches
    for error in scheduled_misfits(launch, batches, clocks[0].samples, ends[0]):
        yield _launch_problem(launch, error)
    for switch, clock, until in zip(planned, clocks[1:], ends[1:], strict=True):
        for error in scheduled_misfits(switch.target, batches, clock.samples, until):
            yield layout_problem(schedule, schedule.switches[switch.index], error)


def _two_batch_sizes(schedule: Schedule) -> Iterator[Problem]:
    """Yield the batch sizes of layouts, in a job that has Megatron's step schedule."""
    for switch in schedule.switches:
        size = switch.layout.named().get("global_batch_size")
        if size is not None:
            yield schedule.source.problem(
                (*switch.layout_path, "global_batch_size"),
                f"there are two batch sizes ({name_layout(schedule, switch)})",
                expected=f"global_batch_size in layouts or {FLAG}, not both",
                got=f"{size} beside {FLAG}",
            )


def _fit_problems(
    schedule: Schedule, planned: PlannedSwitch, model: ModelSizes, launch: Target, tps: Iterable[int]
) -> list[Problem]:
    """Return what is not supported about a layout, and the sizes of the model that it doesn't divide."""
    switch = schedule.switches[planned.index]
    found = [layout_problem(schedule, switch, error) for error in _misfits(model, planned.target, tps)]
    return _unsupported(schedule, switch, planned.target, launch) + found


def _unsupported(schedule: Schedule, switch: SwitchSpec, target: Target, launch: Target) -> list[Problem]:
    """Return the ranks that a layout writes and the job doesn't have; those it inherits were complained of before."""
    named = switch.layout.named()
    unknown = sorted(set(target.layout.ranks) - set(launch.layout.ranks))
    if not unknown or named.get("ranks") is None:
        return []
    return [
        schedule.source.problem(
            (*switch.layout_path, "ranks"),
            f"the job has no ranks {unknown}",
            expected="ranks of the launch layout, in any order; those left out wait outside",
            got=str(named["ranks"]),
        )
    ]


def _time_problems(schedule: Schedule, times: _Times) -> list[Problem]:
    """Return the switches that never happen, or not in their order."""
    problems = []
    clocks = [times.start]
    before: SwitchSpec | None = None
    for switch in schedule.switches:
        global_batch_size = switch.layout.named().get("global_batch_size", clocks[-1].global_batch_size)
        problem = _past_problem(schedule, switch, times.start) or _end_problem(
            schedule, switch, times, clocks[-1], global_batch_size
        )
        boundary = _boundary(clocks, switch)
        if problem is None and before is not None and boundary <= clocks[-1].iteration:
            problem = _order_problem(schedule, switch, boundary, before, clocks[-1])
        if problem is not None:
            problems.append(problem)
        else:
            clocks.append(clocks[-1].at(boundary, global_batch_size))
            before = switch
    return problems


def _boundary(clocks: Sequence[Clock], switch: SwitchSpec) -> int:
    """Return the boundary of a switch, counted from the last clock that it is after, or else from the start."""
    return next(
        (
            at
            for at, clock in ((clock.boundary(switch.trigger), clock) for clock in reversed(clocks))
            if at > clock.iteration
        ),
        clocks[0].boundary(switch.trigger),
    )


def _order_problem(schedule: Schedule, switch: SwitchSpec, boundary: int, before: SwitchSpec, clock: Clock) -> Problem:
    line = schedule.source.line(before.path)
    return schedule.source.problem(
        (*switch.path, switch.trigger.kind),
        "switches must be in the order in which they happen, each at its own boundary",
        expected=f"a boundary after iteration {clock.iteration}, of the switch on line {line}",
        got=f"{switch.trigger.value}, the boundary after iteration {boundary}",
    )


def _past_problem(schedule: Schedule, switch: SwitchSpec, start: Clock) -> Problem | None:
    trigger = switch.trigger
    least = start.amount(trigger.kind, start.iteration)
    if trigger.value > least:
        return None
    return schedule.source.problem(
        (*switch.path, trigger.kind),
        "the switch is in the past",
        expected=f"more than {least}, where this run starts (iteration {start.iteration})",
        got=str(trigger.value),
        hint="delete the switches that have happened, and launch on the layout the job should go on with: later "
        "switches keep its value of every key that they don't name",
    )


def _end_problem(
    schedule: Schedule, switch: SwitchSpec, times: _Times, clock: Clock, global_batch_size: int
) -> Problem | None:
    last = times.last_boundary(clock, global_batch_size)
    if last is None or clock.boundary(switch.trigger) <= last:
        return None
    return schedule.source.problem(
        (*switch.path, switch.trigger.kind),
        "the switch never happens: no iteration is left after it",
        expected=f"at most {clock.amount(switch.trigger.kind, last)} (the training ends with iteration "
        f"{times.end(clock)})",
        got=str(switch.trigger.value),
    )
