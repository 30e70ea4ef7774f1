"""Pretrain a GPT with Megatron: the shortest script in the form that Megatron's users know.

It knows nothing of this project. Run it as it is on GPUs, or through the plugin's runner, which also makes Megatron run
on machines without a GPU:

    torchrun --nproc-per-node 4 -m megatron_dynatrain.run scripts/pretrain_gpt.py <Megatron flags>
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    # Megatron's helpers ask for the keys of packed sequences too; they stay None here.
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


def get_batch(data_iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None = None) -> list[Any]:
    """Return tokens, labels, loss mask, attention mask and position ids of one micro-batch.

    Each is [micro batch, sequence / context parallel size], the attention mask has two more dims. Tensor rank 0 reads
    and sends to its group; all None on stages that need none of it. Collective over the tensor group.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * 5
    args = get_args()
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)  # type: ignore[arg-type]
        batch = {
            key: sample[key].cuda(non_blocking=True) if sample.get(key) is not None else None for key in BATCH_KEYS
        }
    ignore_virtual = vp_stage is None
    mtp = mtp_on_this_rank(
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=ignore_virtual,
        vp_stage=vp_stage,
    )
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
    )
    # Without the group Megatron would cut the sequence over the whole world.
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [batch[key] for key in BATCH_KEYS[:5]]


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of the micro-batch, its number of tokens, and both for the report."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(
    data_iterator: Iterator[dict[str, Any]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, partial[Any]]:
    """Run one micro-batch through this rank's part of the model."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, vp_stage)
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Translate Megatron's arguments into those of its GPT dataset."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def train_valid_test_datasets_provider(num_samples: Sequence[int | None], vp_stage: int | None = None) -> Any:
    """Build the train, validation and test datasets; the same ones whatever the layout. Runs on every rank."""
    args = get_args()

    def built_on_this_rank() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, built_on_this_rank, dataset_config(args)).build()


# Every rank calls the provider; by default only tensor rank 0 would.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Parse Megatron's flags and train."""
    args = parse_and_validate_args()
    if args.dataloader_inter_document_masking or args.hybrid_context_parallel:
        raise ValueError("--dataloader-inter-document-masking and --hybrid-context-parallel need packed sequences")
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )


if __name__ == "__main__":
    main()
