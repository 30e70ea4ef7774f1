"""A training loop of its own on `megatron.core`, without `megatron.training`, whose layout a `Switcher` changes.

Runs in a rank of the pool only: importing it imports Megatron.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.build import hollow_build
from megatron_dynatrain.switch import Switcher, SwitchOptions, SwitchReport

SEED = 1234
_NOT_ON_CPU = dict.fromkeys(
    (
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "gradient_accumulation_fusion",
        "persist_layer_norm",
        "apply_rope_fusion",
    ),
    False,
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A small GPT and its batches; `modern` is untied, grouped queries, gated MLP, RMSNorm, rotary, no biases."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    groups: int = 2
    ffn: int = 64
    seq: int = 16
    vocab: int = 96
    global_batch: int = 4
    bf16: bool = False
    modern: bool = False


class CoreJob:
    """One rank of the job. Collective over the default group, as are `switch` and `step`.

    Args:
        sizes: Model and batches.
        layout: Layout to start with.
        verify: How switches are verified.
    """

    def __init__(self, sizes: Sizes, layout: ParallelLayout, *, verify: Any = "digest") -> None:
        self.sizes = sizes
        self.done = 0
        parallel_state.initialize_model_parallel(layout.tp, layout.pp, order=layout.order)
        model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
        torch.manual_seed(SEED + 100 * parallel_state.get_pipeline_model_parallel_rank())
        chunks, optimizer = self._build(layout)
        options = SwitchOptions(verify=verify, timeout=60, seed=SEED)
        self.switcher = Switcher(
            layout=layout, chunks=chunks, optimizer=optimizer, build=self._build_target, options=options
        )

    def switch(self, layout: ParallelLayout) -> SwitchReport:
        """Change the layout."""
        return self.switcher.switch(layout)

    def step(self) -> tuple[float | None, float]:
        """Train one step; return its loss (None where another stage has it) and the gradient norm."""
        chunks, optimizer = self.switcher.world.chunks, self.switcher.world.optimizer
        config = get_model_config(chunks[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss  # type: ignore[attr-defined]
        for chunk in chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()  # type: ignore[attr-defined]
        replicas = parallel_state.get_data_parallel_world_size()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=self._batches(),
            model=chunks[0],
            num_microbatches=self.sizes.global_batch // replicas,
            seq_length=self.sizes.seq,
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()  # type: ignore[attr-defined]
        self.done += 1
        if not losses:
            return None, float(grad_norm)
        total = torch.stack([item["sum"] for item in losses]).double().sum()
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total) / (self.sizes.global_batch * self.sizes.seq), float(grad_norm)

    # --- model --------------------------------------------------------------------------------------------------------

    def _build_target(self, layout: ParallelLayout) -> tuple[list[torch.nn.Module], object]:
        with hollow_build():
            return self._build(layout)

    def _build(self, layout: ParallelLayout) -> tuple[list[torch.nn.Module], object]:
        sizes = self.sizes
        config = _transformer_config(sizes, layout)
        model: torch.nn.Module = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=config.normalization),
            sizes.vocab,
            sizes.seq,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not sizes.modern,
            position_embedding_type="rope" if sizes.modern else "learned_absolute",
        )
        if sizes.bf16:
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        chunks: list[torch.nn.Module] = [DistributedDataParallel(config, ddp, model)]
        adam = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=sizes.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        )
        return chunks, get_megatron_optimizer(adam, chunks)

    # --- data ---------------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[torch.Tensor]:
        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        for index in range(replica, self.sizes.global_batch, replicas):
            stream = torch.Generator().manual_seed(1000 * self.done + index)
            yield torch.randint(0, self.sizes.vocab, (1, self.sizes.seq + 1), generator=stream)

    def _forward(self, batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        tokens, length = next(batches), self.sizes.seq
        positions = torch.arange(length).unsqueeze(0)
        mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
        output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
        return output, partial(_loss, length)


def _loss(tokens: int, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    total = output.float().sum()
    return total / tokens, {"sum": total.detach()}


def _transformer_config(sizes: Sizes, layout: ParallelLayout) -> TransformerConfig:
    dtype = torch.bfloat16 if sizes.bf16 else torch.float32
    modern: dict[str, Any] = {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "num_query_groups": sizes.groups,
    }
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        ffn_hidden_size=sizes.ffn,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=sizes.bf16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **_NOT_ON_CPU,
        **(modern if sizes.modern else {}),
    )


# --- what a rank holds ------------------------------------------------------------------------------------------------


def local_digests(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, str]:
    """Return a digest of the bits of everything that this rank holds, by name; local."""
    found = {}
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    for index, chunk in enumerate(chunks):
        for name, parameter in unwrap_model(chunk).named_parameters():
            found[f"{index} {name}"] = _digest(parameter)
            for one in inner:
                with contextlib.suppress(KeyError):  # the rank owns nothing of it
                    run = one._get_model_param_range_map(parameter)["param"]
                    for state, tensor in one._get_main_param_and_optimizer_states(parameter).items():
                        found[f"{index} {name} {state} [{run.start}, {run.end})"] = _digest(tensor)
    return found


def _digest(tensor: torch.Tensor) -> str:
    # A clone: numpy() would pin the storage, which the plugin resizes.
    raw = tensor.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
