"""Exact offsets of buffers and optimizer shards; case C15."""

from __future__ import annotations

import pytest

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.vps.flat_buffer import BufferPolicy, FlatBuffer, buffers_of, owned_run
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import Home, ModelDescription, StateKind, Where
from tests.pure.models import FIRST, LAST, dense_model, moe_model, parameter

SIZES = (("p0", 200), ("p1", 300), ("p2", 64))
"""The parameters of C15, in buffer order."""


def three(**more: object) -> ModelDescription:
    """The parameters of C15 in module order, which is the reverse of buffer order."""
    specs = [parameter(name, (size,), None, Home(Where.LAYER, 0), **more) for name, size in reversed(SIZES)]
    return ModelDescription(tuple(specs), num_layers=1)


def only_buffer(layout: ParallelLayout, rank: int = 0, policy: BufferPolicy | None = None) -> FlatBuffer:
    (buffer,) = buffers_of(three(), layout, rank, policy or BufferPolicy())
    return buffer


@pytest.mark.parametrize(
    ("dp", "padded", "runs"),
    [
        (2, 640, [{"p0": (0, 200), "p1": (0, 64)}, {"p1": (64, 300), "p2": (0, 64)}]),
        (3, 768, [{"p0": (0, 200)}, {"p1": (0, 256)}, {"p1": (256, 300), "p2": (0, 64)}]),
        (
            4,
            640,
            [{"p0": (0, 160)}, {"p0": (160, 200), "p1": (0, 64)}, {"p1": (64, 224)}, {"p1": (224, 300), "p2": (0, 64)}],
        ),
        (
            8,
            640,
            [
                {"p0": (0, 80)},
                {"p0": (80, 160)},
                {"p0": (160, 200)},
                {"p1": (0, 64)},
                {"p1": (64, 144)},
                {"p1": (144, 224)},
                {"p1": (224, 300)},
                {"p2": (0, 64)},
            ],
        ),
    ],
)
def test_c15_padding_and_shards(dp: int, padded: int, runs: list[dict[str, tuple[int, int]]]) -> None:
    buffer = only_buffer(ParallelLayout(dp=dp))
    assert buffer.index == (("p0", 0, 200, 0), ("p1", 256, 556, 0), ("p2", 576, 640, 0))
    assert buffer.buckets == ((0, padded),)
    assert buffer.shard(0, 1) == (padded // dp, 2 * padded // dp)
    for rank, expected in enumerate(runs):
        assert {name: run for name, _ in SIZES if (run := owned_run(buffer, name, rank)) is not None} == expected


@pytest.mark.parametrize("dp", [2, 3, 4, 8])
def test_c15_padding_is_never_counted(dp: int) -> None:
    placement = Placement(three(), ParallelLayout(dp=dp))
    held = sum(slab.numel for rank in range(dp) for slab in placement.slabs(rank) if slab.state is StateKind.EXP_AVG)
    assert held == 564


def test_c15_dp4_and_dp2_cp2_hold_the_same_shards() -> None:
    before, after = (
        Placement(three(), ParallelLayout(dp=4, cp=1)),
        Placement(three(), ParallelLayout(dp=2, cp=2)),
    )
    for rank in range(4):
        assert before.pieces(rank) == after.pieces(rank)
        assert before.slabs(rank) == after.slabs(rank)
    assert before.pieces(0) != before.pieces(1)


@pytest.mark.parametrize("size", [201, 250, 556])
def test_small_buckets_close_when_full(size: int) -> None:
    buffer = only_buffer(ParallelLayout(dp=3), policy=BufferPolicy(bucket_size=size))
    assert buffer.index == (("p0", 0, 200, 0), ("p1", 256, 556, 0), ("p2", 768, 832, 1))
    assert buffer.buckets == ((0, 768), (768, 1152))
    assert buffer.numel == 1152
    assert [owned_run(buffer, "p2", rank) for rank in range(3)] == [(0, 64), None, None]


def test_a_bucket_counts_its_inner_padding_but_not_its_end() -> None:
    buffer = only_buffer(ParallelLayout(dp=2), policy=BufferPolicy(bucket_size=200))
    assert buffer.index == (("p0", 0, 200, 0), ("p1", 256, 556, 1), ("p2", 640, 704, 2))
    assert buffer.buckets == ((0, 256), (256, 640), (640, 768))
    assert len(only_buffer(ParallelLayout(dp=2), policy=BufferPolicy(bucket_size=557)).buckets) == 1


def test_padding_for_bus_bandwidth() -> None:
    buffer = only_buffer(ParallelLayout(dp=3), policy=BufferPolicy(pad_for_high_nccl_busbw=True))
    assert buffer.buckets == ((0, 3 * 2**16),)


def test_buckets_only_on_the_first_rank_and_chunk() -> None:
    description, policy = dense_model(layers=4), BufferPolicy(bucket_size=1)
    layout = ParallelLayout(dp=1, pp=2, vpp=2)
    counts = [[len(buffer.buckets) for buffer in buffers_of(description, layout, rank, policy)] for rank in (0, 1)]
    assert counts == [[7, 1], [1, 1]]


def test_tied_embedding_has_its_own_bucket_only_with_two_copies() -> None:
    description = dense_model(layers=2, tied=True)
    embedding = "embedding.word_embeddings.weight"
    buckets = {}
    for pp in (1, 2):
        layout = ParallelLayout(dp=1, pp=pp)
        found = [buffers_of(description, layout, rank, BufferPolicy())[0] for rank in range(pp)]
        buckets[pp] = [{name: bucket for name, _, _, bucket in buffer.index} for buffer in found]
    assert set(buckets[1][0].values()) == {0}
    assert "output_layer.weight" not in buckets[1][0]
    assert [name for name, bucket in buckets[2][0].items() if bucket == 1] == [embedding]
    assert [name for name, bucket in buckets[2][1].items() if bucket == 0] == ["output_layer.weight"]


def test_buffers_by_dtype_and_by_expert_group() -> None:
    description = moe_model(layers=1, dtype="bfloat16")
    for layout, expected in (
        (ParallelLayout(dp=4), [("bfloat16", False, 4), ("float32", False, 4)]),
        (ParallelLayout(dp=4, ep=2), [("bfloat16", False, 4), ("float32", False, 4), ("bfloat16", True, 2)]),
        (ParallelLayout(tp=2, dp=2, etp=1), [("bfloat16", False, 2), ("float32", False, 2), ("bfloat16", True, 4)]),
        (ParallelLayout(cp=2, dp=4, instances=2), [("bfloat16", False, 4), ("float32", False, 4)]),
    ):
        found = [(b.dtype, b.expert, b.shards) for b in buffers_of(description, layout, 0, BufferPolicy())]
        assert found == expected, layout


def test_frozen_parameters_and_buffers_are_in_no_buffer() -> None:
    assert buffers_of(three(trainable=False), ParallelLayout(dp=1), 0, BufferPolicy()) == ()
    assert buffers_of(three(is_buffer=True), ParallelLayout(dp=1), 0, BufferPolicy()) == ()
    with pytest.raises(KeyError):
        owned_run(only_buffer(ParallelLayout(dp=2)), "p3", 0)


def test_dims_that_do_not_divide_are_named() -> None:
    description = ModelDescription((parameter("w", (8, 3), 0, FIRST), parameter("v", (4,), None, LAST)), num_layers=1)
    with pytest.raises(
        LayoutError, match=r"dim 0 of \(8, 3\).*3 tensor-parallel.*subject: w; expected: a multiple of 3"
    ):
        buffers_of(description, ParallelLayout(tp=3, dp=1), 0, BufferPolicy())
