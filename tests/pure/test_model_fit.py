"""What Megatron asks of a model under a layout, with the field, the expected and the found value."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import ParallelLayout, PipelineSplit
from megatron_dynatrain.model_fit import check_model_fit, misfits, padded_vocab_size

DENSE: dict[str, Any] = {
    "num_layers": 12,
    "num_attention_heads": 12,
    "num_query_groups": 4,
    "ffn_hidden_size": 96,
    "hidden_size": 48,
    "padded_vocab_size": 384,
    "seq_length": 48,
    "global_batch_size": 24,
    "micro_batch_size": 2,
}
HYBRID = DENSE | {"hybrid": True, "split_by_tp": (("mamba_num_groups", 2),)}
WRITTEN = PipelineSplit(layout="Et*6|t*6L")
COUNTED = PipelineSplit(account_for_embedding=True, account_for_loss=True)
MOE = DENSE | {"num_experts": 12, "moe_ffn_hidden_size": 24}


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (ParallelLayout(dp=1), DENSE),
        (ParallelLayout(tp=2, cp=3, dp=3, pp=2, sequence_parallel=True), DENSE),
        (ParallelLayout(tp=12, dp=1), DENSE | {"kv_channels": 6}),
        (ParallelLayout(tp=6, dp=1), DENSE | {"num_query_groups": 2, "kv_channels": 3}),
        (ParallelLayout(tp=2, dp=1, etp=1, sequence_parallel=True), MOE | {"add_bias_linear": True}),
        (ParallelLayout(tp=2, dp=2, pp=2, vpp=3), DENSE),
        (ParallelLayout(tp=2, dp=6, ep=4, etp=3, sequence_parallel=True), MOE),
        (ParallelLayout(dp=12, ep=12), MOE | {"moe_ffn_hidden_size": None}),
        (ParallelLayout(tp=2, dp=1, sequence_parallel=True), MOE | {"ffn_hidden_size": None}),
        (ParallelLayout(dp=5), DENSE | {"global_batch_size": None}),
        (ParallelLayout(dp=5), DENSE | {"micro_batch_size": None}),
        (ParallelLayout(cp=5, dp=1), DENSE | {"seq_length": None}),
        (ParallelLayout(tp=2, dp=1), DENSE | {"mtp_num_layers": 1, "tied_embeddings": True}),
        (ParallelLayout(dp=1, pp=2), DENSE | {"mtp_num_layers": 1}),
        (ParallelLayout(tp=2, dp=1, pp=2, split=PipelineSplit(first=4)), HYBRID),
        (ParallelLayout(dp=1, pp=2), DENSE | {"mtp_num_layers": 0, "tied_embeddings": True}),
    ],
)
def test_fits(layout: ParallelLayout, model: dict[str, Any]) -> None:
    check_model_fit(layout, **model)


@pytest.mark.parametrize(
    ("layout", "model", "subject", "expected", "got"),
    [
        (ParallelLayout(dp=1, pp=5), DENSE, "num_layers", "a multiple of 5", 12),
        (ParallelLayout(tp=8, dp=1), DENSE, "num_attention_heads", "a multiple of tp 8", 12),
        (ParallelLayout(tp=6, dp=1), DENSE, "num_query_groups", "a multiple or a divisor of tp 6", 4),
        (ParallelLayout(dp=1), DENSE | {"num_query_groups": 5}, "num_query_groups", "a divisor of the 12", 5),
        (ParallelLayout(dp=1), DENSE | {"num_query_groups": 0}, "num_query_groups", "a multiple or a divisor", 0),
        # 12 heads and 2 groups on 6 ranks: each has two heads and a third of a group, but (12 + 2 x 2) x 4 rows.
        (ParallelLayout(tp=6, dp=1), DENSE | {"num_query_groups": 2}, "num_query_groups", "a multiple of tp 6", "= 64"),
        (ParallelLayout(dp=2, etp=2), MOE | {"add_bias_linear": True}, "etp", "experts with biases", 2),
        (ParallelLayout(tp=4, dp=1), DENSE | {"ffn_hidden_size": 90}, "ffn_hidden_size", "a multiple of tp 4", 90),
        (ParallelLayout(tp=4, dp=1), DENSE | {"padded_vocab_size": 70}, "padded_vocab_size", "a multiple of tp 4", 70),
        (ParallelLayout(dp=1), DENSE | {"hidden_size": 0}, "hidden_size", ">= 1", 0),
        (ParallelLayout(dp=2, ep=2), DENSE, "num_experts", "experts to spread over ep 2", None),
        (ParallelLayout(dp=5, ep=5), MOE, "num_experts", "a multiple of ep 5", 12),
        (ParallelLayout(dp=5, etp=5), MOE, "moe_ffn_hidden_size", "a multiple of etp 5", 24),
        (ParallelLayout(dp=9, etp=9), MOE | {"moe_ffn_hidden_size": None}, "moe_ffn_hidden_size", "etp 9", 96),
        (ParallelLayout(tp=2, dp=1), MOE, "sequence_parallel", "on, which Megatron asks", False),
        (ParallelLayout(cp=5, dp=1), DENSE, "seq_length", "a multiple of 2 x cp 5 = 10", 48),
        (ParallelLayout(cp=2, dp=1), DENSE | {"seq_length": 50}, "seq_length", "a multiple of 2 x cp 2 = 4", 50),
        (
            ParallelLayout(tp=4, cp=4, dp=1, sequence_parallel=True),
            DENSE | {"seq_length": 40},
            "seq_length",
            "a multiple of cp 4 x tp 4 = 16",
            40,
        ),
        (ParallelLayout(dp=1), DENSE | {"seq_length": 0}, "seq_length", ">= 1", 0),
        (ParallelLayout(dp=5), DENSE, "global_batch_size", "a multiple of micro batch 2 x dp 5 = 10", 24),
        (ParallelLayout(dp=1), DENSE | {"micro_batch_size": 0}, "micro_batch_size", ">= 1", 0),
        (
            ParallelLayout(dp=1, pp=2),
            DENSE | {"mtp_num_layers": 1, "tied_embeddings": True},
            "mtp_num_layers",
            "--untie-embeddings-and-output-weights",
            "pp 2 with --mtp-num-layers 1 and tied embeddings",
        ),
        (ParallelLayout(dp=4, pp=2, vpp=2), DENSE, "global_batch_size", "a multiple of pp 2", "= 3 micro-batches"),
        (ParallelLayout(dp=1, pp=2, vpp=2), HYBRID, "vpp", "no virtual pipeline", 2),
        (ParallelLayout(dp=1, pp=2, split=WRITTEN), HYBRID, "pipeline_model_parallel_layout", "none with", "*6|t*6L"),
        (ParallelLayout(dp=1, pp=2, split=COUNTED), HYBRID, "account_for_*_in_pipeline_split", "off with", "on"),
        (ParallelLayout(tp=4, dp=1), HYBRID, "mamba_num_groups", "a multiple of tp 4", 2),
    ],
)
def test_misfits_name_the_field(
    layout: ParallelLayout, model: dict[str, Any], subject: str, expected: str, got: object
) -> None:
    with pytest.raises(LayoutError) as caught:
        check_model_fit(layout, **model)
    error = caught.value
    assert error.subject == subject
    assert expected in str(error.expected)
    assert str(error.got).endswith(str(got))


@pytest.mark.parametrize(
    ("layout", "model", "subjects"),
    [
        (ParallelLayout(dp=1), DENSE, []),
        (
            ParallelLayout(tp=5, cp=5, dp=5, ep=5, pp=5, sequence_parallel=True),
            MOE,
            [
                "num_layers",
                "num_attention_heads",
                "num_query_groups",
                "ffn_hidden_size",
                "padded_vocab_size",
                "num_experts",
                "moe_ffn_hidden_size",
                "seq_length",
                "seq_length",
                "global_batch_size",
            ],
        ),
        (ParallelLayout(tp=2, dp=2, etp=2), MOE | {"add_bias_linear": True}, ["etp", "sequence_parallel"]),
        (ParallelLayout(dp=5), DENSE | {"eval_global_batch_size": 7}, ["global_batch_size", "eval_global_batch_size"]),
    ],
)
def test_all_misfits_are_found_each_once(layout: ParallelLayout, model: dict[str, Any], subjects: list[str]) -> None:
    assert [error.subject for error in misfits(layout, **model)] == subjects


def test_one_padded_vocabulary_for_all_layouts() -> None:
    assert padded_vocab_size(127, 128, [1, 2, 4]) == 512
    assert padded_vocab_size(512, 128, [4]) == 512
    assert padded_vocab_size(513, 128, [4]) == 1024
    assert padded_vocab_size(100, 1, [2, 3]) == 102
