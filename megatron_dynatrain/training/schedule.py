"""The schedule of a job: read and checked from its arguments, before a model is built."""

from __future__ import annotations

from argparse import Namespace

from megatron_dynatrain.model_fit import padded_vocab_size
from megatron_dynatrain.schedule.check import ModelSizes, check_schedule
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target, resolve
from megatron_dynatrain.schedule.schema import Schedule, load_schedule
from megatron_dynatrain.training.arguments import DynamicOptions
from megatron_dynatrain.training.world_args import layout_of


def launch_target(args: Namespace) -> Target:
    """Return the layout that the job is launched with."""
    return Target(name=None, layout=layout_of(args), micro_batch_size=args.micro_batch_size, where="launch flags")


def model_sizes(args: Namespace) -> ModelSizes:
    """Return the sizes of the model that layouts are checked against."""
    return ModelSizes(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups or args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        padded_vocab_size=args.padded_vocab_size,
        seq_length=args.seq_length,
        global_batch_size=args.global_batch_size,
    )


def pin_vocabulary(args: Namespace, schedule: Schedule | None) -> None:
    """Pin the padded vocabulary to one size that fits the launch layout and every layout of the schedule.

    Without this Megatron would pad to a multiple of `--make-vocab-size-divisible-by` x tp at every build. A size that
    the user gave stays.
    """
    if args.padded_vocab_size is not None or args.vocab_size is None:
        return
    launch = launch_target(args)
    layouts = [launch.layout]
    if schedule is not None:
        layouts += [switch.target.layout for switch in resolve(schedule, launch, args.world_size)]
    args.padded_vocab_size = padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, [layout.tp for layout in layouts]
    )


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
            model_sizes(args),
            launch_target(args),
            world_size=args.world_size,
            train_iters=args.train_iters,
            train_samples=args.train_samples,
            start_iteration=start_iteration,
        )
    )
