"""Small parts of megatron.core that must follow a change of layout."""

from __future__ import annotations

from typing import Any

import megatron.core.num_microbatches_calculator as calculator
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_model_config


def reset_microbatches(
    *,
    rank: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    consumed_samples: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Make Megatron's micro-batch calculator again for another data-parallel size; local.

    Args:
        rank: Rank of this process; rank 0 logs.
        global_batch_size: Samples per step.
        micro_batch_size: Samples per micro-batch.
        data_parallel_size: Size of the data-parallel group.
        consumed_samples: Samples consumed so far, where a schedule of batch sizes stands.
        decrease_batch_size_if_needed: Megatron's flag of that name.
        step_batch_size_schedule: Megatron's flag of that name.
        seq_length: Tokens per sample, in which that schedule counts.
    """
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        rank=rank,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
        decrease_batch_size_if_needed=decrease_batch_size_if_needed,
        step_batch_size_schedule=step_batch_size_schedule,
        seq_length=seq_length,
    )
    calculator.update_num_microbatches(consumed_samples, consistency_check=False)


def set_written_pipeline(config: Any, text: str | None, pp: int) -> None:
    """Set a written pipeline layout (`--pipeline-model-parallel-layout`) in a transformer config; None for none."""
    if text is None:
        config.pipeline_model_parallel_layout = None
        return
    layout = PipelineParallelLayerLayout.from_str(text, pp)
    config.pipeline_model_parallel_layout = layout
    config.mtp_standalone = layout.validate_layer_layout(
        num_layers=config.num_layers, mtp_num_layers=config.mtp_num_layers
    )


def live_process_groups() -> ProcessGroupCollection:
    """Return the process groups of the live parallel state as a collection; local."""
    return ProcessGroupCollection.use_mpu_process_groups()


def reads_data() -> bool:
    """Return whether this rank reads the data of its replica, by Megatron's rule; local."""
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)


def model_config(chunk: torch.nn.Module) -> Any:
    """Return the transformer config of a (wrapped) model chunk; local."""
    return get_model_config(chunk)
