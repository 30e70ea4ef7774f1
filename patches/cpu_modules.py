"""Megatron's modules without Transformer Engine, and the one place where it goes around `torch.cuda`.

What and why:
- `tensor_parallel.random._set_cuda_rng_state` calls torch's C functions. Missed, nothing fails, but the outer random
  state is not restored after each fork of the tracker, so all later draws differ.
- `WrappedTorchNorm` asserts that sequence parallelism is off, though its parameters need only the mark that lets
  `finalize_model_grads` all-reduce their gradients over TP.
- `DotProductAttention` asserts that context parallelism is off. Here keys and values are gathered over CP, and the
  causal mask is written for the zigzag order (2 * cp chunks) in which Megatron deals a sequence out. Causal masks only.
- `moe_utils.te_general_gemm` is missing without Transformer Engine in 0.16.1: a NameError in the router.
Versions: megatron-core 0.16.1 and 0.19.x. Can go: see `cpu`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from megatron_dynatrain.errors import UnsupportedError


def install() -> None:
    """Replace the functions and methods; each process once."""
    _random_state()
    _router_gemm()
    _norm()
    _attention()


def _random_state() -> None:
    from megatron.core.tensor_parallel import random

    if getattr(random._set_cuda_rng_state, "on_cpu", False):
        return

    def set_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    set_state.on_cpu = True  # type: ignore[attr-defined]
    random._set_cuda_rng_state = set_state
    # It warns that the CPU state changes inside a fork of the tracker; here it is the state that is forked.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _router_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _norm() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = new


def _attention() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if hasattr(DotProductAttention.__init__, "__wrapped__"):
        return
    DotProductAttention.__init__ = _attention_init(DotProductAttention.__init__)
    DotProductAttention.forward = _attention_forward(DotProductAttention.forward)


def _attention_init(original: Any) -> Any:
    from megatron.core import parallel_state

    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        context_parallel, config.context_parallel_size = config.context_parallel_size, 1
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = context_parallel
        self.cpu_cp_group = None
        if context_parallel > 1:
            _refuse_other_masks(self)
            collection = kwargs.get("pg_collection")
            self.cpu_cp_group = getattr(collection, "cp", None) or parallel_state.get_context_parallel_group()

    return init


def _refuse_other_masks(attention: Any) -> None:
    if attention.attn_mask_type.name != "causal":
        raise UnsupportedError(
            "context parallelism on a CPU has a causal mask only",
            subject=f"attention of layer {attention.layer_number}",
            expected="causal",
            got=attention.attn_mask_type.name,
        )


def _attention_forward(original: Any) -> Any:
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    @functools.wraps(original)
    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.cpu_cp_group
        if group is not None and group.size() > 1:
            attention_mask = zigzag_mask(group.size(), group.rank(), key.shape[0])
            key, value = (
                gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=True, group=group)
                for tensor in (key, value)
            )
        return original(self, query, key, value, attention_mask, *args, **kwargs)

    return forward


def zigzag_mask(size: int, rank: int, length: int) -> torch.Tensor:
    """Return the causal mask of one context-parallel rank, True where a key is hidden.

    Shape `[1, 1, length, size * length]`: the rank's own queries against the keys of all ranks in rank order. The
    sequence is cut into `2 * size` chunks and rank r holds chunks r and `2 * size - 1 - r`.

    Args:
        size: Context-parallel size.
        rank: Rank in that group.
        length: Tokens that one rank holds, an even number.
    """
    chunks = torch.arange(size * length).view(2 * size, length // 2)
    held = [chunks[[index, 2 * size - 1 - index]].flatten() for index in range(size)]
    return (torch.cat(held)[None, :] > held[rank][:, None])[None, None]
