"""Build what one rank of a layout holds, as a switch builds its target, in one process: its groups talk to nobody."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.training import wrap_model_chunks_with_ddp
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_dynatrain.elastic.groups import WorldGroups, default_group
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.build import hollow_build
from megatron_dynatrain.mcore.follow import set_written_pipeline
from megatron_dynatrain.mcore.parallel_state import ParallelState
from tests.megatron_models.choice import HEAD, WORLD, ModelChoice

_TIMEOUT = 10.0
_NUMBERS = itertools.count()
_CPU: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
}
"""Paths that need a GPU, off."""


class FakeGroups(WorldGroups):
    """Groups of torch's fake backend, which know their ranks and carry no bytes."""

    def group(
        self, ranks: Sequence[int] | None = None, *, backend: str | None = None, options: object = None
    ) -> object:
        """Return the group of these ranks, whatever backend is asked for."""
        del backend, options
        return super().group(ranks)


def prepare_process() -> None:
    """Make the process ready to build ranks: it has a default group, and Megatron is quiet."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)


@lru_cache(maxsize=WORLD)
def _launch_group(rank: int) -> dist.ProcessGroup:
    """Return what is the default group of a process that was launched as this rank."""
    group, _ = distributed_c10d._new_process_group_helper(
        WORLD, rank, [], "fake", FakeStore(), group_name=f"launch{rank}", timeout=timedelta(seconds=_TIMEOUT)
    )
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(WORLD)}
    return group


class SimulatedRank:
    """The chunks and the optimizer of one rank, and the parallel state in which they can be looked at.

    Args:
        model: The model.
        layout: The layout.
        rank: Global rank, of the layout.
        bucket_size: Elements of a DDP bucket; None for one bucket.
    """

    def __init__(
        self, model: ModelChoice, layout: ParallelLayout, rank: int, *, bucket_size: int | None = None
    ) -> None:
        self.layout = layout
        groups = FakeGroups(
            FakeStore(),
            ranks=layout.ranks,
            rank=rank,
            tag=f"world{next(_NUMBERS)}",
            backend="fake",
            timeout=_TIMEOUT,
            numbering=range(WORLD),
        )
        with default_group(_launch_group(rank)):
            self.state = ParallelState.build(layout, groups)
            self._world_group = groups.group()
        with self.live():
            tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            with hollow_build():
                self.chunks, self.optimizer = _setup(model, layout, bucket_size)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Make the rank's parallel state the live one inside the block, and its world the default group."""
        with self.state.active(), default_group(self._world_group):
            yield

    def close(self) -> None:
        """Let go of the groups; chunks and optimizer can still be read."""
        self.state.destroy()


def _setup(model: ModelChoice, layout: ParallelLayout, bucket_size: int | None) -> tuple[list[torch.nn.Module], Any]:
    """Do what `get_model` and `setup_model_and_optimizer` of megatron.training do."""
    config = _config(model, layout)
    half = {"bf16": model.dtype == "bfloat16", "fp16": model.dtype == "float16"}
    chunks: list[torch.nn.Module] = []
    for chunk in range(layout.num_chunks):
        gpt = _gpt(model, config, chunk if layout.vpp else None)
        for name, parameter in gpt.named_parameters():
            if model.is_frozen(_global_name(gpt, name)):
                parameter.requires_grad_(False)
        chunks.append(Float16Module(config, gpt) if any(half.values()) else gpt)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
        num_distributed_optimizer_instances=layout.instances,
    )
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    wrapped = wrap_model_chunks_with_ddp(
        chunks,
        config,
        ddp,
        bucket_sizes=[bucket_size if first and chunk == 0 else None for chunk in range(len(chunks))],
        disable_bucketing_per_chunk=[chunk > 0 for chunk in range(len(chunks))],
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.01,
        use_distributed_optimizer=True,
        params_dtype=getattr(torch, model.dtype),
        **half,
    )
    return wrapped, get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=False)


def _config(model: ModelChoice, layout: ParallelLayout) -> TransformerConfig:
    fields: dict[str, Any] = {
        **_CPU,
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.width,
        "num_query_groups": model.groups,
        "kv_channels": HEAD,
        "ffn_hidden_size": model.ffn * model.width,
        "gated_linear_unit": model.gated,
        "activation_func": torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        "normalization": "RMSNorm" if model.rms else "LayerNorm",
        "add_bias_linear": model.bias,
        "qk_layernorm": model.qk_norm and model.latent != 1,
        "params_dtype": getattr(torch, model.dtype),
        "pipeline_dtype": getattr(torch, model.dtype),
        "bf16": model.dtype == "bfloat16",
        "fp16": model.dtype == "float16",
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.split.first,
        "num_layers_in_last_pipeline_stage": layout.split.last,
        "account_for_embedding_in_pipeline_split": layout.split.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.split.account_for_loss,
        **_moe(model, layout),
    }
    if layout.vpp is not None:
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if not model.latent:
        config = TransformerConfig(**fields)
    else:
        # What the down projections give is split too: kv_lora_rank + qk_pos_emb_head_dim is the width.
        config = MLATransformerConfig(
            **fields,
            multi_latent_attention=True,
            q_lora_rank=model.width if model.latent == 2 else None,
            kv_lora_rank=model.width - HEAD,
            qk_head_dim=HEAD,
            qk_pos_emb_head_dim=HEAD,
            v_head_dim=HEAD,
            rope_type="rope",
        )
    set_written_pipeline(config, layout.split.layout, layout.pp)
    return config


def _moe(model: ModelChoice, layout: ParallelLayout) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    if not model.experts:
        return fields
    fields |= {
        "num_moe_experts": model.experts,
        "moe_ffn_hidden_size": model.ffn * model.width,
        "moe_router_topk": 2,
        "moe_layer_freq": model.every,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }
    if model.shared:
        fields["moe_shared_expert_intermediate_size"] = model.width
    if model.router == "expert_bias":
        fields |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    elif model.router:
        fields |= {"moe_router_load_balancing_type": model.router, "moe_aux_loss_coeff": 1e-2}
    return fields


class _LatentCore(DotProductAttention):
    """Megatron's local core attention as multi-latent attention makes it; it has no parameters. Stock needs a GPU."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **others: Any) -> None:
        del k_channels, v_channels
        super().__init__(*args, **others)


def _gpt(model: ModelChoice, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    places = {"ignore_virtual": False, "vp_stage": vp_stage}
    spec = get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=vp_stage)
    if model.latent:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _LatentCore
    return GPTModel(
        config,
        spec,
        model.vocabulary * model.width,
        16,
        pre_process=parallel_state.is_pipeline_first_stage(**places),
        post_process=parallel_state.is_pipeline_last_stage(**places),
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="learned_absolute" if model.learned and not model.latent else "rope",
        vp_stage=vp_stage,
    )


def _global_name(gpt: GPTModel, name: str) -> str:
    """Return the name with the layer's number in the whole model."""
    for local, layer in enumerate(gpt.decoder.layers):
        prefix = f"decoder.layers.{local}."
        if name.startswith(prefix):
            return f"decoder.layers.{layer.layer_number - 1}.{name.removeprefix(prefix)}"
    return name
