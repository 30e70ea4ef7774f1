"""Multi-latent attention without Transformer Engine: Megatron's local attention knows one width of heads only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun


def attend_with_other_widths(run: PretrainRun) -> None:
    """Let Megatron's local attention take the widths of keys and values, and attend causally."""
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    del run
    make = DotProductAttention.__init__

    def init(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        del k_channels, v_channels
        make(self, *args, **kwargs)

    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        later = torch.triu(torch.ones(scores.shape[-2:], dtype=torch.bool), 1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)

    DotProductAttention.__init__ = init
    DotProductAttention.forward = forward
