"""The schedule of a job: read and checked from its arguments, before a model is built."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from megatron_dynatrain.model_fit import padded_vocab_size
from megatron_dynatrain.schedule.check import check_schedule
from megatron_dynatrain.schedule.clock import Clock, RunLength, run_length
from megatron_dynatrain.schedule.resolve import PlannedSwitch, resolve
from megatron_dynatrain.schedule.schema import Schedule, load_schedule
from megatron_dynatrain.training.arguments import DynamicOptions, batch_schedule, launch_target, model_sizes


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
    """Return the schedule of the flags, as far as it can be read: its check refuses the rest; None where there is none.

    Raises:
        ScheduleError: The file is wrong; names file, line and key.
    """
    return load_schedule(options.schedule, partly=True) if options.schedule is not None else None


def planned_switches(
    schedule: Schedule | None, args: Namespace, *, start_iteration: int, check_times: bool = True
) -> list[PlannedSwitch]:
    """Check every switch of the schedule and return them in order; the same on every rank.

    Args:
        schedule: The job's schedule.
        args: Megatron's validated arguments.
        start_iteration: Completed iterations where the run starts.
        check_times: Whether that is known; not before a checkpoint is loaded.

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
            # Megatron sets train_iters in a job whose length is given in samples.
            train_iters=None if args.train_samples else args.train_iters,
            train_samples=args.train_samples,
            start_iteration=start_iteration,
            start_samples=(args.consumed_train_samples or None) if start_iteration else None,
            check_times=check_times,
            batches=batch_schedule(args),
        )
    )


def clock_of(args: Namespace, iteration: int) -> Clock:
    """Return the boundary after an iteration, which is that of now.

    Args:
        args: Megatron's arguments; the consumed samples are those of now.
        iteration: Completed iterations.
    """
    # Megatron does the same for old checkpoints that don't say how many samples were consumed, but only later.
    consumed = args.consumed_train_samples or iteration * args.global_batch_size
    return Clock(iteration=iteration, samples=consumed, batches=batch_schedule(args))


def planned_length(args: Namespace, pending: Iterable[PlannedSwitch], samples: int | None = None) -> RunLength:
    """Return how long the training is from where it is now, with the batch sizes of the pending switches.

    Args:
        args: Megatron's arguments; the iteration and the consumed samples are those of now.
        pending: Switches still to come, in order.
        samples: Training samples that there are; None for what the flags ask for.
    """
    now = clock_of(args, args.iteration)
    return run_length(now, pending, train_iters=args.train_iters, train_samples=samples or args.train_samples)
