"""The strongest proof: a switch inside a run equals Megatron's own checkpoint, saved before it and loaded after it.

For each pair A -> B three runs of the same training, compared in all bits:

1. A without the plugin saves a fully reshardable checkpoint after 6 steps and ends.
2. Fresh processes at B, without the plugin, load it, do 4 more steps and save.
3. A with the plugin switches to B after 6 steps, does 4 more steps and saves.

2 and 3 both train at B, so there is no rounding to excuse. Besides, the whole state is gathered right before and right
after the switch by code of its own (`independent_gather`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import checkpoint_bits, independent_gather
from tests.ranks.dynamic import SwitchedRun, layout_keys, run_switched
from tests.ranks.gpt_args import checkpoint_args, gpt_args
from tests.ranks.hooks import mend_checkpoints
from tests.ranks.pool import RankPool
from tests.ranks.records import PretrainRecord, StepRecord

STEPS, SWITCHED = 10, 6
SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "global_batch": 4, "seq": 16}
MODERN: dict[str, Any] = {"gqa": 2, "swiglu": True, "tied": False}
MODELS: dict[str, dict[str, Any]] = {
    "fp32-tied": {},
    "bf16-untied-gqa-swiglu": {"bf16": True, **MODERN},
    "bf16-tied": {"bf16": True},
    "fp32-untied-gqa-swiglu": MODERN,
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One switch, and what the model needs for both of its layouts.

    Attributes:
        padded: Rows of the vocabulary that both layouts fit; the plugin must find the same number by itself.
        groups: Query groups of the models that have fewer of them than heads.
    """

    name: str
    world: int
    source: dict[str, Any]
    target: dict[str, Any]
    models: tuple[str, str]
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    padded: int = 128
    groups: int = 2
    extra: str = ""

    def argv(self, layout: dict[str, Any], model: str) -> list[str]:
        keywords = {**SMALL, **MODELS[model], **self.sizes, **layout}
        if "gqa" in keywords:
            keywords["gqa"] = self.groups
        return gpt_args(train_iters=STEPS, extra=self.extra, **keywords)


PLAIN, MODERN_BF16, BF16_TIED, MODERN_FP32 = MODELS
THREE = {"hidden": 48, "heads": 6, "global_batch": 6}
BUCKETS = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
PAIRS = (
    Pair("tp2dp2-pp2dp2", 4, {"tp": 2}, {"pp": 2}, (PLAIN, MODERN_BF16)),
    Pair("pp2dp2-tp2dp2", 4, {"pp": 2}, {"tp": 2}, (MODERN_FP32, BF16_TIED)),
    Pair("dp4-tp2pp2sp", 4, {}, {"tp": 2, "pp": 2, "sp": True}, (PLAIN, MODERN_BF16)),
    Pair("tp2pp2sp-dp4", 4, {"tp": 2, "pp": 2, "sp": True}, {}, (MODERN_FP32, BF16_TIED)),
    Pair("tp4-pp4", 4, {"tp": 4}, {"pp": 4}, (PLAIN, MODERN_BF16), {"layers": 4, "heads": 8}, groups=4),
    Pair("pp4-dp4", 4, {"pp": 4}, {}, (MODERN_FP32, BF16_TIED), {"layers": 4}),
    Pair("dp3-tp3", 3, {}, {"tp": 3}, (PLAIN, MODERN_BF16), THREE, 144, 3, "--ffn-hidden-size 96"),
    Pair("dp2-tp2", 2, {}, {"tp": 2}, (PLAIN, BF16_TIED)),
    Pair("dp2-tp2-buckets", 2, {}, {"tp": 2}, (MODERN_FP32, MODERN_BF16), extra=BUCKETS),
)
CASES = [pytest.param(pair, model, id=f"{pair.name}-{model}") for pair in PAIRS for model in pair.models]


def saved_at_source(ranks: RankPool, pair: Pair, model: str) -> tuple[Path, list[PretrainRecord]]:
    directory = ranks.scratch("source")
    argv = [*pair.argv(pair.source, model), *checkpoint_args(save=directory, interval=SWITCHED)]
    argv += ["--exit-interval", str(SWITCHED), "--padded-vocab-size", str(pair.padded)]
    return directory, ranks.pretrain(pair.world, argv, hooks=(mend_checkpoints,))


def loaded_at_target(ranks: RankPool, pair: Pair, model: str, source: Path) -> tuple[Path, list[PretrainRecord]]:
    directory = ranks.scratch("loaded")
    argv = [*pair.argv(pair.target, model), *checkpoint_args(load=source, save=directory)]
    argv += ["--padded-vocab-size", str(pair.padded)]
    return directory, ranks.pretrain(pair.world, argv, hooks=(mend_checkpoints,))


def switched(ranks: RankPool, pair: Pair, model: str) -> tuple[Path, SwitchedRun]:
    directory = ranks.scratch("switched")
    argv = [*pair.argv(pair.source, model), *checkpoint_args(save=directory)]
    around = functools.partial(independent_gather.around_switch, at=SWITCHED)
    return directory, run_switched(ranks, pair.world, argv, {SWITCHED: layout_keys(**pair.target)}, hooks=(around,))


def assert_equal_steps(left: Sequence[StepRecord], right: Sequence[StepRecord], iterations: range) -> None:
    """Compare all figures of some steps, as one rank saw them, bit for bit."""
    assert [step.iteration for step in left] == list(iterations)
    assert list(left) == list(right)


@pytest.mark.parametrize(("pair", "model"), CASES)
def test_a_switch_equals_save_and_load(ranks: RankPool, pair: Pair, model: str) -> None:
    source, first = saved_at_source(ranks, pair, model)
    loaded, second = loaded_at_target(ranks, pair, model, source)
    online, third = switched(ranks, pair, model)

    assert [(s.iteration, s.outcome) for s in third.switches] == [(SWITCHED, "committed")]
    for rank in range(pair.world):
        steps = third.ranks[rank].steps
        assert_equal_steps(steps[:SWITCHED], first[rank].steps, range(SWITCHED))
        assert_equal_steps(steps[SWITCHED:], second[rank].steps, range(SWITCHED, STEPS))
    assert len(third.steps) == STEPS  # some rank saw the loss of every step

    (result,) = ranks.run(1, checkpoint_bits.compare, loaded, online, init_group=False)
    assert not result.different
    assert min(result.compared[kind] for kind in ("model", "main", "exp_avg", "exp_avg_sq")) > 5

    before, after = (third.ranks[0].extra[name] for name in ("before", "after"))
    assert not before.differences(after)
    assert before.steps == (float(SWITCHED),)
    assert {state for _, state in before.bits} == set(independent_gather.STATES)
