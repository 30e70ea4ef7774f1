"""The `Switcher` in a loop that is not Megatron's `train()`: A -> B -> A is the identity, A -> B -> C equals A -> C.

No step lies between the switches, so everything that a rank holds is compared in all bits: parameters, main parameters,
moments and step counts; and the whole state, replicas included, by `independent_gather`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.ranks.context import RankContext
from tests.ranks.independent_gather import STATES, LogicalState
from tests.ranks.pool import RankPool

ROUNDING = 1e-6  # relative: fp32, other order of summation
STEPS = 2  # before the switches, and after them
PP_BEFORE_DP = "tp-cp-ep-pp-dp"
Keys = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Three layouts of one world, and what the model needs for them."""

    world: int
    a: Keys
    b: Keys
    c: Keys
    sizes: Keys = dataclasses.field(default_factory=dict)


THREE = {"layers": 3, "hidden": 48, "heads": 6, "groups": 3, "ffn": 96, "global_batch": 6}
FOUR = {"layers": 4, "groups": 4}
CHAINS = {
    "dp2-pp2-tp2": Chain(2, {}, {"pp": 2}, {"tp": 2}),
    "tp2sp-dp2-pp2": Chain(2, {"tp": 2, "sequence_parallel": True}, {}, {"pp": 2}),
    "dp3-tp3-pp3": Chain(3, {}, {"tp": 3}, {"pp": 3}, THREE),
    "pp3-dp3-tp3": Chain(3, {"pp": 3}, {}, {"tp": 3}, THREE),
    "tp2dp2-pp2dp2-tp2pp2": Chain(4, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "dp4-tp4-pp4": Chain(4, {}, {"tp": 4}, {"pp": 4}, FOUR),
    "dp4-tp2pp2-ranks-in-any-order": Chain(4, {}, {"ranks": (2, 0, 3, 1), "tp": 2, "pp": 2}, {"ranks": (3, 2, 1, 0)}),
    "pp2dp2-tp2dp2-other-order": Chain(4, {"pp": 2, "order": PP_BEFORE_DP}, {"tp": 2}, {"pp": 2}),
}
MODELS: dict[str, Keys] = {
    "fp32-tied": {},
    "fp32-untied": {"modern": True},
    "bf16-tied": {"bf16": True},
    "bf16-untied": {"bf16": True, "modern": True},
}
CASES = [
    ("dp2-pp2-tp2", "fp32-tied"),
    ("dp2-pp2-tp2", "bf16-untied"),
    ("tp2sp-dp2-pp2", "bf16-tied"),
    ("dp3-tp3-pp3", "fp32-untied"),
    ("dp3-tp3-pp3", "bf16-tied"),
    ("pp3-dp3-tp3", "fp32-tied"),
    ("tp2dp2-pp2dp2-tp2pp2", "fp32-untied"),
    ("tp2dp2-pp2dp2-tp2pp2", "bf16-tied"),
    ("dp4-tp4-pp4", "fp32-tied"),
    ("dp4-tp4-pp4", "bf16-untied"),
    ("dp4-tp2pp2-ranks-in-any-order", "fp32-tied"),
    ("pp2dp2-tp2dp2-other-order", "fp32-tied"),
]


@dataclasses.dataclass
class ChainRecord:
    """What one rank saw; `held` and `whole` by the path of layouts from the start, in letters.

    Attributes:
        held: Digests of everything that the rank holds.
        whole: The gathered state; on rank 0.
        steps: (loss, gradient norm) of every step.
        moved: (moved bytes, minimum bytes) of every switch.
    """

    held: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    whole: dict[str, LogicalState | None] = dataclasses.field(default_factory=dict)
    steps: list[tuple[float | None, float]] = dataclasses.field(default_factory=list)
    moved: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def chain_job(
    context: RankContext, sizes: Keys, layouts: dict[str, Keys], paths: tuple[str, ...], verify: str = "digest"
) -> ChainRecord:
    """Train, go the paths one after the other without a step between, and train on."""
    from megatron_dynatrain.layout import ParallelLayout
    from tests.ranks.core_job import CoreJob, Sizes, local_digests
    from tests.ranks.independent_gather import gather

    world_of = {name: keys.get("ranks", context.world) for name, keys in layouts.items()}
    sizes_of = {name: {key: n for key, n in keys.items() if key != "ranks"} for name, keys in layouts.items()}
    made = {name: ParallelLayout.for_world(world_of[name], **sizes_of[name]) for name in layouts}
    record = ChainRecord()
    job = CoreJob(Sizes(**sizes), made[paths[0][0]], verify=verify)
    record.steps += [job.step() for _ in range(STEPS)]
    for path in paths:
        if len(path) > 1:
            report = job.switch(made[path[-1]])
            record.moved.append((report.moved_bytes, report.minimum_bytes))
        world = job.switcher.world
        record.held[path] = local_digests(world.chunks, world.optimizer)
        record.whole[path] = gather(world.chunks, world.optimizer)
    record.steps += [job.step() for _ in range(STEPS)]
    return record


def losses(records: list[ChainRecord]) -> list[float]:
    """Return the loss of each step, from whichever rank had it."""
    rows = zip(*(record.steps for record in records), strict=True)
    return [next(loss for loss, _ in row if loss is not None) for row in rows]


@pytest.mark.parametrize(("chain", "model"), CASES)
def test_identity_and_composition(ranks: RankPool, chain: str, model: str) -> None:
    case = CHAINS[chain]
    sizes = {**case.sizes, **MODELS[model]}
    layouts = {"A": case.a, "B": case.b, "C": case.c}
    paths = ("A", "AC", "ACA", "ACAB", "ACABC")
    verify = "full" if sizes.get("bf16") else "digest"
    records = ranks.run(case.world, chain_job, sizes, layouts, paths, verify)
    for record in records:
        assert record.held["A"] == record.held["ACA"]
        assert record.held["AC"] == record.held["ACABC"]
        assert all(moved == minimum > 0 for moved, minimum in record.moved)
    assert any(record.held["A"] != record.held["AC"] for record in records)
    first, *others = [whole for record in records for whole in record.whole.values() if whole is not None]
    assert len(others) == 4
    assert first.steps == (float(STEPS),)
    assert {state for _, state in first.bits} == set(STATES)
    for other in others:
        assert not first.differences(other)


@pytest.mark.parametrize("chain", ["dp2-pp2-tp2", "dp3-tp3-pp3"])
def test_training_goes_on_as_without_switches(ranks: RankPool, chain: str) -> None:
    case = CHAINS[chain]
    layouts = {"A": case.a, "B": case.b, "C": case.c}
    switched = ranks.run(case.world, chain_job, case.sizes, layouts, ("A", "AB", "ABC"))
    never = ranks.run(case.world, chain_job, case.sizes, layouts, ("A",))
    assert losses(switched)[:STEPS] == losses(never)[:STEPS]
    assert losses(switched) == pytest.approx(losses(never), rel=ROUNDING)
    norms = [[norm for _, norm in records[0].steps] for records in (switched, never)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * ROUNDING)


def test_replicas_hold_every_element_as_often_as_the_layout_says(ranks: RankPool) -> None:
    case = CHAINS["tp2dp2-pp2dp2-tp2pp2"]
    layouts = {"A": case.a, "B": case.b, "C": case.c}
    (record, *_) = ranks.run(4, chain_job, {}, layouts, ("A", "AB", "ABC"))
    embedding, norm = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
    fc1 = "decoder.layers.mlp.linear_fc1.weight"
    for path, copies in {"A": (2, 4, 2), "AB": (4, 2, 2), "ABC": (2, 2, 1)}.items():
        whole = record.whole[path]
        assert tuple(whole.copies[name, "param"] for name in (embedding, norm, fc1)) == copies, path
        # The optimizer's state is cut over the replicas: 1 of a plain tensor, tied copies and TP replicas apart.
        assert whole.copies[fc1, "exp_avg"] == 1
