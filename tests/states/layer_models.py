"""Small models whose layers have states of other kinds: fused, normed, latent, of low rank, balanced by quantiles."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tests.cases.job import CaseJob
from tests.cases.models import EXPERT_SHAPE, SEQUENCE, T_SHAPE
from tests.states.low_rank import LowRank

FUSED: dict[str, Any] = {
    **T_SHAPE,
    "num_layers": 1,
    "num_query_groups": 4,
    "add_qkv_bias": True,
    "qk_layernorm": True,
}
LATENT: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 8,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 4,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "rope_type": "rope",
}
BALANCED: dict[str, Any] = {
    **EXPERT_SHAPE,
    "num_layers": 2,
    "moe_router_load_balancing_type": "quantile_balancing",
    "moe_aux_loss_coeff": 0.0,
}


def fused(config: TransformerConfig) -> torch.nn.Module:
    """Return a GPT with grouped queries, biases and norms of queries and keys, and an addition of low rank."""
    model = _gpt(config, get_gpt_layer_local_spec(qk_layernorm=True, normalization=config.normalization))
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv = LowRank(layer.self_attention.linear_qkv, rank=4)
    return model


def latent(config: TransformerConfig) -> torch.nn.Module:
    """Return a GPT with multi-latent attention; Megatron's local core attention has no parameters."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = _LatentCore
    return _gpt(config, spec)


class _LatentCore(DotProductAttention):
    """The core attention as multi-latent attention makes it, which stock local layers don't take."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **others: Any) -> None:
        del k_channels, v_channels
        super().__init__(*args, **others)


def _gpt(config: TransformerConfig, spec: Any) -> GPTModel:
    return GPTModel(
        config,
        spec,
        16,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def config_of(shape: dict[str, Any]) -> type[TransformerConfig]:
    """Return the class of configuration that takes a shape."""
    return MLATransformerConfig if shape.get("multi_latent_attention") else TransformerConfig


@torch.no_grad()
def fill(job: CaseJob) -> None:
    """Give all elements of parameters and moments values of their own, the same on ranks that hold the same.

    Initial norms are ones, and Adam's first steps are the same for every element: swapped, they would not be seen.
    """
    for number, (name, parameter) in enumerate(job.parameters().items()):
        split = getattr(parameter, "tensor_model_parallel", False)
        place = number + 50 * parallel_state.get_tensor_model_parallel_rank() * split
        parameter.add_(_ramp(parameter, place))
        if name in job.owned():
            state = job.owned()[name].state
            state["exp_avg"].add_(_ramp(state["exp_avg"], place + 100))
            state["exp_avg_sq"].add_(_ramp(state["exp_avg_sq"], place + 200))


def _ramp(like: torch.Tensor, number: int) -> torch.Tensor:
    return (torch.arange(like.numel(), dtype=like.dtype) / 1024 + number / 8).view(like.shape)
