"""Logical tensors: what a description refuses, and which states a parameter has."""

from __future__ import annotations

import pickle

import pytest

from megatron_dynatrain.vps.tensor import Home, ModelDescription, ParameterSpec, Segment, StateKind, Where
from tests.pure.models import FIRST, LAST, dense_model, parameter


def test_states_by_dtype_and_role() -> None:
    description = dense_model()
    moments = [(StateKind.EXP_AVG, "float32"), (StateKind.EXP_AVG_SQ, "float32")]
    for spec, expected in (
        (parameter("a", (2,), None, FIRST), [(StateKind.PARAM, "float32"), *moments]),
        (
            parameter("a", (2,), None, FIRST, dtype="bfloat16"),
            [(StateKind.PARAM, "bfloat16"), (StateKind.MAIN, "float32"), *moments],
        ),
        (parameter("a", (2,), None, FIRST, dtype="bfloat16", trainable=False), [(StateKind.PARAM, "bfloat16")]),
        (parameter("a", (2,), None, FIRST, is_buffer=True), [(StateKind.BUFFER, "float32")]),
    ):
        assert list(description.states_of(spec)) == expected


def test_names_are_unique() -> None:
    spec = parameter("a", (2,), None, FIRST)
    with pytest.raises(ValueError, match="two parameters are named a"):
        ModelDescription((spec, spec), num_layers=1)


@pytest.mark.parametrize("other", [Segment("key", (5,)), Segment("key", (4,), 0)])
def test_copies_of_a_tensor_are_described_alike(other: Segment) -> None:
    first = ParameterSpec("a", (Segment("key", (4,)),), FIRST, "float32")
    with pytest.raises(ValueError, match="b: another parameter describes key in another way"):
        ModelDescription((first, ParameterSpec("b", (other,), LAST, "float32")), num_layers=1)
    with pytest.raises(ValueError, match="b: another"):
        ModelDescription((first, ParameterSpec("b", first.segments, LAST, "bfloat16")), num_layers=1)
    assert ModelDescription((first, ParameterSpec("b", first.segments, LAST, "float32")), num_layers=1)


def test_shard_dim_and_layer_must_exist() -> None:
    for dim in (-1, 2):
        with pytest.raises(ValueError, match=f"shard_dim {dim} is not a dim"):
            Segment("a", (2, 3), dim)
    for where, layer in ((Where.LAYER, None), (Where.FIRST, 0)):
        with pytest.raises(ValueError, match="can't have layer"):
            Home(where, layer)


def test_description_is_equal_after_pickling() -> None:
    description = dense_model(tied=True)
    assert pickle.loads(pickle.dumps(description)) == description
