"""The flags of dynamic parallelism, in Megatron's own parser; imports no Megatron."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from megatron_dynatrain.errors import ScheduleError
from megatron_dynatrain.layout import DEFAULT_ORDER, ParallelLayout, PipelineSplit
from megatron_dynatrain.schedule.batches import BatchSchedule, parse_batches
from megatron_dynatrain.schedule.check import ModelSizes
from megatron_dynatrain.schedule.resolve import Target
from megatron_dynatrain.training.refusals import refusals_table, refuse_unsupported

__all__ = [
    "DynamicOptions",
    "add_dynamic_parallelism_args",
    "batch_schedule",
    "launch_target",
    "model_sizes",
    "refusals_table",
    "refuse_unsupported",
    "validate_options",
]

MemoryMode = Literal["auto", "safe", "lean"]
VerifyMode = Literal["off", "digest", "full"]

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_PREPARE_AHEAD = 20
"""Steps; enough for seconds of preparation beside short steps, while idle groups don't wait for hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicOptions:
    """The parsed and checked flags of dynamic parallelism.

    Args:
        enabled: Whether layouts may change at all.
        schedule: The schedule file; None for no switches.
        directory: Where reports are kept.
        memory: Memory mode.
        verify: How the state after a switch is compared with the state before it.
        timeout_s: Seconds after which a wait inside a switch fails.
        prepare_ahead: Steps before a planned switch at which its preparation begins; 0 prepares at the boundary.
    """

    enabled: bool
    schedule: Path | None
    directory: Path
    memory: MemoryMode
    verify: VerifyMode
    timeout_s: float
    prepare_ahead: int = DEFAULT_PREPARE_AHEAD


def add_dynamic_parallelism_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the group "dynamic parallelism" to a parser and return the parser (an `extra_args_provider` of Megatron)."""
    group = parser.add_argument_group("dynamic parallelism")
    group.add_argument(
        "--dynamic-parallelism",
        action="store_true",
        help="Let the parallel layout (tensor, pipeline and data parallel sizes) change while the job runs, between "
        "two iterations and without a restart. Off: the plugin does nothing.",
    )
    group.add_argument(
        "--dynamic-parallelism-schedule",
        metavar="FILE",
        help="YAML file that says at which iterations or numbers of samples to switch to which layout. Every switch "
        "in it is checked against the model and the world before the first iteration; see `dynatrain check`.",
    )
    group.add_argument(
        "--dynamic-parallelism-dir",
        metavar="DIR",
        help="Directory of reports (switches.jsonl, status.json) and of requests to the running job. Default: "
        "`dynatrain` under --save, or ./dynatrain.",
    )
    group.add_argument(
        "--dynamic-parallelism-memory",
        choices=("auto", "safe", "lean"),
        default="auto",
        help="safe keeps the old state until the new one is verified, so that a failed switch is rolled back; auto "
        "takes safe where it fits and refuses the switch where it doesn't; lean is not available yet and "
        "refused at start. Default: auto.",
    )
    group.add_argument(
        "--dynamic-parallelism-verify",
        choices=("off", "digest", "full"),
        default="digest",
        help="How the state after a switch is compared with the state before it: digest compares order-sensitive "
        "digests of every logical tensor, full compares all bits (slow, needs memory for it), off trusts the "
        "transfer. Default: digest.",
    )
    group.add_argument(
        "--dynamic-parallelism-timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"A wait inside a switch fails after this long, naming rank and phase. Default: {DEFAULT_TIMEOUT_S:g}.",
    )
    group.add_argument(
        "--dynamic-parallelism-prepare-ahead",
        type=int,
        default=DEFAULT_PREPARE_AHEAD,
        metavar="STEPS",
        help="Begin to prepare a planned switch this many steps before it, in a background thread, so that training "
        f"stands only for the transfer. 0: prepare at the boundary. Default: {DEFAULT_PREPARE_AHEAD}.",
    )
    return parser


def validate_options(args: Namespace) -> DynamicOptions:
    """Return the checked options of dynamic parallelism; touches no file, every rank alike.

    Args:
        args: Megatron's parsed arguments, before or after its `validate_args`.

    Raises:
        ScheduleError: A flag has a value that can't be meant.
    """
    schedule = args.dynamic_parallelism_schedule
    if schedule is not None and not args.dynamic_parallelism:
        raise _wrong_flag(
            "--dynamic-parallelism-schedule",
            "a schedule is given, but layouts may not change",
            "--dynamic-parallelism beside it",
            schedule,
        )
    if not args.dynamic_parallelism_timeout > 0:
        raise _wrong_flag(
            "--dynamic-parallelism-timeout",
            "a wait needs some time",
            "more than 0 seconds",
            args.dynamic_parallelism_timeout,
        )
    if args.dynamic_parallelism_prepare_ahead < 0:
        raise _wrong_flag(
            "--dynamic-parallelism-prepare-ahead",
            "a number of steps can't be negative",
            "0 or more steps",
            args.dynamic_parallelism_prepare_ahead,
        )
    if args.dynamic_parallelism_memory == "lean":
        raise _wrong_flag(
            "--dynamic-parallelism-memory", "lean memory mode is not available yet", "auto or safe", "lean"
        )
    directory = args.dynamic_parallelism_dir
    if directory is None:
        directory = Path(getattr(args, "save", None) or ".") / "dynatrain"
    return DynamicOptions(
        enabled=args.dynamic_parallelism,
        schedule=None if schedule is None else Path(schedule),
        directory=Path(directory),
        memory=cast(MemoryMode, args.dynamic_parallelism_memory),
        verify=cast(VerifyMode, args.dynamic_parallelism_verify),
        timeout_s=args.dynamic_parallelism_timeout,
        prepare_ahead=args.dynamic_parallelism_prepare_ahead,
    )


def launch_target(args: Namespace) -> Target:
    """Return the layout that a job was launched on, from arguments that Megatron has validated.

    Raises:
        LayoutError: The layout can't exist.
        UnsupportedError: Its written pipeline layout has parts that can't be moved.
    """
    split = PipelineSplit(
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        account_for_embedding=args.account_for_embedding_in_pipeline_split,
        account_for_loss=args.account_for_loss_in_pipeline_split,
        layout=args.pipeline_model_parallel_layout,
    )
    layout = ParallelLayout.for_world(
        args.world_size,
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        instances=args.num_distributed_optimizer_instances,
        split=split,
    )
    return Target(None, layout, args.micro_batch_size, "launch flags", _global_batch_size(args))


def batch_schedule(args: Namespace) -> BatchSchedule:
    """Return the samples per iteration that the arguments say, from here on if no switch changes them.

    Raises:
        ScheduleError: `--step-batch-size-schedule` can't be read.
    """
    text = getattr(args, "step_batch_size_schedule", None)
    return BatchSchedule.constant(args.global_batch_size) if text is None else parse_batches(text, args.seq_length)


def _global_batch_size(args: Namespace) -> int | None:
    """Return the global batch size; None beside a schedule of them, where Megatron sets micro-batch x dp of launch."""
    given = getattr(args, "step_batch_size_schedule", None) is None
    return args.global_batch_size if given else None


def model_sizes(args: Namespace, padded_vocab_size: int | None = None) -> ModelSizes:
    """Return the sizes of the job's model and batches, from arguments that Megatron has validated.

    Args:
        args: Megatron's validated arguments.
        padded_vocab_size: Rows of the embedding where they can't be chosen any more; None where they will be pinned
            to fit the schedule. `args.padded_vocab_size` isn't read: Megatron computes it for the launch layout alone.
    """
    return ModelSizes(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        # Megatron's parser gives 1 query group to jobs without grouped queries.
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        padded_vocab_size=padded_vocab_size,
        seq_length=args.seq_length,
        num_experts=args.num_experts,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        kv_channels=args.kv_channels,
        add_bias_linear=args.add_bias_linear,
        global_batch_size=_global_batch_size(args),
        eval_global_batch_size=args.eval_global_batch_size if args.eval_iters else None,
        mtp_num_layers=args.mtp_num_layers,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        hybrid=getattr(args, "hybrid_layer_pattern", None) is not None,
        split_by_tp=tuple(_split_by_tp(args)),
    )


def _split_by_tp(args: Namespace) -> Iterator[tuple[str, int]]:
    """Yield the sizes of Mamba and gated-delta-net layers that tensor parallelism splits."""
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    if "M" in pattern:  # Megatron's mixer is twice as wide as the model, unless its heads are given
        yield "mamba_num_heads", args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
        yield "mamba_num_groups", args.mamba_num_groups
    if "G" in pattern or getattr(args, "experimental_attention_variant", None) == "gated_delta_net":
        yield "linear_num_key_heads", args.linear_num_key_heads
        yield "linear_num_value_heads", args.linear_num_value_heads


def _wrong_flag(flag: str, message: str, expected: str, got: object) -> ScheduleError:
    return ScheduleError(message, phase="check", subject=flag, expected=expected, got=got)
