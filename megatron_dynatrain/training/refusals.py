"""What a job may not use together with dynamic parallelism, as one table: the check, the messages and the README."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron_dynatrain.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Refusal:
    """A Megatron option that can't be carried through a switch.

    Args:
        flag: The option as the reader types it.
        dest: Its name in the parsed arguments.
        when: The values refused, in words.
        refused: Whether the parsed arguments have such a value; an argument that is missing is never refused.
        why: What would go wrong.
        instead: What to do.
    """

    flag: str
    dest: str
    when: str
    refused: Callable[[Namespace], bool]
    why: str
    instead: str


def _set(flag: str, dest: str, why: str, instead: str | None = None) -> Refusal:
    """Refuse an option that is given at all: true, a text, a non-empty list, a number other than 0."""
    return Refusal(flag, dest, "given", lambda args: bool(getattr(args, dest, None)), why, instead or f"drop {flag}")


def _other_than(flag: str, dest: str, value: str, why: str) -> Refusal:
    return Refusal(
        flag,
        dest,
        f"other than `{value}`",
        lambda args: (getattr(args, dest, None) or value) != value,
        why,
        f"use {flag} {value}",
    )


def _differs(flag: str, dest: str, other: str, why: str) -> Refusal:
    """Refuse an option whose value is not that of another one; not given means the same."""
    other_flag = "--" + other.replace("_", "-")
    return Refusal(
        flag,
        dest,
        f"other than `{other_flag}`",
        lambda args: getattr(args, dest, None) not in (None, getattr(args, other, None)),
        why,
        f"drop {flag}: it is then {other_flag}",
    )


def _scaled(flag: str, dest: str, unscaled: tuple[str, ...]) -> Refusal:
    """Refuse a dtype of optimizer states that Transformer Engine scales per shard; a name before parsing is done."""
    return Refusal(
        flag,
        dest,
        "other than " + " and ".join(f"`{name}`" for name in unscaled if name in ("fp32", "bf16")),
        lambda args: str(getattr(args, dest, None) or "fp32").removeprefix("torch.") not in unscaled,
        "states of this dtype have a scale per shard of the optimizer, which can't follow the elements",
        "use " + " or ".join(f"{flag} {name}" for name in unscaled if name in ("fp32", "bf16")),
    )


def _with_stages(flag: str, dest: str) -> Refusal:
    """Refuse a pattern of a HybridModel that has pipeline stages in it."""
    return Refusal(
        flag,
        dest,
        "a pattern with a stage end",
        lambda args: "|" in str(getattr(args, dest, None) or ""),
        "the stages that it writes down fit one pipeline size only",
        "write the layers without `|`: they are split evenly, or by first and last",
    )


_CONTEXT = "context-parallel groups of several levels are not rebuilt yet"
_FSDP = "parameters are sharded by FSDP and not by the distributed optimizer, whose shards are what is moved"
_SCALES = "scales and quantised copies are states that nobody moves yet"
_GROUPED = "one parameter holds all experts of a rank, and has no logical tensor per expert yet"
_MODEL = "its parameters have no logical tensors yet"
_GRAPHS = "a captured graph holds the addresses and groups of the old layout"
_BATCHES = "a later batch size may not be divisible by micro-batch size x dp of a later layout"
_UNTRIED = "it keeps objects of the layout that nobody rebuilds yet"

REFUSALS: tuple[Refusal, ...] = (
    _set("--use-megatron-fsdp", "use_megatron_fsdp", _FSDP, "use --use-distributed-optimizer instead"),
    _set("--use-torch-fsdp2", "use_torch_fsdp2", _FSDP, "use --use-distributed-optimizer instead"),
    _other_than("--optimizer", "optimizer", "adam", "only Adam's states (step and two moments) are known"),
    Refusal(
        "--use-distributed-optimizer",
        "use_distributed_optimizer",
        "not given",
        lambda args: not getattr(args, "use_distributed_optimizer", True),
        "the optimizer state is found through the shards of the distributed optimizer",
        "add --use-distributed-optimizer",
    ),
    _scaled("--main-params-dtype", "main_params_dtype", ("fp32", "float32")),
    _scaled("--exp-avg-dtype", "exp_avg_dtype", ("fp32", "float32", "bf16", "bfloat16")),
    _scaled("--exp-avg-sq-dtype", "exp_avg_sq_dtype", ("fp32", "float32", "bf16", "bfloat16")),
    _set("--optimizer-cuda-graph", "optimizer_cuda_graph", _GRAPHS),
    _set("--freeze-all-layers", "freeze_all_layers", "there is no optimizer whose shards could be moved"),
    _set(
        "--data-parallel-random-init",
        "data_parallel_random_init",
        "data-parallel ranks then have random streams of their own, which a switch would make equal",
    ),
    _set("--te-rng-tracker", "te_rng_tracker", "its streams are not carried yet"),
    _set("--use-nccl-ub", "nccl_ub", "the buffers are registered with communicators of the old layout"),
    _set("--fp8-format", "fp8", _SCALES),
    _set("--fp8-param-gather", "fp8_param_gather", _SCALES),
    _set("--fp4-format", "fp4", _SCALES),
    _set("--fp4-param-gather", "fp4_param_gather", _SCALES),
    _set("--te-precision-config-file", "te_precision_config_file", _SCALES),
    _set("--hierarchical-context-parallel-sizes", "hierarchical_context_parallel_sizes", _CONTEXT),
    _set("--hybrid-context-parallel", "hybrid_context_parallel", _CONTEXT),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        "tensor_parallel_num_weight_shards",
        "more than `--tensor-model-parallel-size`",
        lambda args: (
            (getattr(args, "tensor_parallel_num_weight_shards", None) or 1)
            > (getattr(args, "tensor_model_parallel_size", None) or 1)
        ),
        "weights sharded over more ranks than tensor parallelism has are not modelled",
        "drop --tensor-parallel-num-weight-shards",
    ),
    Refusal(
        "--experimental-attention-variant",
        "experimental_attention_variant",
        "other than `gated_delta_net`",
        lambda args: getattr(args, "experimental_attention_variant", None) not in (None, "gated_delta_net"),
        _MODEL,
        "use gated_delta_net, or a HybridModel",
    ),
    _set("--moe-single-grouped-weight", "moe_single_grouped_weight", _GROUPED),
    _set("--moe-single-grouped-bias", "moe_single_grouped_bias", _GROUPED),
    _with_stages("--hybrid-layer-pattern", "hybrid_layer_pattern"),
    _with_stages("--hybrid-override-pattern", "hybrid_override_pattern"),
    _set("--heterogeneous-layers-config-path", "heterogeneous_layers_config_path", _MODEL),
    _set("--heterogeneous-layers-config-encoded-json", "heterogeneous_layers_config_encoded_json", _MODEL),
    Refusal(
        "--dataloader-type",
        "dataloader_type",
        "`external`",
        lambda args: getattr(args, "dataloader_type", None) == "external",
        "a data loader with a state of its own can't be given to other data-parallel ranks without losing samples",
        "use --dataloader-type single, whose place in the data is the number of consumed samples",
    ),
    Refusal(
        "--dataloader-type",
        "dataloader_type",
        "`cyclic`",
        lambda args: getattr(args, "dataloader_type", None) == "cyclic",
        "its order of samples depends on the data-parallel size and the micro-batch size",
        "use --dataloader-type single: GPT data sets are shuffled anyway",
    ),
    _set("--full-validation", "full_validation", "the number of validation steps is fixed for the launch layout"),
    _set("--multiple-validation-sets", "multiple_validation_sets", _UNTRIED),
    _differs("--eval-micro-batch-size", "eval_micro_batch_size", "micro_batch_size", _BATCHES),
    _set(
        "--rampup-batch-size",
        "rampup_batch_size",
        "Megatron-Core 0.19 reads and ignores it",
        "use --step-batch-size-schedule",
    ),
    _set("--decrease-batch-size-if-needed", "decrease_batch_size_if_needed", _BATCHES),
    _set("--phase-transition-iterations", "phase_transition_iterations", "the job exits at iterations of its own"),
    _other_than("--cuda-graph-impl", "cuda_graph_impl", "none", _GRAPHS),
    _set("--enable-cuda-graph", "enable_cuda_graph", _GRAPHS),
    _set("--external-cuda-graph", "external_cuda_graph", _GRAPHS),
    _set("--tp-comm-overlap", "tp_comm_overlap", "its buffers belong to one tensor-parallel group"),
    _set("--use-sharp", "use_sharp", "it is bound to the first groups of the process"),
    _set("--cpu-offloading-num-layers", "cpu_offloading_num_layers", _UNTRIED),
    _set("--fine-grained-activation-offloading", "fine_grained_activation_offloading", _UNTRIED),
    _set("--ckpt-assume-constant-structure", "ckpt_assume_constant_structure", "the structure changes with the layout"),
    _other_than("--non-persistent-ckpt-type", "non_persistent_ckpt_type", "global", _UNTRIED),
    _set("--perform-rl-step", "perform_rl_step", "the loop of reinforcement learning is another one than train()"),
    _set("--inprocess-restart", "inprocess_restart", "it rebuilds the launch layout on its own"),
    _set("--fake-process-group", "fake_process_group", "nothing can be moved through it"),
    _set("--yaml-cfg", "yaml_cfg", "it replaces the parsed flags, those of dynamic parallelism too", "give flags"),
)


def refuse_unsupported(args: Namespace) -> None:
    """Refuse a job with options that can't be carried through a switch; call it where dynamic parallelism is on.

    Works before and after Megatron's `validate_args`, on every rank alike and without communication.

    Args:
        args: Megatron's parsed arguments.

    Raises:
        UnsupportedError: Names every such flag, its value, why, and what to do.
    """
    found = [row for row in REFUSALS if row.refused(args)]
    if not found:
        return
    if len(found) == 1:
        row = found[0]
        raise UnsupportedError(
            f"{row.flag} doesn't work with --dynamic-parallelism: {row.why}",
            phase="check",
            subject=row.flag,
            expected=_expected(row),
            got=_shown(args, row),
            hint=row.instead,
        )
    lines = "".join(
        f"\n  {row.flag}: {row.why}; expected: {_expected(row)}; got: {_shown(args, row)}; hint: {row.instead}"
        for row in found
    )
    raise UnsupportedError(f"{len(found)} options don't work with --dynamic-parallelism:{lines}", phase="check")


def refusals_table() -> str:
    """Return the table of refused options in Markdown, for the README."""
    rows = ["| Option | Refused when | Why | Instead |", "|---|---|---|---|"]
    rows += [f"| `{row.flag}` | {row.when} | {row.why} | {row.instead} |" for row in REFUSALS]
    return "\n".join(rows) + "\n"


def _expected(row: Refusal) -> str:
    if row.when.startswith("not "):
        return row.when.removeprefix("not ")
    return f"not {row.when}"


def _shown(args: Namespace, row: Refusal) -> str:
    value = getattr(args, row.dest, None)
    return "not given" if value is None or value is False else str(value)
