"""Hypothesis inside of a forked rank: draw models and pairs of layouts, switch between them, shrink what fails."""

from __future__ import annotations

import gc
import itertools
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.windows import WindowBudget
from tests.megatron_models.choice import ModelChoice, pairs
from tests.ranks.context import RankContext

BUDGETS = (WindowBudget(), WindowBudget(bytes=2**16, ops=16))
"""All in one window, and many small ones."""
_COLLECT_EVERY = 20


class PairError(AssertionError):
    """A switch that broke a promise; the message is the smallest pair found and what went wrong."""


def check(context: RankContext, model: ModelChoice, *layouts: ParallelLayout, bucket_size: int | None = None) -> None:
    """Switch a model along written layouts, in a rank of the pool."""
    from tests.megatron_models.build import prepare_process
    from tests.megatron_models.pair import check_pair

    prepare_process()
    for source, target in itertools.pairwise(layouts):
        check_pair(model, source, target, bucket_size=bucket_size)


def hunt(
    context: RankContext, families: dict[str, Any], *, examples: int, seed: int, derandomize: bool = True
) -> dict[str, int]:
    """Draw pairs and check them, in a rank of the pool; ranks draw different ones.

    Args:
        context: The rank.
        families: Arguments of `pairs`.
        examples: Pairs that this rank checks.
        seed: Start of the draws; another one for each rank.
        derandomize: Whether every run draws the same.

    Returns:
        What was drawn: examples, switches, the largest world, and how often each feature was there.

    Raises:
        PairError: The smallest pair that fails, as code.
    """
    from tests.megatron_models.build import prepare_process
    from tests.megatron_models.pair import check_pair

    prepare_process()
    gc.disable()  # a collection walks through all of Megatron's modules; now and then is enough
    seen: dict[str, int] = {"examples": 0, "largest world": 0}

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(pairs(**families), st.sampled_from(BUDGETS), st.sampled_from((None, None, 200)))
    def switch(
        pair: tuple[ModelChoice, ParallelLayout, ParallelLayout], budget: WindowBudget, bucket_size: int | None
    ) -> None:
        if seen["examples"] % _COLLECT_EVERY == 0:
            gc.collect()
        _count(seen, *pair)
        try:
            check_pair(*pair, budget=budget, bucket_size=bucket_size)
        except Exception as error:
            model, source, target = pair
            raise PairError(
                f"{type(error).__name__}: {error}\n\nmodel = {model}\nsource = {source}\ntarget = {target}\n"
                f"check_pair(model, source, target, bucket_size={bucket_size}, budget={budget})"
            ) from error

    if derandomize:
        switch = seeded(seed * 1000 + context.rank)(switch)
    switch()
    return seen


def _count(seen: dict[str, int], model: ModelChoice, source: ParallelLayout, target: ParallelLayout) -> None:
    """Count what the pair has, so that a test can see that nothing is drawn too rarely."""
    seen["examples"] += 1
    seen["largest world"] = max(seen["largest world"], source.world_size, target.world_size)
    features = {model.dtype, f"experts {model.experts}", f"latent {model.latent}", model.router, model.frozen}
    features |= {
        name for name in ("gated", "rms", "bias", "qk_norm", "learned", "tied", "shared") if getattr(model, name)
    }
    for layout in (source, target):
        features |= {name for name in ("tp", "cp", "ep", "dp", "pp", "instances") if getattr(layout, name) > 1}
        features |= {f"vpp {layout.num_chunks}", layout.order} & {"vpp 2", "vpp 3", "tp-cp-ep-dp-pp"}
        features |= {
            name
            for name, found in (
                ("etp != tp", layout.etp != layout.tp),
                ("experts in the dense buffer", bool(model.experts) and not layout.experts_apart),
                ("uneven", layout.split.first is not None or layout.split.last is not None),
                ("account", layout.split.account_for_embedding or layout.split.account_for_loss),
                ("written", layout.split.layout is not None),
                ("another order", layout.order != "tp-cp-ep-dp-pp"),
                ("permuted ranks", layout.ranks != tuple(range(layout.world_size))),
                ("tied over stages", model.tied and layout.pp > 1),
            )
            if found
        }
    for feature in features - {""}:
        seen[feature] = seen.get(feature, 0) + 1
