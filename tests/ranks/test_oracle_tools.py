"""The two tools of the oracle see a single wrong bit: a proof that can't fail proves nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import checkpoint_bits
from tests.ranks.context import RankContext
from tests.ranks.independent_gather import LogicalState, _assemble, _Part
from tests.ranks.pool import RankPool

KEY = "decoder.layers.mlp.linear_fc1.weight"


def part(values: list[int], *, start: int = 0, held: list[bool] | None = None) -> _Part:
    mask = np.array(held if held is not None else [True] * len(values))
    region = (slice(start, start + len(values)),)
    return _Part(KEY, "param", (4,), region, mask, np.array(values, np.uint32))


def state(values: list[int], step: float = 6.0) -> LogicalState:
    return _assemble([part(values)], {step})


def test_a_gather_puts_parts_together() -> None:
    whole = _assemble(
        [part([1, 2]), part([0, 4], start=2, held=[False, True]), part([3, 0], start=2, held=[True, False])], {6.0}
    )
    assert whole.bits[KEY, "param"].tolist() == [1, 2, 3, 4]
    assert not whole.differences(state([1, 2, 3, 4]))


def test_a_gather_refuses_replicas_that_differ() -> None:
    with pytest.raises(AssertionError, match=r"replicas differ .*linear_fc1.weight param': 1"):
        _assemble([part([1, 2, 3, 4]), part([1, 2, 3, 5])], {6.0})


def test_a_gather_refuses_elements_that_nobody_holds() -> None:
    with pytest.raises(AssertionError, match=r"held by no rank .*linear_fc1.weight param': 2"):
        _assemble([part([1, 2])], {6.0})


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (state([1, 2, 3, 5]), f"{KEY} param: 1 of 4 elements differ"),
        (state([2, 1, 3, 4]), f"{KEY} param: 2 of 4 elements differ"),
        (state([1, 2, 3, 4], step=7.0), "step: (6.0,) and (7.0,)"),
        (dataclasses.replace(state([1, 2, 3, 4]), bits={}), f"{KEY} param: held by one of the two only"),
    ],
    ids=["element", "permuted", "step", "missing"],
)
def test_a_difference_is_named(other: LogicalState, line: str) -> None:
    assert state([1, 2, 3, 4]).differences(other) == [line]


def save_two(context: RankContext, left: Path, right: Path) -> None:
    """Save two checkpoints that differ in the sign of one zero, in one plain value and in one key."""
    import torch
    from torch.distributed import checkpoint

    for directory in (left, right):
        content = {
            "weight": torch.zeros(3, 2),
            "optimizer.state.exp_avg.weight": torch.ones(3, 2),
            "common_state/shard_0_1[0]": [{"iteration": 6, "args": directory.name}],
            "rng_state": torch.tensor([float(directory is right)]),
        }
        if directory is right:
            content["weight"][1, 1] = -0.0
            content["common_state/shard_0_1[0]"][0]["iteration"] = 7
            content["extra"] = torch.zeros(1)
        checkpoint.save(content, checkpoint_id=directory / "iter_0000006", no_dist=True)
        (directory / "latest_checkpointed_iteration.txt").write_text("6")


def test_checkpoints_are_compared_by_bits(ranks: RankPool) -> None:
    left, right = ranks.scratch("left"), ranks.scratch("right")
    ranks.run(1, save_two, left, right, init_group=False)
    (result,) = ranks.run(1, checkpoint_bits.compare, left, right, init_group=False)
    assert result.compared == {"model": 1, "exp_avg": 1}
    found = sorted(result.different)
    assert [line.partition(":")[0] for line in found] == ["common_state/shard_0_1[0][0].iteration", "extra", "weight"]
    assert found[2] == "weight: 1 of 6 elements differ"
