"""Megatron's DDP buffers and the shards of the distributed optimizer, as a pure function."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.vps.homes import Homes, local_numel
from megatron_dynatrain.vps.tensor import ModelDescription, ParameterSpec

NCCL_BUSBW_ALIGN = 2**16
"""Further divisor of bucket ends under `--ddp-pad-buckets-for-high-nccl-busbw`, in elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPolicy:
    """How Megatron lays parameters out in buffers.

    Args:
        bucket_size: Elements from which a bucket is closed, on pipeline rank 0 and chunk 0; None for one bucket, as
            everywhere else (what `resolve_ddp_bucket_size` gives: None without `--overlap-grad-reduce`).
        pad_for_high_nccl_busbw: `--ddp-pad-buckets-for-high-nccl-busbw`.
        param_align: Elements to which the start of a parameter is aligned.
        end_align: Elements to which, besides the number of shards, the end of a bucket is aligned.
    """

    bucket_size: int | None = None
    pad_for_high_nccl_busbw: bool = False
    param_align: int = 64
    end_align: int = 128

    def bucket_divisor(self, shards: int) -> int:
        """Return the number of elements of which a bucket's end is a multiple."""
        divisor = math.lcm(shards, self.end_align)
        return math.lcm(divisor, NCCL_BUSBW_ALIGN) if self.pad_for_high_nccl_busbw else divisor


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """One DDP buffer of one model chunk; all numbers in elements.

    Args:
        chunk: Model chunk on the rank.
        dtype: Dtype name of its parameters.
        expert: Whether the expert data-parallel group shares it instead of the dense one.
        index: (parameter name, start, end, bucket) in buffer order, which is the reverse of module order.
        buckets: (start, end) with padding.
        shards: Ranks that share it: each owns one equal part of each bucket.
    """

    chunk: int
    dtype: str
    expert: bool
    index: tuple[tuple[str, int, int, int], ...]
    buckets: tuple[tuple[int, int], ...]
    shards: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.buckets[-1][1]

    def shard(self, bucket: int, shard_rank: int) -> tuple[int, int]:
        """Return the part `[start, end)` of the buffer that a shard rank owns in a bucket."""
        start, end = self.buckets[bucket]
        size = (end - start) // self.shards
        return start + shard_rank * size, start + (shard_rank + 1) * size


def in_expert_buffer(spec: ParameterSpec, layout: ParallelLayout) -> bool:
    """Return whether the expert data-parallel group shares the parameter, in a buffer of its own.

    Experts are in the dense buffer at ep 1 with etp equal to tp. Source: `param.allreduce` in Megatron's
    `tensor_parallel/layers.py` and `extensions/transformer_engine.py`, read by `group_params_for_buffers`.
    """
    return spec.expert is not None and layout.experts_apart


def buffers_of(
    description: ModelDescription, layout: ParallelLayout, rank: int, policy: BufferPolicy
) -> tuple[FlatBuffer, ...]:
    """Return the DDP buffers of a rank: by chunk, and within it in the order in which Megatron meets them.

    Raises:
        LayoutError: The model doesn't fit the layout, or the rank is not in it.
    """
    pp, ep = layout.coordinate(rank)["pp"], layout.coordinate(rank, expert=True)["ep"]
    return stage_buffers(Homes(description, layout).chunks(pp, ep), layout, pp, policy)


def stage_buffers(
    chunks: Iterable[Iterable[ParameterSpec]], layout: ParallelLayout, pp: int, policy: BufferPolicy
) -> tuple[FlatBuffer, ...]:
    """Return the buffers of a pipeline rank that holds these parameters, per chunk, in module order.

    Source: `DistributedDataParallel` and `group_params_for_buffers`. Buffers differ by dtype and by the group that
    shares them; the gradient's dtype follows from the parameter's or is the same for all.
    """
    buffers: list[FlatBuffer] = []
    for chunk, specs in enumerate(chunks):
        grouped: dict[tuple[str, bool], list[ParameterSpec]] = {}
        for spec in specs:
            if spec.trainable and not spec.is_buffer:
                grouped.setdefault((spec.dtype, in_expert_buffer(spec, layout)), []).append(spec)
        bucket_size = policy.bucket_size if pp == 0 and chunk == 0 else None
        for (dtype, expert), members in grouped.items():
            shards = layout.shards(expert=expert)
            index, buckets = _fill(members, layout, bucket_size, shards, policy)
            buffers.append(FlatBuffer(chunk, dtype, expert, index, buckets, shards))
    return tuple(buffers)


def owned_run(buffer: FlatBuffer, name: str, shard_rank: int) -> tuple[int, int] | None:
    """Return the part `[a, b)` of the flat local parameter that a shard rank owns; None where it owns nothing of it.

    Raises:
        KeyError: The parameter is not in the buffer.
    """
    for entry in buffer.index:
        if entry[0] == name:
            return run_of(buffer, entry, shard_rank)
    raise KeyError(name)


def run_of(buffer: FlatBuffer, entry: tuple[str, int, int, int], shard_rank: int) -> tuple[int, int] | None:
    """Return `owned_run` of the parameter with this entry of the buffer's index."""
    _, start, end, bucket = entry
    low, high = buffer.shard(bucket, shard_rank)
    low, high = max(low, start), min(high, end)
    return (low - start, high - start) if low < high else None


def _fill(
    members: list[ParameterSpec], layout: ParallelLayout, bucket_size: int | None, shards: int, policy: BufferPolicy
) -> tuple[tuple[tuple[str, int, int, int], ...], tuple[tuple[int, int], ...]]:
    """Place parameters, given in module order, in one buffer; return its index and buckets.

    Source: `DistributedOptimizer._compute_per_buffer_param_layout`.
    """
    divisor = policy.bucket_divisor(shards)
    index: list[tuple[str, int, int, int]] = []
    buckets: list[tuple[int, int]] = []
    bucket_start = at = 0
    for spec in reversed(members):
        at = _up(at, policy.param_align)
        alone = needs_own_bucket(spec, layout)
        if alone and _open(index, buckets):
            bucket_start, at = _close(buckets, bucket_start, at, divisor)
        end = at + local_numel(spec, layout)
        index.append((spec.name, at, end, len(buckets)))
        at = end
        if alone or (bucket_size is not None and end - bucket_start >= bucket_size):
            bucket_start, at = _close(buckets, bucket_start, end, divisor)
    if _open(index, buckets):
        _close(buckets, bucket_start, at, divisor)
    return tuple(index), tuple(buckets)


def needs_own_bucket(spec: ParameterSpec, layout: ParallelLayout) -> bool:
    """Return whether a parameter is alone in its bucket: a tied embedding, but only where the pipeline has two copies.

    Source: `param.shared_embedding`, set by `LanguageModule.setup_embeddings_and_output_layer`.
    """
    return spec.shared_embedding and layout.pp > 1


def _open(index: list[tuple[str, int, int, int]], buckets: list[tuple[int, int]]) -> bool:
    """Return whether the bucket that comes after the closed ones has a parameter already."""
    return bool(index) and index[-1][3] == len(buckets)


def _close(buckets: list[tuple[int, int]], start: int, end: int, divisor: int) -> tuple[int, int]:
    """Append the bucket `[start, end)` with its padding; return where the next one, and its first parameter, start."""
    padded = _up(end, divisor)
    buckets.append((start, padded))
    return padded, padded


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
