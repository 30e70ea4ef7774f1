"""Placement: exact boxes; cases C01, C02, C08, C11."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dynatrain.errors import LayoutError, PlacementError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.model_fit import padded_vocab_size
from megatron_dynatrain.vps.placement import WHOLE, Placement, cut_parameter, slab_name
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import Home, ModelDescription, ParameterSpec, Segment, StateKind, Where
from tests.pure.models import FIRST, dense_model, moe_model, parameter

LAYER0 = Home(Where.LAYER, 0)


def rows(placement: Placement, rank: int, tensor: str, state: StateKind = StateKind.PARAM) -> list[int]:
    """Row numbers, over all dims but the last, that a rank holds of a tensor, in the order of its memory."""
    found = []
    for piece in sorted(placement.pieces_of(rank, tensor), key=lambda piece: piece.offset):
        if piece.state is state:
            shape = next(s.shape for p in placement.description.parameters for s in p.segments if s.key == tensor)
            numbers = np.arange(int(np.prod(shape[:-1]))).reshape(shape[:-1])
            inside = Box(piece.box.lo[:-1], piece.box.hi[:-1])
            found += numbers[inside.relative_to(Box.whole(shape[:-1]))].reshape(-1).tolist()
    return found


def held(placement: Placement, rank: int) -> set[str]:
    return {piece.tensor for piece in placement.pieces(rank)}


# --- C01: the padded vocabulary -------------------------------------------------------------------------------------


def test_c01_padded_rows_follow_tp_and_one_size_fits_all() -> None:
    assert [padded_vocab_size(70, 8, [tp]) for tp in (1, 2, 4, 8, 1)] == [72, 80, 96, 128, 72]
    assert padded_vocab_size(70, 8, [1, 2, 4, 8]) == 128
    assert padded_vocab_size(70, 8, [2, 3]) == 96


@pytest.mark.parametrize("tied", [False, True])
def test_c01_rows_of_the_pinned_table_under_every_tp(tied: bool) -> None:
    padded = padded_vocab_size(70, 8, [1, 2, 4, 8])
    description = dense_model(vocab=padded, tied=tied)
    tables = {"embedding.word_embeddings.weight"} | (set() if tied else {"output_layer.weight"})
    for tp in (1, 2, 4, 8, 1):
        placement = Placement(description, ParallelLayout(tp=tp, dp=1))
        for table in tables:
            for state in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
                covered = np.zeros((padded, 32), int)
                for rank in range(tp):
                    mine = [piece for piece in placement.pieces_of(rank, table) if piece.state is state]
                    assert [piece.box for piece in mine] == [
                        Box((rank * padded // tp, 0), ((rank + 1) * padded // tp, 32))
                    ]
                    for piece in mine:
                        covered[piece.box.relative_to(Box.whole(covered.shape))] += 1
                assert (covered == 1).all()


# --- C02: fused projections -----------------------------------------------------------------------------------------


def fused() -> ModelDescription:
    gated = parameter("fc1", (2, 8, 4), 1, LAYER0)
    packed = ParameterSpec(
        "in_proj",
        tuple(Segment(f"in_proj.{name}", (size, 4), 0) for name, size in zip("qkvzba", PACKED, strict=True)),
        LAYER0,
        dtype="float32",
    )
    return ModelDescription((gated, packed), num_layers=1)


PACKED = (8, 8, 16, 16, 4, 4)


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        (1, [list(range(16))]),
        (2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        (4, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
    ],
)
def test_c02a_gate_and_up_are_split_apart(tp: int, expected: list[list[int]]) -> None:
    for dp in (1, 2):
        placement = Placement(fused(), ParallelLayout(tp=tp, dp=dp))
        for rank in range(tp * dp):
            assert rows(placement, rank, "fc1") == expected[rank % tp]
    placement = Placement(fused(), ParallelLayout(tp=tp, dp=1))
    for state in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        assert [rows(placement, rank, "fc1", state) for rank in range(tp)] == expected


def packed_rows(placement: Placement, rank: int, state: StateKind) -> list[int]:
    """Rows of the packed matrix in the order of the local memory."""
    found = []
    for start, name in zip(np.cumsum([0, *PACKED[:-1]]).tolist(), "qkvzba", strict=True):
        found += [start + row for row in rows(placement, rank, f"in_proj.{name}", state)]
    return found


def test_c02b_packed_segments_are_split_apart() -> None:
    expected = {0: [*range(4), *range(8, 12), *range(16, 24), *range(32, 40), 48, 49, 52, 53]}
    expected[1] = [row for row in range(56) if row not in expected[0]]
    one, two = Placement(fused(), ParallelLayout(dp=1)), Placement(fused(), ParallelLayout(tp=2, dp=1))
    for state in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        assert packed_rows(one, 0, state) == list(range(56))
        assert [packed_rows(two, rank, state) for rank in (0, 1)] == [expected[0], expected[1]]
    offsets = [p.offset for p in two.pieces(0) if p.slab == slab_name(StateKind.PARAM, 0, "in_proj")]
    assert offsets == [0, 16, 32, 64, 96, 104]


def test_run_across_segments_starts_anywhere() -> None:
    spec = fused().parameters[1]
    assert list(cut_parameter(spec, 2, 1, (13, 34))) == [
        ("in_proj.q", Box((7, 1), (8, 4)), 0),
        ("in_proj.k", Box((4, 0), (8, 4)), 3),
        ("in_proj.v", Box((8, 0), (9, 2)), 19),
    ]


# --- C08 and C11: global layer and expert numbers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp": 2}, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        ({"dp": 1, "pp": 2}, [[0, 1], [2, 3]]),
        ({"dp": 1, "pp": 4}, [[0], [1], [2], [3]]),
        ({"dp": 1, "pp": 2, "vpp": 2}, [[0, 2], [1, 3]]),
    ],
)
def test_c08_layers_keep_their_global_number(sizes: dict[str, int], expected: list[list[int]]) -> None:
    placement = Placement(dense_model(), ParallelLayout(**sizes))
    for rank, numbers in enumerate(expected):
        found = {int(key.split(".")[2]) for key in held(placement, rank) if key.startswith("decoder.layers.")}
        assert sorted(found) == numbers
    chunks = {piece.slab.split(":")[0] for piece in placement.pieces(0) if piece.state is StateKind.PARAM}
    assert chunks == ({"param@0", "param@1"} if "vpp" in sizes else {"param@0"})


@pytest.mark.parametrize(
    ("sizes", "layers", "experts"),
    [
        ({"dp": 1, "pp": 4}, [[0], [1], [2], [3]], [[0, 1, 2, 3]] * 4),
        ({"dp": 4, "ep": 4}, [[0, 1, 2, 3]] * 4, [[0], [1], [2], [3]]),
        ({"dp": 4, "ep": 2}, [[0, 1, 2, 3]] * 4, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ({"dp": 2, "pp": 2, "ep": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 1], [2, 3], [0, 1], [2, 3]]),
    ],
)
def test_c11_experts_keep_their_global_number(
    sizes: dict[str, int], layers: list[list[int]], experts: list[list[int]]
) -> None:
    placement = Placement(moe_model(), ParallelLayout(**sizes))
    for rank in range(4):
        slabs = [slab.parameter for slab in placement.slabs(rank) if slab.state is StateKind.PARAM]
        for layer in range(4):
            path = f"decoder.layers.{layer}.mlp."
            mine = [name for name in slabs if name.startswith(path)]
            if layer not in layers[rank]:
                assert not mine
                continue
            routed = [int(name.split(".")[6]) for name in mine if ".local_experts." in name]
            assert routed == [expert for expert in experts[rank] for _ in ("fc1", "fc2")]
            assert f"{path}router.weight" in mine
            assert f"{path}shared_experts.linear_fc1.weight" in mine
            assert f"{path}router.expert_bias" in held(placement, rank)


def test_c11_optimizer_shards_of_an_expert_stay_with_its_ep_rank() -> None:
    placement = Placement(moe_model(), ParallelLayout(dp=4, ep=2))
    for expert in range(4):
        key = f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        assert placement.holders(key) == ((0, 2) if expert < 2 else (1, 3))
        owners = {rank for rank in range(4) for piece in placement.pieces_of(rank, key) if piece.state not in WHOLE}
        assert owners <= set(placement.holders(key))
        assert (
            sum(p.box.numel for r in owners for p in placement.pieces_of(r, key) if p.state is StateKind.EXP_AVG) == 128
        )


def test_tied_copies_are_one_tensor_in_two_slabs() -> None:
    key = "embedding.word_embeddings.weight"
    split = Placement(dense_model(tied=True), ParallelLayout(tp=2, dp=1, pp=4))
    assert split.holders(key) == (0, 1, 6, 7)
    assert {piece.slab for piece in split.pieces_of(6, key) if piece.state is StateKind.PARAM} == {
        "param@0:output_layer.weight"
    }
    assert "output_layer.weight" not in {
        slab.parameter for slab in Placement(dense_model(tied=True), ParallelLayout(dp=1)).slabs(0)
    }


def test_ranks_share_equal_pieces() -> None:
    placement = Placement(dense_model(), ParallelLayout(tp=2, dp=4, instances=2))
    assert placement.pieces(0)[0] is placement.pieces(2)[0]
    assert placement.pieces(0) == placement.pieces(4)
    assert all(a is b for a, b in zip(placement.pieces(0), placement.pieces(4), strict=True))
    assert placement.pieces(0) is placement.pieces(0)


def test_holders_do_not_list_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement(dense_model(), ParallelLayout(tp=4, dp=64, pp=4))
    monkeypatch.setattr(placement, "pieces", None)
    monkeypatch.setattr(placement, "_build", None)
    assert placement.holders("decoder.layers.1.mlp.linear_fc1.weight") == tuple(range(256, 512))
    with pytest.raises(PlacementError, match="no such logical tensor; subject: nothing"):
        placement.holders("nothing")


def test_misfits_are_named() -> None:
    with pytest.raises(LayoutError, match=r"4 experts can't be spread evenly over ep 3"):
        Placement(moe_model(), ParallelLayout(dp=3, ep=3))
    with pytest.raises(LayoutError, match=r"4 layers can't be spread evenly over pp 3"):
        Placement(dense_model(), ParallelLayout(dp=1, pp=3))
    with pytest.raises(LayoutError, match=r"can't be split evenly over 3 .*subject: embedding.word_embeddings.weight"):
        Placement(dense_model(), ParallelLayout(tp=3, dp=1)).pieces(0)
    lost = ModelDescription((parameter("a", (1,), None, Home(Where.LAYER, 1)),), num_layers=1)
    with pytest.raises(LayoutError, match=r"layer is not in the model.*subject: a; expected: layer 0\.\.0; got: 1"):
        Placement(lost, ParallelLayout(dp=1))
    with pytest.raises(LayoutError, match="not in the layout"):
        Placement(ModelDescription((parameter("a", (1,), None, FIRST),), num_layers=1), ParallelLayout(dp=1)).pieces(1)


def test_experts_in_the_dense_buffer_need_equal_grids() -> None:
    mixed = {"tp": 2, "cp": 2, "dp": 1, "order": "cp-tp-ep-dp-pp"}
    with pytest.raises(LayoutError, match="same tensor-parallel groups in both grids"):
        Placement(moe_model(), ParallelLayout(**mixed))
    Placement(dense_model(), ParallelLayout(**mixed))
    Placement(moe_model(), ParallelLayout(**mixed, etp=1))
