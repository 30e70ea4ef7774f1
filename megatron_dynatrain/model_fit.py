"""Whether a model and its batches fit a parallel layout (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import ParallelLayout


def check_model_fit(
    layout: ParallelLayout,
    *,
    num_layers: int,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int | None,
    hidden_size: int,
    padded_vocab_size: int,
    num_experts: int | None = None,
    moe_ffn_hidden_size: int | None = None,
    kv_channels: int | None = None,
    add_bias_linear: bool = False,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    eval_global_batch_size: int | None = None,
) -> None:
    """Check everything that Megatron 0.19 asks of a model under a layout; pure, so it can run before anything is built.

    Args:
        layout: The layout.
        num_layers: Transformer layers.
        num_attention_heads: Attention heads.
        num_query_groups: Key/value heads; equal to the attention heads without grouped-query attention.
        ffn_hidden_size: Width of the dense MLP; None where no layer has one.
        hidden_size: Width of the model; no axis splits it.
        padded_vocab_size: Rows of the embedding, padding included.
        num_experts: Routed experts per MoE layer; None for a dense model.
        moe_ffn_hidden_size: Width of one expert; `ffn_hidden_size` where it isn't given.
        kv_channels: Width of an attention head; hidden size / heads where it isn't given.
        add_bias_linear: Whether linears have biases.
        seq_length: Tokens per sample; None skips the checks of it.
        global_batch_size: Samples per step; None skips the checks of it.
        micro_batch_size: Samples per micro-batch and data-parallel rank; None skips the checks of it.
        eval_global_batch_size: Samples per step of an evaluation; None skips the checks of it.

    Raises:
        LayoutError: The first misfit; `subject` is the argument, `expected` and `got` its values.
    """
    layout.stage_layers(num_layers)
    _check_tensors(layout, num_attention_heads, num_query_groups, ffn_hidden_size, hidden_size, padded_vocab_size)
    _check_projection(layout, num_attention_heads, num_query_groups, kv_channels or hidden_size // num_attention_heads)
    _check_experts(layout, num_experts, moe_ffn_hidden_size or ffn_hidden_size, add_bias_linear)
    if seq_length is not None:
        _check_sequence(layout, seq_length)
    for name, size in (("global_batch_size", global_batch_size), ("eval_global_batch_size", eval_global_batch_size)):
        if size is not None and micro_batch_size is not None:
            _check_batch(layout, name, size, micro_batch_size)


def padded_vocab_size(vocab_size: int, divisor: int, tp_sizes: Iterable[int]) -> int:
    """Return the rows of the embedding that fit every tensor-parallel size, so that no switch changes the shape.

    For one size it is what Megatron pads to: a multiple of `--make-vocab-size-divisible-by` x tp.

    Args:
        vocab_size: Tokens of the vocabulary.
        divisor: `--make-vocab-size-divisible-by`.
        tp_sizes: Tensor-parallel sizes of all layouts of the run.
    """
    multiple = divisor * math.lcm(*tp_sizes)
    return -(-vocab_size // multiple) * multiple


def _check_tensors(layout: ParallelLayout, heads: int, groups: int, ffn: int | None, hidden: int, vocab: int) -> None:
    _positive("hidden_size", hidden)
    _divides(layout, "num_attention_heads", heads, "tp", layout.tp)
    # A rank of a wider tensor-parallel group holds a part of a query group, and gathers it to use it.
    if groups < 1 or (groups % layout.tp and layout.tp % groups):
        raise _misfit(layout, "num_query_groups", f"a multiple or a divisor of tp {layout.tp}", groups)
    if heads % groups:
        raise _misfit(layout, "num_query_groups", f"a divisor of the {heads} attention heads", groups)
    if ffn is not None:
        _divides(layout, "ffn_hidden_size", ffn, "tp", layout.tp)
    _divides(layout, "padded_vocab_size", vocab, "tp", layout.tp)


def _check_projection(layout: ParallelLayout, heads: int, groups: int, width: int) -> None:
    """Check the rows of the fused projection of queries, keys and values, which tensor parallelism splits evenly."""
    rows = (heads + 2 * groups) * width
    if rows % layout.tp:
        raise _misfit(
            layout,
            "num_query_groups",
            f"(heads + 2 x groups) x head width to be a multiple of tp {layout.tp}",
            f"({heads} + 2 x {groups}) x {width} = {rows}",
        )


def _check_experts(layout: ParallelLayout, experts: int | None, ffn: int | None, bias: bool) -> None:
    if experts is None:
        if layout.ep > 1:
            raise _misfit(layout, "num_experts", f"experts to spread over ep {layout.ep}", None)
        return
    _divides(layout, "num_experts", experts, "ep", layout.ep)
    if ffn is not None:
        _divides(layout, "moe_ffn_hidden_size", ffn, "etp", layout.etp)
    if bias and layout.etp > 1:
        raise _misfit(
            layout, "etp", "1, which Megatron asks of experts with biases (--disable-bias-linear)", layout.etp
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        raise _misfit(layout, "sequence_parallel", f"on, which Megatron asks of experts with tp {layout.tp}", False)


def _check_sequence(layout: ParallelLayout, seq_length: int) -> None:
    _positive("seq_length", seq_length)
    if layout.cp > 1:
        # Each rank has one chunk from the front of the sequence and its mirror from the back.
        _divides(layout, "seq_length", seq_length, f"2 x cp {layout.cp} =", 2 * layout.cp)
    if layout.sequence_parallel and seq_length % (layout.cp * layout.tp):
        parts = layout.cp * layout.tp
        raise _misfit(
            layout,
            "seq_length",
            f"a multiple of cp {layout.cp} x tp {layout.tp} = {parts} for sequence parallelism",
            seq_length,
        )


def _check_batch(layout: ParallelLayout, name: str, global_batch: int, micro_batch: int) -> None:
    _positive("micro_batch_size", micro_batch)
    step = micro_batch * layout.dp
    _divides(layout, name, global_batch, f"micro batch {micro_batch} x dp {layout.dp} =", step)
    if layout.vpp is not None and global_batch // step % layout.pp:
        raise _misfit(
            layout,
            name,
            f"micro-batches per step that are a multiple of pp {layout.pp}, for the interleaved schedule",
            f"{global_batch} / (micro batch {micro_batch} x dp {layout.dp}) = {global_batch // step} micro-batches",
        )


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise LayoutError(f"{name} must be positive", subject=name, expected=">= 1", got=value)


def _divides(layout: ParallelLayout, name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value < 1 or value % divisor:
        raise _misfit(layout, name, f"a multiple of {divisor_name} {divisor}", value)


def _misfit(layout: ParallelLayout, name: str, expected: str, got: object) -> LayoutError:
    return LayoutError(
        f"the model doesn't fit the layout {layout.describe()}", subject=name, expected=expected, got=got
    )
