"""Which layers a stage holds: even, uneven, counted, interleaved and written splits; case C06."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynatrain import pipeline_split
from megatron_dynatrain.errors import LayoutError, UnsupportedError
from megatron_dynatrain.layout import ParallelLayout, PipelineSplit
from megatron_dynatrain.pipeline_split import parse_stages


def layers(num_layers: int, pp: int, vpp: int | None = None, **split: object) -> list[list[list[int]]]:
    layout = ParallelLayout(dp=1, pp=pp, vpp=vpp, split=PipelineSplit(**split))
    return [[list(chunk) for chunk in stage] for stage in layout.stage_layers(num_layers)]


def test_c06_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"6 layers can't be spread evenly over pp 4.*expected: a multiple of 4"):
        layers(6, 4)


@pytest.mark.parametrize(
    ("num_layers", "pp", "split", "expected"),
    [
        (6, 4, {"first": 2, "last": 2}, [[0, 1], [2], [3], [4, 5]]),
        (6, 4, {"account_for_embedding": True, "account_for_loss": True}, [[0], [1, 2], [3, 4], [5]]),
        (7, 3, {"first": 3}, [[0, 1, 2], [3, 4], [5, 6]]),
        (7, 2, {"first": 4}, [[0, 1, 2, 3], [4, 5, 6]]),
    ],
)
def test_c06_uneven_splits(num_layers: int, pp: int, split: dict[str, object], expected: list[list[int]]) -> None:
    assert [stage[0] for stage in layers(num_layers, pp, **split)] == expected


def test_c06_seven_layers_from_three_stages_to_two() -> None:
    before, after = layers(7, 3, first=3), layers(7, 2, first=4)
    assert 3 in before[1][0]
    assert 3 in after[0][0]
    for spread in (before, after):
        assert sorted(layer for stage in spread for chunk in stage for layer in chunk) == list(range(7))


def test_c06_one_stage_with_last_does_not_build_one_layer() -> None:
    with pytest.raises(LayoutError, match=r"3 layers are left for 0 ranks.*4 layers, pp 1, last=1"):
        layers(4, 1, last=1)


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "split", "expected"),
    [
        (4, 2, 2, {}, [[[0], [2]], [[1], [3]]]),
        (8, 2, 2, {}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (6, 2, 2, {"account_for_embedding": True, "account_for_loss": True}, [[[0], [3, 4]], [[1, 2], [5]]]),
        (8, 3, 2, {"first": 2, "last": 2}, [[[0], [4]], [[1, 2], [5, 6]], [[3], [7]]]),
        (6, 2, None, {"layout": "Ettt|(t)*3L"}, [[[0, 1, 2]], [[3, 4, 5]]]),
        (6, 2, None, {"layout": "E|t*2|tt,|ttL"}, [[[], [2, 3]], [[0, 1], [4, 5]]]),
        (7, 2, None, {"layout": "Ettt|t|tt|tL"}, [[[0, 1, 2], [4, 5]], [[3], [6]]]),
        (5, 4, None, {"layout": "E|(tt|)*2t|L"}, None),
        (5, 5, None, {"layout": "E|(tt|)*2t|L"}, [[[]], [[0, 1]], [[2, 3]], [[4]], [[]]]),
    ],
)
def test_interleaved_and_written(
    num_layers: int, pp: int, vpp: int | None, split: dict[str, object], expected: list[list[list[int]]] | None
) -> None:
    if expected is None:
        with pytest.raises(LayoutError, match="another number of stages"):
            layers(num_layers, pp, vpp, **split)
    else:
        assert layers(num_layers, pp, vpp, **split) == expected


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "split", "words"),
    [
        (6, 2, 2, {}, "a multiple of 4"),
        (5, 2, None, {"account_for_embedding": True, "account_for_loss": True}, r"5 layers \+ embedding \+ loss"),
        (1, 1, None, {"first": 1, "last": 1}, "-1 layers are left for -1 ranks"),
        (4, 2, None, {"first": 1, "last": 1}, "2 layers are left for 0 ranks"),
        (4, 3, None, {"first": 2, "last": 2}, "0 layers are left for 1 ranks"),
        (3, 3, None, {"first": 4}, "-1 layers are left"),
        (7, 4, None, {"first": 2}, "the 5 layers left can't be spread evenly over 3 pipeline ranks"),
        (8, 3, 2, {"first": 3, "last": 3}, "the 3 layers of pipeline rank 0 can't be spread evenly over vpp 2"),
        (8, 2, 2, {"first": 4, "last": 4}, "needs a pipeline rank between them"),
        (6, 2, None, {"layout": "Ett|ttL"}, "another number of layers.*expected: 6 layers; got: 4"),
    ],
)
def test_impossible_splits(num_layers: int, pp: int, vpp: int | None, split: dict[str, object], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        layers(num_layers, pp, vpp, **split)


@pytest.mark.parametrize(
    "split",
    [
        {"first": 1, "account_for_loss": True},
        {"first": 1, "layout": "Et|tL"},
        {"account_for_embedding": True, "layout": "Et|tL"},
        {"last": 0},
        {"layout": ""},
        {"layout": "t|tL"},
        {"layout": "Et|t"},
        {"layout": "EEt|tL"},
        {"layout": "tE|tL"},
        {"layout": "Et|(t)L"},
        {"layout": "Et|(t*2L"},
        {"layout": "Et|((t)*2)*2L"},
        {"layout": "Et|()*2L"},
        {"layout": "Et*|tL"},
        {"layout": "Et|xL"},
        {"layout": "*2Et|tL"},
    ],
)
def test_splits_that_cannot_be_read(split: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        PipelineSplit(**split)


def test_prediction_layers_are_named() -> None:
    with pytest.raises(UnsupportedError, match="multi-token prediction"):
        PipelineSplit(layout="Et|tmL")


def test_written_layout_is_read_like_a_text() -> None:
    assert parse_stages("Et*3|(tt|)*2,tL") == ("Ettt", "tt", "tt", "tL")
    assert parse_stages("Et|*3tL") == ("Et", "", "", "tL")


def test_coverage_is_checked_whatever_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_split, "_counts_even", lambda *_: [[1], [2]])
    with pytest.raises(LayoutError, match=r"every layer exactly once.*got: \[0, 1, 2\]"):
        layers(4, 2)


def test_a_model_has_layers() -> None:
    with pytest.raises(LayoutError, match="a model needs a layer"):
        layers(0, 2)


@given(
    per_chunk=st.integers(1, 3),
    pp=st.integers(1, 5),
    vpp=st.integers(1, 3),
    ends=st.tuples(st.booleans(), st.booleans()),
)
def test_every_layer_is_in_one_chunk_in_the_order_of_a_token(
    per_chunk: int, pp: int, vpp: int, ends: tuple[bool, bool]
) -> None:
    chunks = vpp if pp > 1 else 1
    num_layers = per_chunk * pp * chunks - sum(ends)
    if num_layers < 1:
        return
    spread = layers(num_layers, pp, chunks, account_for_embedding=ends[0], account_for_loss=ends[1])
    order = [layer for chunk in range(len(spread[0])) for stage in spread for layer in stage[chunk]]
    assert order == list(range(num_layers))
