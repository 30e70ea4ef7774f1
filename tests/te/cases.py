"""What te-check switches: models of Transformer Engine's layers, kinds of optimizer, pairs of layouts; plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = Mapping[str, Any]

_GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "perform_initialization": False,
}
_OLD: dict[str, Any] = {
    **_GPT,
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "qk_layernorm": True,
}
_EIGHT: dict[str, Any] = {**_GPT, "num_layers": 8}
_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "rope",
}
_SPARSE: dict[str, Any] = {**_MLA, "dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 4}
_VARIANT: dict[str, Any] = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2}
_MAMBA: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_state_dim": 16,
    "mamba_num_groups": 4,
}
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


@dataclass(frozen=True)
class Model:
    """A model: what makes it, fields of its config (`TransformerConfig`), the pattern of a HybridModel."""

    words: str
    shape: Keys
    pattern: str | None = None
    tied: bool = False
    mla: bool = False
    dtype: str = "bfloat16"


MODELS: dict[str, Model] = {
    "gpt": Model("GPTModel: RMSNorm, SwiGLU, grouped queries, rotary positions", _GPT),
    "gpt-wide": Model(
        "the same with wide MLPs: a rank owns a part of one matrix, and nothing of a parameter group",
        {**_GPT, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 256},
    ),
    "gpt-tied": Model("GPTModel: tied, LayerNorm, GELU, biases, qk-norm, learned positions", _OLD, tied=True),
    "gpt-fp32": Model("GPTModel in fp32", _GPT, dtype="float32"),
    "gpt-fp16": Model("GPTModel in fp16, with a loss scale", _GPT, dtype="float16"),
    "gpt-mla": Model("GPTModel with multi-latent attention", {**_GPT, **_MLA}, mla=True),
    "gpt-mtp": Model("GPTModel with a multi-token-prediction layer", {**_GPT, "mtp_num_layers": 1}),
    "gpt-moe": Model("GPTModel: grouped experts, a shared expert, router expert bias", {**_GPT, **_EXPERTS}),
    "gpt-moe-sequential": Model(
        "the same with a module for each expert", {**_GPT, **_EXPERTS, "moe_grouped_gemm": False}
    ),
    "gpt-gdn": Model("GPTModel: every second layer a gated delta net", {**_GPT, **_DELTA, **_VARIANT}),
    "gpt-gdn-moe": Model(
        "the same with grouped experts but in the first layer",
        {**_GPT, **_DELTA, **_VARIANT, **_EXPERTS, "moe_layer_freq": [0, 1, 1, 1]},
    ),
    "hybrid": Model("HybridModel: attention and MLP", _EIGHT, "*-*-*-*-"),
    "hybrid-tied": Model("HybridModel, tied", _EIGHT, "*-*-*-*-", tied=True),
    "hybrid-mtp": Model(
        "HybridModel with a multi-token-prediction layer", {**_EIGHT, "mtp_num_layers": 1}, "*-*-*-*-/*-"
    ),
    "hybrid-mla": Model("HybridModel: multi-latent attention", {**_EIGHT, **_MLA}, "+-+-+-+-", mla=True),
    "hybrid-dsa": Model("HybridModel: sparse latent attention", {**_EIGHT, **_SPARSE}, "D-D-D-D-", mla=True),
    "hybrid-moe": Model("HybridModel: attention, MLP and grouped experts", {**_EIGHT, **_EXPERTS}, "*E*-*E*-"),
    "hybrid-mamba": Model("HybridModel: Mamba, attention and MLP", {**_EIGHT, **_MAMBA}, "M*M-MMM-"),
    "hybrid-gdn": Model("HybridModel: gated delta net, attention and MLP", {**_EIGHT, **_DELTA}, "G*G-GGG-"),
}

_AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}
_OFFLOADED: dict[str, Any] = {
    **_AWARE,
    "store_param_remainders": False,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
}
OPTIMIZERS: dict[str, tuple[str, Keys]] = {
    "plain": ("FusedAdam; Megatron keeps fp32 main parameters", {}),
    "aware": ("precision-aware, fp32 main parameters in FusedAdam", {**_AWARE, "store_param_remainders": False}),
    "remainders": ("precision-aware, int16 remainders", {**_AWARE, "store_param_remainders": True}),
    "remainders-bf16": (
        "precision-aware, int16 remainders, bf16 moments",
        {
            **_AWARE,
            "store_param_remainders": True,
            "exp_avg_dtype": "bfloat16",
            "exp_avg_sq_dtype": "bfloat16",
        },
    ),
    "aware-bf16": (
        "precision-aware, fp32 main parameters, bf16 first moment",
        {**_AWARE, "store_param_remainders": False, "exp_avg_dtype": "bfloat16"},
    ),
    "offloaded": ("half of the shards in torch's AdamW on the host, the others in FusedAdam", _OFFLOADED),
    "offloaded-overlap": (
        "the same with an optimizer for each shard on the host",
        {**_OFFLOADED, "overlap_cpu_optimizer_d2h_h2d": True},
    ),
}


@dataclass(frozen=True)
class Case:
    """One switch: `started` is whether the optimizer has made a step before it."""

    model: str
    optimizer: str
    world: int
    source: Keys = field(default_factory=dict)
    target: Keys = field(default_factory=dict)
    started: bool = True


_SP = {"tp": 2, "sequence_parallel": True}
CASES: tuple[Case, ...] = (
    # dense, every kind of optimizer
    *(Case("gpt", kind, 2, {"tp": 2}, {"pp": 2}) for kind in OPTIMIZERS),
    *(Case("gpt", kind, 2, {}, {"tp": 2}) for kind in OPTIMIZERS),
    *(Case("gpt", kind, 4, {"tp": 2, "pp": 2}, {}) for kind in OPTIMIZERS),
    *(Case("gpt", kind, 2, {}, {"tp": 2}, started=False) for kind in ("plain", "remainders", "aware")),
    Case("gpt", "remainders", 4, {"pp": 4}, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    Case("gpt", "remainders-bf16", 8, {"tp": 2, "pp": 2}, {"tp": 4, "sequence_parallel": True}),
    Case("gpt-wide", "remainders", 8, {"tp": 2, "pp": 2}, {}),
    Case("gpt-wide", "plain", 8, {}, {"tp": 2, "pp": 2}),
    Case("gpt-tied", "plain", 2, {"tp": 2}, {"pp": 2}),
    Case("gpt-tied", "remainders", 2, {"pp": 2}, {}),
    Case("gpt-tied", "remainders-bf16", 4, {}, {"tp": 2, "pp": 2}),
    Case("gpt-fp32", "plain", 2, {"tp": 2}, {"pp": 2}),
    Case("gpt-fp32", "aware", 2, {}, {"tp": 2}),
    Case("gpt-fp32", "remainders", 2, {"pp": 2}, {"tp": 2}),
    Case("gpt-fp16", "plain", 2, {"tp": 2}, {"pp": 2}),
    Case("gpt-fp16", "remainders", 2, {}, {"tp": 2}),
    Case("gpt-mla", "plain", 2, {"tp": 2}, {"pp": 2}),
    Case("gpt-mla", "remainders", 2, {}, {"tp": 2}),
    Case("gpt-mtp", "plain", 2, {"tp": 2}, {"pp": 2}),
    Case("gpt-mtp", "remainders", 2, {"pp": 2}, {}),
    # experts
    *(Case("gpt-moe", kind, 2, {}, {"ep": 2}) for kind in OPTIMIZERS),
    *(Case("gpt-moe", kind, 2, {"ep": 2}, _SP) for kind in ("plain", "remainders", "remainders-bf16")),
    Case("gpt-moe", "plain", 4, {"ep": 4}, {"ep": 2, "pp": 2}),
    Case("gpt-moe", "remainders", 4, {**_SP, "ep": 2, "etp": 2}, {"ep": 4}),
    Case("gpt-moe", "remainders", 4, {**_SP, "etp": 1}, {"ep": 2, "pp": 2}),
    Case("gpt-moe", "remainders", 2, {}, {"ep": 2}, started=False),
    Case("gpt-moe-sequential", "remainders", 2, {"ep": 2}, {}),
    # GPTModel's successor
    *(Case("hybrid", kind, 2, {"tp": 2}, {"pp": 2}) for kind in OPTIMIZERS),
    Case("hybrid", "remainders", 2, {}, {"tp": 2}),
    Case("hybrid", "remainders", 8, {"tp": 2, "pp": 2}, {"pp": 4}),
    Case("hybrid-tied", "plain", 2, {"tp": 2}, {"pp": 2}),
    Case("hybrid-tied", "remainders", 2, {"pp": 2}, {}),
    *(Case("hybrid-moe", kind, 2, {}, {"ep": 2}) for kind in ("plain", "remainders", "remainders-bf16")),
    Case("hybrid-moe", "remainders", 2, {"ep": 2}, {"pp": 2}),
    Case("hybrid-moe", "remainders", 2, {"pp": 2}, _SP),
    Case("hybrid-moe", "remainders", 4, {"cp": 2, "ep": 2}, {"pp": 2, **_SP}),
    Case("hybrid-mtp", "remainders", 2, {"tp": 2}, {"pp": 2}),
    Case("hybrid-mtp", "plain", 2, {"pp": 2}, {}),
    Case("hybrid-mla", "remainders", 2, {"tp": 2}, {"pp": 2}),
    Case("hybrid-mla", "plain", 2, {}, {"tp": 2}),
    Case("hybrid-dsa", "remainders", 2, _SP, {"pp": 2}),
    Case("hybrid-dsa", "plain", 2, {}, _SP),
    # linear attention
    Case("gpt-gdn", "remainders", 2, {"tp": 2}, {"pp": 2}),
    Case("gpt-gdn", "plain", 2, {"pp": 2}, {"tp": 2}),
    Case("gpt-gdn-moe", "remainders", 2, {"ep": 2}, {"pp": 2}),
    *(
        Case(model, kind, world, source, target)
        for model in ("hybrid-mamba", "hybrid-gdn")
        for kind, world, source, target in (
            ("plain", 2, {}, {"tp": 2}),
            ("remainders", 2, {"tp": 2}, {"pp": 2}),
            ("remainders-bf16", 4, {"tp": 4}, {"tp": 2, "sequence_parallel": True}),
        )
    ),
)
