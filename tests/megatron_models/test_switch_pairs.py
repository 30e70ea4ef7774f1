"""Drawn pairs of layouts of real Megatron models: every element, every replica, every byte.

The models are Megatron's own GPTModel in its DDP and distributed optimizer, built rank by rank in one process with
groups that carry no bytes. `--hypothesis-profile soak` draws more of them, others every time.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from megatron_dynatrain.layout import ParallelLayout, PipelineSplit
from tests.megatron_models import hunt
from tests.megatron_models.choice import ModelChoice
from tests.ranks.pool import RankFailure, RankPool

WORKERS = 2
SOAK = settings.get_current_profile_name() == "soak"
FAMILIES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "dense": (
        {"moe": False, "latent": False},
        140,
        ("float32", "bfloat16", "float16", "gated", "qk_norm", "learned", "tied over stages", "uneven", "written"),
    ),
    "moe": (
        {"moe": True, "latent": False},
        140,
        ("ep", "etp != tp", "experts in the dense buffer", "shared", "expert_bias", "global_aux_loss", "bias"),
    ),
    "latent": ({"latent": True}, 40, ("latent 1", "latent 2")),
}
"""Family -> (what is drawn, pairs in CI, what must be among them besides what all families have)."""
ALWAYS = ("tp", "cp", "dp", "pp", "instances", "vpp 2", "account", "another order", "permuted ranks")


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_pairs(ranks: RankPool, family: str) -> None:
    drawn, examples, expected = FAMILIES[family]
    if SOAK:
        examples = settings().max_examples
    found = ranks.run(
        WORKERS,
        hunt.hunt,
        drawn,
        examples=examples // WORKERS,
        seed=sorted(FAMILIES).index(family),
        derandomize=not SOAK,
        timeout=5 * 3600 if SOAK else 1500,
        init_group=False,
    )
    assert sum(seen["examples"] for seen in found) >= examples
    assert max(seen["largest world"] for seen in found) >= 12
    for feature in (*ALWAYS, *expected):
        assert sum(seen.get(feature, 0) for seen in found) >= 3, (feature, found)


def test_ci_draws_at_least_300_pairs() -> None:
    assert sum(examples for _, examples, _ in FAMILIES.values()) >= 300


# --- pairs that are named ---------------------------------------------------------------------------------------------

MOE = ModelChoice(layers=2, experts=4, gated=True, rms=True, dtype="bfloat16", router="expert_bias", shared=True)
TIED = ModelChoice(layers=4, tied=True, hidden=6, dtype="bfloat16")


def check(ranks: RankPool, model: ModelChoice, *layouts: ParallelLayout, bucket_size: int | None = None) -> None:
    ranks.run(1, hunt.check, model, *layouts, bucket_size=bucket_size, timeout=200, init_group=False)


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_over_ep_1_2_4(ranks: RankPool, etp: int) -> None:
    sizes = {"tp": 2, "etp": etp, "sequence_parallel": True}
    layouts = [ParallelLayout.for_world(4 * etp, ep=ep, **sizes) for ep in (1, 2, 4, 1)]
    check(ranks, MOE, *layouts, bucket_size=100)


def test_tied_embedding_over_stages_and_chunks(ranks: RankPool) -> None:
    layouts = [ParallelLayout.for_world(4, pp=pp, vpp=vpp) for pp, vpp in ((1, None), (2, None), (2, 2), (4, None))]
    check(ranks, TIED, *layouts, layouts[0])


@pytest.mark.parametrize("frozen", ["layernorm", "decoder.layers.0.", "word_embeddings"])
def test_frozen_parameters(ranks: RankPool, frozen: str) -> None:
    model = ModelChoice(layers=2, hidden=6, frozen=frozen, tied=True, dtype="bfloat16")
    check(ranks, model, ParallelLayout(tp=2, dp=2), ParallelLayout(pp=2, dp=1), ParallelLayout(tp=4, dp=1))


@pytest.mark.parametrize(
    "split", [PipelineSplit(layout="E|t|L"), PipelineSplit(layout="Et||L")], ids=["frozen", "empty"]
)
def test_a_stage_without_anything_to_train(ranks: RankPool, split: PipelineSplit) -> None:
    """DDP has no buffer there; what is built after the modules must be real nevertheless."""
    model = ModelChoice(layers=1, frozen="decoder.layers.0.")
    check(ranks, model, ParallelLayout(dp=3), ParallelLayout(dp=1, pp=3, split=split), ParallelLayout(dp=2))


# --- the hunt itself --------------------------------------------------------------------------------------------------


def _hunt_with_a_fault(context: Any, *args: Any, **kwargs: Any) -> Any:
    """Say of a split fc1 that its shards are in the opposite order."""
    from megatron_dynatrain.vps import homes, placement

    stock = homes.local_box

    def shifted(segment: Any, parts: int, index: int) -> Any:
        wrong = parts - 1 - index if segment.key.endswith("linear_fc1.weight") else index
        return stock(segment, parts, wrong)

    placement.local_box = shifted
    return hunt.hunt(context, *args, **kwargs)


def test_a_fault_is_found_and_shrunk(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="hold wrong elements") as failure:
        ranks.run(
            1, _hunt_with_a_fault, {"moe": False, "latent": False}, examples=40, seed=7, timeout=1500, init_group=False
        )
    (text,) = failure.value.errors.values()
    assert "linear_fc1.weight" in text
    assert "ModelChoice(layers=1," in text  # the smallest model: one layer, nothing else
    assert "gated=False, rms=False, bias=False" in text
