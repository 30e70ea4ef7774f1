"""The schedule of a job: read and checked from its arguments, before a model is built."""

from __future__ import annotations

from argparse import Namespace

from megatron_dynatrain.model_fit import padded_vocab_size
from megatron_dynatrain.schedule.check import check_schedule
from megatron_dynatrain.schedule.resolve import PlannedSwitch, resolve
from megatron_dynatrain.schedule.schema import Schedule, load_schedule
from megatron_dynatrain.training.arguments import DynamicOptions, launch_target, model_sizes


def pinned_vocabulary(args: Namespace, schedule: Schedule | None, tokens: int) -> int:
    """Return the one padded vocabulary size of the run: it fits the launch layout and every layout of the schedule.

    Without it Megatron would pad to a multiple of `--make-vocab-size-divisible-by` x tp of the launch layout.

    Args:
        args: Megatron's validated arguments.
        schedule: The job's schedule.
        tokens: Size of the tokenizer's vocabulary.
    """
    launch = launch_target(args)
    layouts = [launch.layout]
    if schedule is not None:
        layouts += [switch.target.layout for switch in resolve(schedule, launch, args.world_size)]
    return padded_vocab_size(tokens, args.make_vocab_size_divisible_by, [layout.tp for layout in layouts])


def read_schedule(options: DynamicOptions) -> Schedule | None:
    """Return the schedule of the flags; None where there is none.

    Raises:
        ScheduleError: The file is wrong; names file, line and key.
    """
    return load_schedule(options.schedule) if options.schedule is not None else None


def planned_switches(schedule: Schedule | None, args: Namespace, *, start_iteration: int) -> list[PlannedSwitch]:
    """Check every switch of the schedule and return them in order; the same on every rank.

    Raises:
        ScheduleError: Every switch that can't be done, with its line.
    """
    if schedule is None:
        return []
    return list(
        check_schedule(
            schedule,
            model_sizes(args, args.padded_vocab_size),
            launch_target(args),
            world_size=args.world_size,
            train_iters=args.train_iters,
            train_samples=args.train_samples,
            start_iteration=start_iteration,
            start_samples=args.consumed_train_samples if start_iteration else None,
        )
    )
