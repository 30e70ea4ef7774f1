"""Switches to and from written pipeline layouts, for which Megatron asks the live parallel state where a layer is."""

from __future__ import annotations

import pytest

from tests.ranks.dynamic import layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool

WRITTEN = layout_keys(pp=2, vpp=None, layout="Ettt|tL")
CHUNKS = layout_keys(pp=2, vpp=2, layout=None)
ONE_STAGE = layout_keys(pp=1, layout=None)


@pytest.mark.parametrize(
    ("first", "second"), [(CHUNKS, WRITTEN), (ONE_STAGE, WRITTEN), (WRITTEN, CHUNKS)], ids=["vpp", "pp1", "back"]
)
def test_the_target_is_read_under_its_own_parallel_state(
    ranks: RankPool, first: dict[str, object], second: dict[str, object]
) -> None:
    run = run_switched(ranks, 2, gpt_args(pp=2, train_iters=3), {1: first, 2: second})
    assert [switch.outcome for switch in run.switches] == ["committed", "committed"], run.switches
