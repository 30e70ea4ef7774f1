"""What nobody listed is refused by name at every switch, and the job trains on as if nothing had been asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks.dynamic import all_steps, layout_keys, run_switched
from tests.ranks.pool import RankPool
from tests.states import customize
from tests.states.switched import FIRST, SECOND, small_args

UNKNOWN = {
    "a fused parameter with odd parts": (
        customize.add_odd_fusion,
        ("a fused parameter has parts that are not understood", "decoder.layers.0.mlp.linear_fc1.weight"),
    ),
    "a buffer in no state dict": (
        customize.add_unlisted_buffer,
        ("a buffer is in no list of states", "decoder.layers.0.mlp.tokens_seen", "float32(3,)"),
    ),
    "another optimizer": (
        customize.use_another_adam,
        ("the inner optimizer is not one whose states are known", "Sophisticated"),
    ),
    "another state of the optimizer": (
        customize.add_optimizer_state,
        ("the optimizer's states are not the ones in the list", "exp_avg_cubed", ".weight: "),
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_state_is_refused_by_name_and_the_job_is_unharmed(ranks: RankPool, what: str) -> None:
    hook: Callable[..., None]
    hook, words = UNKNOWN[what]
    argv = small_args(layers=1)
    run = run_switched(ranks, 2, argv, {FIRST: layout_keys(tp=2), SECOND: layout_keys(tp=2)}, hooks=(hook,))
    assert [switch.outcome for switch in run.switches] == ["refused", "refused"]
    for switch in run.switches:
        assert switch.error is not None
        assert [word for word in words if word not in switch.error] == []
    alone = all_steps(ranks.pretrain(2, argv, hooks=(hook,)))
    assert list(run.steps) == alone  # all figures, bit for bit


def test_a_buffer_that_the_module_declares_is_moved_in_its_own_dtype(ranks: RankPool) -> None:
    """Layer 1 moves to rank 1 and back; its float64 buffer goes on counting where it was."""
    argv = small_args()
    hooks = (customize.add_listed_buffer,)
    switches = {FIRST: layout_keys(pp=2), SECOND: layout_keys()}
    run = run_switched(ranks, 2, argv, switches, hooks=hooks)
    assert [switch.outcome for switch in run.switches] == ["committed", "committed"]
    seen = [record.extra["seen"] for record in run.ranks]
    assert sorted(seen[0]) == [0, 1, 4, 5]  # at pp 2 it is on rank 1 alone
    assert sorted(seen[1]) == [0, 1, 2, 3, 4, 5]
    assert seen[0][4] == seen[1][4]
    value, expected = 1 / 3 + 1, {}
    for step, micro_batches in enumerate([2, 2, 4, 4, 2, 2]):
        expected[step] = [value] * 3
        for _ in range(micro_batches):
            value += 1 / 7
    assert seen[1] == expected
