"""A real training step of a case's GPT: Megatron's own schedule, gradients and all."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config

from tests.cases.models import SEQUENCE

MICRO_BATCHES = 4
"""Micro-batches of all data-parallel ranks together; each has one sequence."""


def train_step(job: Any, vocabulary: int = 16) -> float:
    """Do one step on a fixed batch and return its loss, equal on every rank; collective."""
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    config = get_model_config(job.chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = job.optimizer.scale_loss
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    numbers = range(rank, MICRO_BATCHES, ranks)
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter([_batch(number, vocabulary) for number in numbers]),
        model=job.chunks,
        num_microbatches=len(numbers),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    job.optimizer.step()
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    total = torch.tensor([float(sum(loss["loss"] for loss in losses)) if losses else 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    copies = parallel_state.get_tensor_model_parallel_world_size()
    return float(total) / (MICRO_BATCHES * SEQUENCE * copies)


def _batch(number: int, vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = ((torch.arange(SEQUENCE + 1) * (2 * number + 3) + number) % vocabulary).unsqueeze(0)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def _forward(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(iterator)
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()
    return model(batch["tokens"], positions, mask, labels=batch["labels"]), partial(_loss)


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = output.float().sum()
    return total, torch.tensor(output.numel()), {"loss": total.detach()}
