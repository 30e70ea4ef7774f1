"""Megatron's global arguments as a function of the layout: what a switch changes in them, and the way back."""

from __future__ import annotations

from argparse import Namespace

from megatron_dynatrain.schedule.resolve import Target

_MISSING = object()


def values_for(target: Target, rank: int) -> dict[str, object]:
    """Return the arguments that a layout sets on a process, by Megatron's names; one outside of it keeps its rank.

    Args:
        target: The layout with its batch sizes; `--eval-global-batch-size` stays that of the launch.
        rank: Global rank of the process; Megatron's rank is its place in the layout.
    """
    layout, split = target.layout, target.layout.split
    batch = {} if target.global_batch_size is None else {"global_batch_size": target.global_batch_size}
    place = {"rank": layout.ranks.index(rank)} if rank in layout.ranks else {}
    return {
        **batch,
        **place,
        "world_size": layout.world_size,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "data_parallel_size": layout.dp,
        "num_distributed_optimizer_instances": layout.instances,
        # Interleaving over two stages needs the overlapped, non-batched exchange: gloo and NCCL pair wrong otherwise.
        "overlap_p2p_comm": layout.vpp is not None,
        "pipeline_model_parallel_layout": split.layout,
        "micro_batch_size": target.micro_batch_size,
        "eval_micro_batch_size": target.micro_batch_size,  # Megatron fixes it to the launch value
        "decoder_first_pipeline_num_layers": split.first,
        "decoder_last_pipeline_num_layers": split.last,
        "account_for_embedding_in_pipeline_split": split.account_for_embedding,
        "account_for_loss_in_pipeline_split": split.account_for_loss,
    }


class ArgumentChange:
    """A change of several arguments that can be taken back whole."""

    def __init__(self, args: Namespace, values: dict[str, object]) -> None:
        self._args = args
        self._before = {name: getattr(args, name, _MISSING) for name in values}
        for name, value in values.items():
            setattr(args, name, value)

    def undo(self) -> None:
        """Put every argument back to what it was before the change."""
        for name, value in self._before.items():
            if value is _MISSING:
                delattr(self._args, name)
            else:
                setattr(self._args, name, value)
