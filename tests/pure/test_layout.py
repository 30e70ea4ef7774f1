"""ParallelLayout: what is normalised, what is refused and with which words, and how ranks are found."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import AXES, ParallelLayout, PipelineSplit


def test_defaults_follow_other_fields() -> None:
    layout = ParallelLayout(tp=2, dp=3, pp=2)
    assert (layout.etp, layout.ranks, layout.world_size, layout.edp) == (2, tuple(range(12)), 12, 3)
    assert (layout.vpp, layout.num_chunks) == (None, 1)


def test_for_world_gives_dp_what_is_left() -> None:
    assert ParallelLayout.for_world(12, tp=3, pp=2).dp == 2
    assert ParallelLayout.for_world([7, 5, 3], tp=3).ranks == (7, 5, 3)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"world_size": 6, "tp": 4}, "tp 4 x cp 1 x pp 1 = 4 doesn't divide the world size 6"),
        ({"world_size": 12, "tp": 2, "cp": 2, "pp": 2}, "tp 2 x cp 2 x pp 2 = 8 doesn't divide the world size 12"),
        ({"world_size": 0}, "doesn't divide the world size 0"),
        (
            {"world_size": 4, "ep": 3},
            "etp 1 x ep 3 x pp 1 = 3 doesn't divide the world size 4 = tp 1 x cp 1 x pp 1 x dp",
        ),
        ({"world_size": 4, "vpp": 2}, "a virtual pipeline needs pp > 1"),
        ({"world_size": 4, "tp": 0}, "subject: tp"),
        ({"world_size": 4, "pp": -1}, "subject: pp"),
        ({"world_size": 4, "cp": 2.0}, "subject: cp"),
        ({"world_size": 4, "ep": True}, "subject: ep"),
        ({"world_size": (0, 1, 1, 2)}, "ranks must be unique"),
        ({"world_size": (0, -1)}, "not negative"),
        ({"world_size": 6, "instances": 4}, "4 distributed optimizer instances don't divide dp x cp = 6"),
        ({"world_size": 4, "ep": 4, "instances": 2}, "2 distributed optimizer instances don't divide edp = 1"),
        ({"world_size": 4, "order": "tp-cp-dp-pp"}, "names each axis once"),
        ({"world_size": 4, "order": "tp-cp-ep-dp-dp"}, "names each axis once"),
        ({"world_size": 8, "pp": 2, "cp": 2, "order": "tp-cp-ep-pp-dp"}, "edp 4 and dp 2 must be the same"),
    ],
)
def test_refusals_name_sizes(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        ParallelLayout.for_world(sizes.pop("world_size"), **sizes)
    assert words in str(caught.value)


def test_product_must_be_the_world() -> None:
    with pytest.raises(LayoutError, match=r"tp 2 x cp 1 x pp 1 x dp 2 = 4 is not the world size 3"):
        ParallelLayout(tp=2, dp=2, ranks=(0, 1, 2))


def test_grids_with_other_pipeline_groups_are_refused() -> None:
    with pytest.raises(LayoutError, match="pipeline groups of the dense and the expert grid differ"):
        ParallelLayout(tp=2, dp=4, pp=2, ep=2, etp=1, order="tp-pp-cp-ep-dp")


def test_equal_by_fields() -> None:
    layout = ParallelLayout(tp=2, dp=2)
    same = ParallelLayout(tp=2, etp=2, dp=2, vpp=None, ranks=(0, 1, 2, 3))
    assert layout == same
    assert hash(layout) == hash(same)
    assert pickle.loads(pickle.dumps(layout)) == layout
    others = [
        ParallelLayout(tp=2, dp=2, sequence_parallel=True),
        ParallelLayout(tp=2, dp=2, order="tp-cp-ep-pp-dp"),
        ParallelLayout(tp=2, dp=2, ranks=(1, 0, 2, 3)),
        ParallelLayout(tp=2, dp=2, etp=1),
        ParallelLayout(tp=2, dp=2, instances=2),
        ParallelLayout(tp=2, dp=2, split=PipelineSplit(account_for_loss=True)),
    ]
    assert len({layout, *others}) == 7


def test_what_cannot_matter_is_normalised() -> None:
    assert ParallelLayout(dp=2, sequence_parallel=True) == ParallelLayout(dp=2)
    assert ParallelLayout(dp=2, pp=2, vpp=1) == ParallelLayout(dp=2, pp=2)
    assert ParallelLayout(dp=1, pp=2, split=PipelineSplit(layout="Et|t|t|tL")).vpp == 2


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (ParallelLayout(dp=1), "dp1"),
        (ParallelLayout(tp=2, dp=2, sequence_parallel=True), "tp2 dp2 sp"),
        (ParallelLayout(tp=2, pp=2, dp=1), "tp2 pp2"),
        (ParallelLayout(pp=2, vpp=2, cp=2, dp=2, instances=2), "cp2 pp2 vpp2 dp2 instances2"),
        (ParallelLayout(tp=2, ep=2, etp=1, dp=2), "tp2 ep2 etp1 dp2"),
        (ParallelLayout(dp=4, ranks=(4, 5, 7, 1)), "dp4 ranks 4-5,7,1"),
        (ParallelLayout(dp=2, order="dp-tp-cp-ep-pp"), "dp2 dp-tp-cp-ep-pp"),
        (ParallelLayout(dp=1, pp=2, split=PipelineSplit(first=1)), "pp2 [first=1]"),
    ],
)
def test_describe(layout: ParallelLayout, text: str) -> None:
    assert layout.describe() == text


def test_replace_keeps_the_ranks_and_gives_dp_what_is_left() -> None:
    layout = ParallelLayout(tp=2, dp=2, pp=2, vpp=2, sequence_parallel=True)
    assert layout.replace(tp=4) == ParallelLayout(tp=4, dp=1, pp=2, vpp=2, sequence_parallel=True)
    assert layout.replace(pp=1) == ParallelLayout(tp=2, dp=4, sequence_parallel=True)
    assert layout.replace(ranks=range(4)).dp == 1
    assert layout.replace(dp=4).ranks == tuple(range(16))
    assert layout.replace(tp=4, etp=2, ep=2).etp == 2
    assert layout.replace(etp=1, ep=2).replace(tp=4).etp == 1
    with pytest.raises(LayoutError, match="doesn't divide the world size 8"):
        layout.replace(tp=3)


def test_replace_reads_chunks_from_a_written_layout() -> None:
    layout = ParallelLayout(dp=1, pp=4, split=PipelineSplit(layout="Et|t|t|tL"))
    assert (layout.vpp, layout.replace(pp=2, dp=1).vpp) == (None, 2)
    assert layout.replace(pp=2, dp=1).replace(split=PipelineSplit()).vpp is None


def test_ranks_are_global_and_in_grid_order() -> None:
    layout = ParallelLayout(tp=2, dp=2, ranks=(7, 3, 5, 1))
    assert layout.groups("tp") == ((7, 3), (5, 1))
    assert layout.groups("dp") == ((7, 5), (3, 1))
    assert layout.group_of(1, "dp") == (3, 1)
    assert layout.coordinate(5) == {"tp": 0, "cp": 0, "ep": 0, "dp": 1, "pp": 0}
    with pytest.raises(LayoutError, match=r"not in the layout.*expected: 7,3,5,1; got: 0"):
        layout.coordinate(0)
    with pytest.raises(LayoutError, match="token"):
        layout.groups("tp-zz")


def test_expert_coordinates() -> None:
    layout = ParallelLayout(tp=2, dp=4, ep=4, etp=1)
    assert [layout.coordinate(rank, expert=True)["ep"] for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [layout.coordinate(rank, expert=True)["dp"] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layout.coordinate(3) == {"tp": 1, "cp": 0, "ep": 0, "dp": 1, "pp": 0}


@given(
    sizes=st.fixed_dictionaries({axis: st.integers(1, 3) for axis in ("tp", "cp", "dp", "pp")}),
    order=st.permutations(AXES).map("-".join),
    seed=st.randoms(use_true_random=False),
)
def test_coordinates_and_groups_agree(sizes: dict[str, int], order: str, seed: Any) -> None:
    if not order.endswith("pp") and sizes["cp"] > 1:
        sizes = sizes | {"cp": 1}
    world = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    ranks = seed.sample(range(2 * world), world)
    layout = ParallelLayout(**sizes, order=order, ranks=ranks)
    assert len({tuple(layout.coordinate(rank).values()) for rank in ranks}) == world
    for axis in ("tp", "cp", "dp", "pp"):
        for rank in ranks:
            group = layout.group_of(rank, axis)
            at = layout.coordinate(rank)
            assert len(group) == sizes[axis]
            assert group[at[axis]] == rank
            assert layout.index_in(rank, axis) == at[axis]
            assert {tuple((layout.coordinate(peer) | {axis: 0}).values()) for peer in group} == {
                tuple((at | {axis: 0}).values())
            }
