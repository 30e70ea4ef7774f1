"""What the pool can ask a rank to do; imports Megatron only when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.ranks.context import RankContext

if TYPE_CHECKING:
    from tests.ranks.records import PretrainRecord


def pretrain(context: RankContext, argv: tuple[str, ...], hooks: tuple[Callable[..., None], ...]) -> PretrainRecord:
    """Run `pretrain()` as this rank."""
    from tests.ranks.pretrain import PretrainRun

    run = PretrainRun(context, argv)
    for hook in hooks:
        hook(run)
    return run.run()
