"""The script that the ranks run: GPT on mock data through the real `pretrain()`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage

_KEYS = (
    "attention_mask cu_seqlens cu_seqlens_padded hybrid_cp_group labels local_cp_size loss_mask max_seqlen position_ids "
    "tokens"
).split()


def main() -> None:
    """Parse the command line and train."""
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets_provider, ModelType.encoder_or_decoder, forward_step)


def forward_step(iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Run one micro-batch forward."""
    batch = _batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, functools.partial(_loss, batch["loss_mask"])


def datasets_provider(sizes: Any, vp_stage: int | None = None) -> Any:
    """Build the mock train, validation and test sets of these sizes in samples."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def is_built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, is_built_here, config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _batch(iterator: Iterator[Any], vp_stage: int | None) -> dict[str, Any]:
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_KEYS)
    args = get_args()
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(iterator)
        batch = {key: sample.get(key) for key in _KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    # cp_group=None would mean the default group: wrong losses without an error when CP < world.
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    mask = mask.view(-1).float()
    total = (output.view(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.view(1)])}
