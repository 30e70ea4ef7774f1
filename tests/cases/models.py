"""Models of the cases: a GPT, and a module with nothing but a few parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from tests.cases.job import MakeModel

SEQUENCE = 16

T_SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "kv_channels": 4,
    "ffn_hidden_size": 8,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
}
"""The small model T of the cases."""


def gpt(vocabulary: int = 64, *, tied: bool = False) -> MakeModel:
    """Return what makes a GPT of local layers with rotary positions."""

    def make(config: TransformerConfig) -> torch.nn.Module:
        return GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=config.normalization),
            vocabulary,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
        )

    return make


EXPERT_SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "ffn_hidden_size": 8,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "normalization": "RMSNorm",
}
"""Four layers of four experts and a shared one."""


def moe(vocabulary: int = 16) -> MakeModel:
    """Return what makes a GPT whose layers have experts, one module each, and a shared expert."""

    def make(config: TransformerConfig) -> torch.nn.Module:
        return GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization=config.normalization),
            vocabulary,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )

    return make


def logits(model: torch.nn.Module, vocabulary: int = 64) -> torch.Tensor:
    """Return this tensor-parallel rank's part of the logits of a fixed input."""
    tokens = (torch.arange(2 * SEQUENCE).view(2, SEQUENCE) * 7) % vocabulary
    positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()
    with torch.no_grad():
        return model(tokens, positions, mask)


class Bare(MegatronModule):
    """Parameters and nothing else: (name, shape, dim that tensor parallelism splits or None), in module order."""

    def __init__(self, config: TransformerConfig, shapes: Mapping[str, tuple[tuple[int, ...], int | None]]) -> None:
        super().__init__(config)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self._dims = {name: dim for name, (_, dim) in shapes.items() if dim is not None}
        for name, (shape, dim) in shapes.items():
            local = [n // config.tensor_model_parallel_size if d == dim else n for d, n in enumerate(shape)]
            parameter = torch.nn.Parameter(torch.empty(local, dtype=config.params_dtype))
            torch.nn.init.normal_(parameter)
            if dim is not None:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = dim
                parameter.partition_stride = 1
            self.register_parameter(name, parameter)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        del metadata
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            self._dims,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )


BARE_SHAPE: dict[str, Any] = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 12}


def bare(**shapes: tuple[tuple[int, ...], int | None]) -> MakeModel:
    """Return what makes a module with these parameters."""
    return lambda config: Bare(config, shapes)
