"""Every element of every state is held exactly once per replica, for any layout, bucket size and alignment."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.vps.flat_buffer import BufferPolicy
from megatron_dynatrain.vps.homes import parts_of
from megatron_dynatrain.vps.placement import WHOLE, Placement
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import Home, ModelDescription, ParameterSpec, StateKind, Where
from tests.pure.models import dense_model, moe_model, parameter


def replica(layout: ParallelLayout, rank: int, state: StateKind, spec: ParameterSpec) -> tuple[int, int]:
    """Which copy of a parameter a rank's piece belongs to: among data-parallel ranks, and where tp doesn't split it."""
    expert = spec.expert is not None
    apart = expert and layout.experts_apart
    place = layout.index_in(rank, "dp" if apart else "dp-cp", expert=apart)
    split = spec.segments[0].shard_dim is not None
    tp = 0 if split else layout.coordinate(rank, expert=expert)["tp"]
    return place if state in WHOLE else place // layout.shards(expert=apart), tp


def check_cover(placement: Placement) -> None:
    """Every element of every state is held exactly once per replica, and each slab is filled without a gap."""
    layout, description = placement.layout, placement.description
    by_name = {spec.name: spec for spec in description.parameters}
    covered: dict[tuple[object, ...], np.ndarray] = {}
    for rank in layout.ranks:
        slabs = {slab.name: slab for slab in placement.slabs(rank)}
        assert len(slabs) == len(placement.slabs(rank))
        filled: dict[str, np.ndarray] = {name: np.zeros(slab.numel, int) for name, slab in slabs.items()}
        for piece in placement.pieces(rank):
            slab = slabs[piece.slab]
            assert (slab.state, slab.dtype) == (piece.state, piece.dtype)
            assert rank in placement.holders(piece.tensor)
            filled[piece.slab][piece.offset : piece.offset + piece.box.numel] += 1
            spec = by_name[slab.parameter]
            shape = next(segment.shape for segment in spec.segments if segment.key == piece.tensor)
            assert Box.whole(shape).contains(piece.box)
            copy = replica(layout, rank, piece.state, spec)
            count = covered.setdefault((slab.parameter, piece.tensor, piece.state, copy), np.zeros(shape, int))
            count[piece.box.relative_to(Box.whole(shape))] += 1
        assert all((count == 1).all() for count in filled.values())
        by_tensor = [
            piece
            for key in dict.fromkeys(p.tensor for p in placement.pieces(rank))
            for piece in placement.pieces_of(rank, key)
        ]
        assert sorted(by_tensor, key=repr) == sorted(placement.pieces(rank), key=repr)
    assert all((count == 1).all() for count in covered.values())
    check_complete(placement, covered)


def check_complete(placement: Placement, covered: dict[tuple[object, ...], np.ndarray]) -> None:
    layout = placement.layout
    expected = set()
    for spec in placement.description.parameters:
        if spec.home.where is Where.LAST_IF_SPLIT and layout.pp == 1:
            continue
        apart = spec.expert is not None and layout.experts_apart
        copies = layout.edp if apart else layout.dp * layout.cp
        for state, _ in placement.description.states_of(spec):
            for copy in range(copies if state in WHOLE else layout.instances):
                for segment in spec.segments:
                    repeats = parts_of(spec, layout) if segment.shard_dim is None else 1
                    expected |= {(spec.name, segment.key, state, (copy, tp)) for tp in range(repeats)}
    assert set(covered) == expected


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 3, "dp": 3, "pp": 3},
        {"dp": 3},
        {"tp": 3, "dp": 1},
        {"tp": 2, "cp": 2, "dp": 3, "pp": 3, "instances": 2},
        {"dp": 5, "pp": 3, "vpp": 2},
        {"dp": 4, "ranks": (9, 2, 7, 4)},
        {"tp": 2, "dp": 3, "pp": 3, "order": "dp-cp-ep-tp-pp"},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("kind", ["tied-bf16", "untied"])
@pytest.mark.parametrize("policy", [BufferPolicy(), BufferPolicy(bucket_size=100)], ids=["one", "small"])
def test_every_element_once_per_replica(sizes: dict[str, int], kind: str, policy: BufferPolicy) -> None:
    tied = kind == "tied-bf16"
    description = dense_model(layers=6, hidden=6, ffn=6, vocab=12, tied=tied, dtype="bfloat16" if tied else "float32")
    check_cover(Placement(description, ParallelLayout(**sizes), policy))


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 3},
        {"tp": 3, "dp": 4, "ep": 4, "etp": 1},
        {"tp": 2, "dp": 6, "pp": 3, "ep": 2, "etp": 3},
        {"tp": 1, "dp": 8, "ep": 2, "instances": 2},
        {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "etp": 1},
        {"tp": 3, "dp": 2, "pp": 3},
        {"tp": 2, "dp": 2, "etp": 1},
    ],
    ids=json.dumps,
)
def test_every_expert_element_once_per_replica(sizes: dict[str, int]) -> None:
    description = moe_model(layers=3, hidden=6, ffn=6, experts=4, dtype="bfloat16")
    # 16 rows of the tables don't divide by 3.
    specs = [
        spec if spec.home.where is Where.LAYER else parameter(spec.name, (12, 6), 0, spec.home)
        for spec in description.parameters
    ]
    check_cover(Placement(ModelDescription(tuple(specs), num_layers=3, num_experts=4), ParallelLayout(**sizes)))


@settings(max_examples=30, deadline=None)
@given(
    st.fixed_dictionaries(
        {"tp": st.sampled_from([1, 2, 3]), "dp": st.integers(1, 4), "cp": st.integers(1, 2), "pp": st.integers(1, 3)}
    ),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 60)),
    st.sampled_from([1, 4, 64]),
)
def test_any_sizes_cover(sizes: dict[str, int], widths: list[int], bucket: int | None, align: int) -> None:
    specs = []
    for number, width in enumerate(widths * 3):
        home = Home(Where.LAYER, number % 3)
        dim = (None, 0, 1)[number % 3]
        shape = tuple(6 if axis == dim else size for axis, size in enumerate((width % 7 + 1, width)))
        specs.append(parameter(f"p{number}", shape, dim, home, trainable=number % 5 != 4))
    policy = BufferPolicy(bucket_size=bucket, param_align=align, end_align=2 * align)
    check_cover(Placement(ModelDescription(tuple(specs), num_layers=3), layout_of(sizes), policy))


def layout_of(sizes: dict[str, int]) -> ParallelLayout:
    return ParallelLayout(**(sizes | {"pp": 3 if sizes["pp"] == 2 else sizes["pp"]}))
