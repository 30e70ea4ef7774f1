"""Build a target world's chunks and optimizer by Megatron's own `setup_model_and_optimizer`, without storage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.training.training as megatron_training
import torch
from megatron.training import get_args

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.build import hollow_build
from megatron_dynatrain.mcore.follow import live_process_groups, set_written_pipeline

SetupFunction = Callable[..., tuple[list[torch.nn.Module], Any, Any]]

_TRANSFORMER_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
"""Fields of the transformer config that are arguments of the same name."""


class ModelBuilder:
    """Repeats the job's own model setup for another layout.

    Keeps an untouched copy of the configuration that the script handed to `pretrain()`: Megatron writes into the one it
    uses (hooks, bucket sizes), and a target must start from what the user asked for.

    Args:
        setup: Stock `setup_model_and_optimizer`.
        arguments: Positional arguments of the job's own call.
        keywords: Keyword arguments of the job's own call.
    """

    def __init__(self, setup: SetupFunction, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._setup = setup
        self._arguments = arguments
        # A collection of the launch layout would keep its groups, with their threads, alive.
        self._keywords = {name: value for name, value in keywords.items() if name != "pg_collection"}
        self._pristine = _copy_container(keywords.get("cfg_container"))

    def __call__(self, layout: ParallelLayout) -> tuple[list[torch.nn.Module], object]:
        """Build the chunks and the optimizer of a layout; collective, the layout's parallel state and args are live."""
        keywords = dict(self._keywords)
        keywords["checkpointing_context"] = {}
        keywords["pg_collection"] = live_process_groups()
        container = _copy_container(self._pristine)
        if container is not None and getattr(container, "model", None) is not None:
            _set_layout(container.model.transformer, layout)
            container.ddp.num_distributed_optimizer_instances = layout.instances
        if "cfg_container" in keywords:
            keywords["cfg_container"] = container
        with _fresh_setup(), hollow_build():
            chunks, optimizer, _ = self._setup(*self._arguments, **keywords)
        return chunks, optimizer


def _copy_container(container: Any) -> Any:
    """Copy a configuration container so that its model and DDP parts can be changed alone."""
    if container is None:
        return None
    duplicate = copy.copy(container)
    for name in ("model", "ddp"):
        if getattr(container, name, None) is not None:
            setattr(duplicate, name, copy.deepcopy(getattr(container, name)))
    return duplicate


def _set_layout(config: Any, layout: ParallelLayout) -> None:
    """Set the layout in a transformer config, with the fields that Megatron derives from the sizes."""
    args = get_args()
    if config.microbatch_group_size_per_vp_stage == config.pipeline_model_parallel_size:
        config.microbatch_group_size_per_vp_stage = layout.pp
    for name in _TRANSFORMER_FIELDS:
        setattr(config, name, getattr(args, name))
    config.overlap_p2p_comm = args.overlap_p2p_comm
    config.batch_p2p_comm = not args.overlap_p2p_comm
    config.num_layers_in_first_pipeline_stage = layout.split.first
    config.num_layers_in_last_pipeline_stage = layout.split.last
    config.account_for_embedding_in_pipeline_split = layout.split.account_for_embedding
    config.account_for_loss_in_pipeline_split = layout.split.account_for_loss
    set_written_pipeline(config, layout.split.layout, layout.pp)


@contextmanager
def _fresh_setup() -> Iterator[None]:
    """Let the setup build a model and an optimizer and nothing else.

    No checkpoint is loaded, no counters are reset, and no scheduler is made: making one steps it, and the job's own
    scheduler goes on.
    """
    args = get_args()
    kept = {name: getattr(args, name) for name in ("iteration", "num_floating_point_operations_so_far", "train_iters")}
    loads = {name: getattr(args, name, None) for name in ("load", "pretrained_checkpoint")}
    make_scheduler = megatron_training.get_optimizer_param_scheduler
    for name in loads:
        setattr(args, name, None)
    megatron_training.get_optimizer_param_scheduler = lambda optimizer: None  # noqa: ARG005 (Megatron's keyword)
    try:
        yield
    finally:
        megatron_training.get_optimizer_param_scheduler = make_scheduler
        for name, value in {**kept, **loads}.items():
            setattr(args, name, value)
