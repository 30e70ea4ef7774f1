"""The flags of dynamic parallelism, and the Megatron options that are refused beside them; without Megatron."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_dynatrain.errors import LayoutError, ScheduleError, UnsupportedError
from megatron_dynatrain.layout import ParallelLayout, PipelineSplit
from megatron_dynatrain.schedule.batches import BatchSchedule
from megatron_dynatrain.schedule.clock import Clock
from megatron_dynatrain.training.arguments import (
    DynamicOptions,
    add_dynamic_parallelism_args,
    batch_schedule,
    launch_target,
    model_sizes,
    refusals_table,
    refuse_unsupported,
    validate_options,
)
from megatron_dynatrain.training.refusals import REFUSALS
from megatron_dynatrain.training.schedule import clock_of


def parse(*flags: str, **others: Any) -> Namespace:
    parser = ArgumentParser(allow_abbrev=False)
    add_dynamic_parallelism_args(parser)
    return parser.parse_args(list(flags), Namespace(**others))


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert validate_options(parse()) == DynamicOptions(
        enabled=False,
        schedule=None,
        directory=Path("dynatrain"),
        memory="auto",
        verify="digest",
        timeout_s=300.0,
    )


def test_every_flag_is_read() -> None:
    args = parse(
        "--dynamic-parallelism",
        "--dynamic-parallelism-schedule=s.yaml",
        "--dynamic-parallelism-dir=out",
        "--dynamic-parallelism-memory=safe",
        "--dynamic-parallelism-verify=full",
        "--dynamic-parallelism-timeout=7.5",
        save="checkpoints",
    )
    assert validate_options(args) == DynamicOptions(
        enabled=True, schedule=Path("s.yaml"), directory=Path("out"), memory="safe", verify="full", timeout_s=7.5
    )


def test_lean_is_refused_at_start() -> None:
    with pytest.raises(ScheduleError, match="--dynamic-parallelism-memory; expected: auto or safe; got: lean"):
        validate_options(parse("--dynamic-parallelism-memory=lean"))


def test_reports_go_under_the_checkpoints_where_there_are_any() -> None:
    assert validate_options(parse(save="ckpt")).directory == Path("ckpt/dynatrain")
    assert validate_options(parse(save=None)).directory == Path("dynatrain")


@pytest.mark.parametrize("flag", ["--dynamic-parallelism-memory=big", "--dynamic-parallelism-verify=some"])
def test_a_word_that_is_no_choice_is_wrong_usage(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flag)
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_help_shows_the_flags_in_a_group_of_their_own() -> None:
    text = add_dynamic_parallelism_args(ArgumentParser()).format_help()
    group = text.split("dynamic parallelism:\n")[1]
    for flag in ("", "-schedule FILE", "-dir DIR", "-memory {auto,safe,lean}", "-verify {off,digest,full}"):
        assert f"--dynamic-parallelism{flag}" in group
    assert "--dynamic-parallelism-timeout SECONDS" in group


def test_a_schedule_without_the_switch_that_enables_it_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate_options(parse("--dynamic-parallelism-schedule=s.yaml"))
    assert caught.value.subject == "--dynamic-parallelism-schedule"
    assert caught.value.expected == "--dynamic-parallelism beside it"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_timeout_that_is_not_positive_is_refused(seconds: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate_options(parse(f"--dynamic-parallelism-timeout={seconds}"))
    assert caught.value.subject == "--dynamic-parallelism-timeout"


def job(**changes: Any) -> Namespace:
    """Return arguments of a job that is supported, as far as the table reads them."""
    defaults: dict[str, Any] = {row.dest: None for row in REFUSALS}
    defaults |= {
        "use_distributed_optimizer": True,
        "optimizer": "adam",
        "num_distributed_optimizer_instances": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "tensor_model_parallel_size": 2,
        "tensor_parallel_num_weight_shards": 2,
        "dataloader_type": "single",
        "cuda_graph_impl": "none",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "eval_global_batch_size": 8,
        "eval_micro_batch_size": 2,
        "fp16": True,
        "loss_scale": None,
    }
    return Namespace(**defaults | changes)


def test_a_dense_job_with_the_distributed_optimizer_is_supported() -> None:
    refuse_unsupported(job())
    refuse_unsupported(job(non_persistent_ckpt_type="global", dataloader_type=None, cuda_graph_impl=None))


def test_arguments_of_another_release_that_lack_an_option_are_supported() -> None:
    refuse_unsupported(Namespace(use_distributed_optimizer=True))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "--use-megatron-fsdp": ({"use_megatron_fsdp": True}, "sharded by FSDP"),
    "--use-torch-fsdp2": ({"use_torch_fsdp2": True}, "sharded by FSDP"),
    "--optimizer": ({"optimizer": "dist_muon"}, "only Adam's states"),
    "--use-distributed-optimizer": ({"use_distributed_optimizer": False}, "shards of the distributed optimizer"),
    "--main-params-dtype": ({"main_params_dtype": "fp16"}, "scale per shard"),
    "--exp-avg-dtype": ({"exp_avg_dtype": "fp8"}, "scale per shard"),
    "--exp-avg-sq-dtype": ({"exp_avg_sq_dtype": "torch.float16"}, "scale per shard"),
    "--fp8-format": ({"fp8": "hybrid"}, "scales"),
    "--fp4-format": ({"fp4": "e2m1"}, "scales"),
    "--tensor-parallel-num-weight-shards": ({"tensor_parallel_num_weight_shards": 4}, "not modelled"),
    "--hybrid-layer-pattern": ({"hybrid_layer_pattern": "M*|M*"}, "fit one pipeline size only"),
    "--hybrid-override-pattern": ({"hybrid_override_pattern": "*|M"}, "fit one pipeline size only"),
    "--dataloader-type": ({"dataloader_type": "external"}, "a data loader with a state of its own"),
    "--full-validation": ({"full_validation": True}, "validation steps"),
    "--eval-micro-batch-size": ({"eval_micro_batch_size": 4}, "later batch size"),
    "--rampup-batch-size": ({"rampup_batch_size": ["8", "8", "64"]}, "reads and ignores it"),
    "--cuda-graph-impl": ({"cuda_graph_impl": "local"}, "captured graph"),
    "--enable-cuda-graph": ({"enable_cuda_graph": True}, "captured graph"),
    "--non-persistent-ckpt-type": ({"non_persistent_ckpt_type": "local"}, "nobody rebuilds"),
    "--perform-rl-step": ({"perform_rl_step": True}, "reinforcement learning"),
}


@pytest.mark.parametrize("flag", WRONG)
def test_an_option_that_can_not_be_carried_through_a_switch_is_refused_by_name(flag: str) -> None:
    changes, why = WRONG[flag]
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(job(**changes))
    error = caught.value
    assert error.subject == flag
    assert f"{flag} doesn't work with --dynamic-parallelism: " in error.message
    assert why in error.message
    assert error.hint


def test_the_refused_value_is_shown_with_what_is_expected() -> None:
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(job(dataloader_type="cyclic"))
    assert str(caught.value) == (
        "[phase check] --dataloader-type doesn't work with --dynamic-parallelism: its order of samples depends on the"
        " data-parallel size and the micro-batch size; subject: --dataloader-type; expected: not `cyclic`; got: cyclic;"
        " hint: use --dataloader-type single: GPT data sets are shuffled anyway"
    )
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(job(use_distributed_optimizer=False))
    assert (caught.value.expected, caught.value.got) == ("given", "not given")


def test_all_refused_options_are_listed() -> None:
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(job(hybrid_layer_pattern="M*|M*", optimizer="sgd"))
    lines = str(caught.value).split("\n")
    assert lines[0] == "[phase check] 2 options don't work with --dynamic-parallelism:"
    assert [line.strip().split(":")[0] for line in lines[1:]] == ["--optimizer", "--hybrid-layer-pattern"]
    assert "got: sgd" in lines[1]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row.flag} {row.when}")
def test_every_row_of_the_table_refuses_something_and_not_a_supported_job(row: Any) -> None:
    assert not row.refused(job())
    bad = {
        "use_distributed_optimizer": False,
        "dataloader_type": row.when.strip("`"),
        "tensor_parallel_num_weight_shards": 4,
        "hybrid_layer_pattern": "*-|*-",
        "hybrid_override_pattern": "*-|*",
    }
    assert row.refused(job(**{row.dest: bad.get(row.dest, 3)}))


def test_the_table_of_the_readme_has_a_row_per_refusal() -> None:
    lines = refusals_table().splitlines()
    assert lines[:2] == ["| Option | Refused when | Why | Instead |", "|---|---|---|---|"]
    assert len(lines) == len(REFUSALS) + 2
    assert all(line.count(" | ") == 3 for line in lines[2:])
    assert any(line.startswith("| `--dataloader-type` | `external` | a data loader") for line in lines)


def launch_args(**changes: Any) -> Namespace:
    defaults: dict[str, Any] = {
        "world_size": 8,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": True,
        "use_tp_pp_dp_mapping": False,
        "num_distributed_optimizer_instances": 1,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None,
        "micro_batch_size": 2,
        "global_batch_size": 8,
    }
    return Namespace(**defaults | changes)


def test_the_launch_layout_is_read_from_the_arguments() -> None:
    target = launch_target(launch_args(decoder_first_pipeline_num_layers=3, use_tp_pp_dp_mapping=True))
    assert target.layout == ParallelLayout(
        tp=2, pp=2, dp=2, sequence_parallel=True, order="tp-cp-ep-pp-dp", split=PipelineSplit(first=3)
    )
    assert (target.name, target.micro_batch_size, target.where) == (None, 2, "launch flags")
    assert target.global_batch_size == 8
    assert launch_target(launch_args(step_batch_size_schedule="0:8")).global_batch_size is None
    with pytest.raises(LayoutError):
        launch_target(launch_args(tensor_model_parallel_size=3))


def test_the_sizes_of_the_model_are_read_from_the_arguments() -> None:
    args = Namespace(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=1,
        group_query_attention=False,
        ffn_hidden_size=256,
        seq_length=32,
        num_experts=None,
        moe_ffn_hidden_size=None,
        kv_channels=8,
        add_bias_linear=True,
        global_batch_size=8,
        eval_global_batch_size=4,
        eval_iters=0,
        hybrid_layer_pattern=None,
        mtp_num_layers=None,
        untie_embeddings_and_output_weights=False,
        padded_vocab_size=128,
    )
    assert model_sizes(args).num_query_groups == 8
    assert model_sizes(args).padded_vocab_size is None
    assert (model_sizes(args).kv_channels, model_sizes(args).add_bias_linear) == (8, True)
    args.group_query_attention = True
    assert model_sizes(args, 512).num_query_groups == 1
    assert model_sizes(args, 512).padded_vocab_size == 512
    assert model_sizes(args).eval_global_batch_size is None
    args.eval_iters = 2
    assert model_sizes(args).eval_global_batch_size == 4
    assert (model_sizes(args).mtp_num_layers, model_sizes(args).tied_embeddings) == (None, True)
    args.step_batch_size_schedule = "0:8"
    assert model_sizes(args).global_batch_size is None
    args.mtp_num_layers, args.untie_embeddings_and_output_weights = 2, True
    assert (model_sizes(args).mtp_num_layers, model_sizes(args).tied_embeddings) == (2, False)


def test_a_schedule_of_batch_sizes_takes_the_place_of_a_size() -> None:
    args = Namespace(global_batch_size=8, seq_length=16, step_batch_size_schedule=None)
    assert batch_schedule(args) == BatchSchedule.constant(8)
    args.step_batch_size_schedule = "0:8 640:16"
    assert [batch_schedule(args).size_at(samples) for samples in (39, 40)] == [8, 16]
    assert not batch_schedule(args).fixed
    args.consumed_train_samples = 56
    assert clock_of(args, 6) == Clock(iteration=6, samples=56, batches=batch_schedule(args))
    args.consumed_train_samples, args.step_batch_size_schedule = 0, None  # an old checkpoint doesn't say it
    assert clock_of(args, 6) == Clock(iteration=6, samples=48, batches=batch_schedule(args))


def test_neither_torch_nor_megatron_is_imported() -> None:
    modules = ("training.arguments", "schedule.check", "schedule.schema", "records", "cli")
    names = ", ".join(f"megatron_dynatrain.{module}" for module in modules)
    program = f"import {names}, sys; print([name for name in ('torch', 'megatron') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"


def test_layers_of_a_pattern_are_checked_against_tp() -> None:
    from megatron_dynatrain.training.arguments import _split_by_tp

    sizes = {"mamba_head_dim": 16, "mamba_num_groups": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
    given = Namespace(hybrid_layer_pattern="M*G-", hidden_size=64, mamba_num_heads=None, **sizes)
    heads = [
        ("mamba_num_heads", 8),
        ("mamba_num_groups", 8),
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads", 6),
    ]
    assert list(_split_by_tp(given)) == heads
    given.mamba_num_heads = 4
    assert next(iter(_split_by_tp(given))) == ("mamba_num_heads", 4)
    given.hybrid_layer_pattern = "*-"
    assert list(_split_by_tp(given)) == []
    given.experimental_attention_variant = "gated_delta_net"
    assert list(_split_by_tp(given)) == heads[2:]
