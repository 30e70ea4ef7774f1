"""Whether a model and its batches fit a parallel layout (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import ParallelLayout


def check_model_fit(layout: ParallelLayout, **sizes: Any) -> None:
    """Check everything that Megatron 0.19 asks of a model under a layout; takes what `misfits` takes.

    Raises:
        LayoutError: The first misfit; `subject` is the argument, `expected` and `got` its values.
    """
    for misfit in misfits(layout, **sizes):
        raise misfit


def misfits(
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
    mtp_num_layers: int | None = None,
    tied_embeddings: bool = False,
    hybrid: bool = False,
    split_by_tp: Iterable[tuple[str, int]] = (),
) -> Iterator[LayoutError]:
    """Yield everything that Megatron 0.19 asks of a model and doesn't get under a layout; pure, needs nothing built.

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
        mtp_num_layers: Layers of multi-token prediction; None or 0 for none.
        tied_embeddings: Whether input and output embeddings are one parameter.
        hybrid: Whether it is a HybridModel, whose layers come from a pattern.
        split_by_tp: Names and values of further sizes that tp must divide, as heads of Mamba.
    """
    try:
        layout.stage_layers(num_layers)
    except LayoutError as error:
        yield error
    yield from _of_tensors(
        layout,
        num_attention_heads,
        num_query_groups,
        ffn_hidden_size,
        hidden_size,
        padded_vocab_size,
        kv_channels or hidden_size // num_attention_heads,
    )
    for name, count in split_by_tp:
        yield from _divides(layout, name, count, "tp", layout.tp)
    if hybrid:
        yield from _of_pattern(layout)
    yield from _of_experts(layout, num_experts, moe_ffn_hidden_size or ffn_hidden_size, add_bias_linear)
    if mtp_num_layers and tied_embeddings:
        yield from _of_tied_prediction(layout, mtp_num_layers)
    if seq_length is not None:
        yield from _of_sequence(layout, seq_length)
    for name, size in (("global_batch_size", global_batch_size), ("eval_global_batch_size", eval_global_batch_size)):
        if size is not None and micro_batch_size is not None:
            yield from batch_misfits(layout, name, size, micro_batch_size)


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


def _of_pattern(layout: ParallelLayout) -> Iterator[LayoutError]:
    """A HybridModel has other ways of splitting only by `|` in its pattern, which no switch changes."""
    split = layout.split
    if layout.vpp is not None:
        yield _misfit(layout, "vpp", "no virtual pipeline of a HybridModel", layout.vpp)
    if split.layout is not None:
        yield _misfit(layout, "pipeline_model_parallel_layout", "none with --hybrid-layer-pattern", split.layout)
    if split.account_for_embedding or split.account_for_loss:
        yield _misfit(layout, "account_for_*_in_pipeline_split", "off with --hybrid-layer-pattern", "on")


def _of_tensors(
    layout: ParallelLayout, heads: int, groups: int, ffn: int | None, hidden: int, vocab: int, width: int
) -> Iterator[LayoutError]:
    yield from _positive("hidden_size", hidden)
    yield from _divides(layout, "num_attention_heads", heads, "tp", layout.tp)
    yield from _of_query_groups(layout, heads, groups, width)
    if ffn is not None:
        yield from _divides(layout, "ffn_hidden_size", ffn, "tp", layout.tp)
    yield from _divides(layout, "padded_vocab_size", vocab, "tp", layout.tp)


def _of_query_groups(layout: ParallelLayout, heads: int, groups: int, width: int) -> Iterator[LayoutError]:
    """Yield what is wrong with the fused projection of queries, keys and values, at most one thing."""
    rows = (heads + 2 * groups) * width
    # A rank of a wider tensor-parallel group holds a part of a query group, and gathers it to use it.
    if groups < 1 or (groups % layout.tp and layout.tp % groups):
        yield _misfit(layout, "num_query_groups", f"a multiple or a divisor of tp {layout.tp}", groups)
    elif heads % groups:
        yield _misfit(layout, "num_query_groups", f"a divisor of the {heads} attention heads", groups)
    elif rows % layout.tp:  # tensor parallelism splits them evenly
        yield _misfit(
            layout,
            "num_query_groups",
            f"(heads + 2 x groups) x head width to be a multiple of tp {layout.tp}",
            f"({heads} + 2 x {groups}) x {width} = {rows}",
        )


def _of_experts(layout: ParallelLayout, experts: int | None, ffn: int | None, bias: bool) -> Iterator[LayoutError]:
    if experts is None:
        if layout.ep > 1:
            yield _misfit(layout, "num_experts", f"experts to spread over ep {layout.ep}", None)
        return
    yield from _divides(layout, "num_experts", experts, "ep", layout.ep)
    if ffn is not None:
        yield from _divides(layout, "moe_ffn_hidden_size", ffn, "etp", layout.etp)
    if bias and layout.etp > 1:
        yield _misfit(
            layout, "etp", "1, which Megatron asks of experts with biases (--disable-bias-linear)", layout.etp
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        yield _misfit(layout, "sequence_parallel", f"on, which Megatron asks of experts with tp {layout.tp}", False)


def _of_tied_prediction(layout: ParallelLayout, mtp_num_layers: int) -> Iterator[LayoutError]:
    """Yield a stage of multi-token prediction without the embedding that it is tied to.

    Megatron-Core 0.19 gives that stage an output weight that nothing uses or keeps equal to the embedding, and its
    `sharded_state_dict` asserts that there is none, so that such a job can't be saved either.
    """
    if layout.pp > 1:
        yield LayoutError(
            "multi-token prediction with tied embeddings can't be on another stage than the embedding",
            subject="mtp_num_layers",
            expected="pp 1 (--pipeline-model-parallel-size 1), or --untie-embeddings-and-output-weights",
            got=f"pp {layout.pp} with --mtp-num-layers {mtp_num_layers} and tied embeddings",
            hint="launch with --untie-embeddings-and-output-weights, or keep to layouts with pp 1",
        )


def _of_sequence(layout: ParallelLayout, seq_length: int) -> Iterator[LayoutError]:
    if seq_length < 1:
        yield from _positive("seq_length", seq_length)
        return
    if layout.cp > 1:
        # Each rank has one chunk from the front of the sequence and its mirror from the back.
        yield from _divides(layout, "seq_length", seq_length, f"2 x cp {layout.cp} =", 2 * layout.cp)
    if layout.sequence_parallel and seq_length % (layout.cp * layout.tp):
        parts = layout.cp * layout.tp
        yield _misfit(
            layout,
            "seq_length",
            f"a multiple of cp {layout.cp} x tp {layout.tp} = {parts} for sequence parallelism",
            seq_length,
        )


def batch_misfits(layout: ParallelLayout, name: str, global_batch: int, micro_batch: int) -> Iterator[LayoutError]:
    """Yield what is wrong with a batch, at most one thing: the number of micro-batches is only then a number.

    Args:
        layout: The layout.
        name: Name of the batch size, for the error.
        global_batch: Samples per step.
        micro_batch: Samples per micro-batch and data-parallel rank.
    """
    step = micro_batch * layout.dp
    if micro_batch < 1:
        yield from _positive("micro_batch_size", micro_batch)
    elif global_batch < 1 or global_batch % step:
        yield from _divides(layout, name, global_batch, f"micro batch {micro_batch} x dp {layout.dp} =", step)
    elif layout.vpp is not None and global_batch // step % layout.pp:
        yield _misfit(
            layout,
            name,
            f"micro-batches per step that are a multiple of pp {layout.pp}, for the interleaved schedule",
            f"{global_batch} / (micro batch {micro_batch} x dp {layout.dp}) = {global_batch // step} micro-batches",
        )


def _positive(name: str, value: int) -> Iterator[LayoutError]:
    if value < 1:
        yield LayoutError(f"{name} must be positive", subject=name, expected=">= 1", got=value)


def _divides(layout: ParallelLayout, name: str, value: int, divisor_name: str, divisor: int) -> Iterator[LayoutError]:
    if value < 1 or value % divisor:
        yield _misfit(layout, name, f"a multiple of {divisor_name} {divisor}", value)


def _misfit(layout: ParallelLayout, name: str, expected: str, got: object) -> LayoutError:
    return LayoutError(
        f"the model doesn't fit the layout {layout.describe()}", subject=name, expected=expected, got=got
    )
