"""An addition of low rank to a column-parallel linear, declared as Megatron's own modules do it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default


class LowRank(MegatronModule):
    """`base(x) + up(down(x))`, where base is frozen, down is the same on all tensor ranks and up is split like base.

    Args:
        base: A column-parallel linear.
        rank: Width in the middle.
    """

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__(config=base.config)
        self.base = base.requires_grad_(False)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        rows, columns = base.weight.shape
        numbers = torch.arange(rank * columns, dtype=base.weight.dtype).view(rank, columns)
        self.down = torch.nn.Parameter(torch.cos(numbers) / columns)
        # Not zero, as it would be in practice: `down` shall have moments at the first switch already.
        numbers = torch.arange(rows * rank, dtype=base.weight.dtype).view(rows, rank)
        self.up = torch.nn.Parameter(torch.sin(numbers) / columns)
        set_tensor_model_parallel_attributes(self.up, is_parallel=True, dim=0, stride=1)

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Return what the base returns, with the addition."""
        output, bias = self.base(inputs, *args, **kwargs)
        middle = tensor_parallel.copy_to_tensor_model_parallel_region(inputs @ self.down.t())
        return output + middle @ self.up.t(), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Declare `down` as a replica and `up` as split on dim 0; the base declares itself."""
        declared = make_sharded_tensors_for_checkpoint(
            {"down": self.down, "up": self.up},
            prefix,
            {"up": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        declared.update(
            sharded_state_dict_default(self.base, f"{prefix}base.", sharded_offsets, metadata, tp_group=self.tp_group)
        )
        return declared
