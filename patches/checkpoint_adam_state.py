"""A checkpoint can be loaded into torch's Adam before its first step.

What: `DistributedOptimizer.sharded_state_dict(is_loading=True)` makes the state of a fresh Adam first: `step` 0 and
zero moments, as Adam's own first step would.
Why: it calls `state_dict()`, which asserts exactly one distinct `step`; a fresh optimizer has none, so that the load
ends in a bare AssertionError. `load_state_dict` would make the state, but comes too late.
Needed: only where neither Transformer Engine nor Apex is installed.
Versions: megatron-core 0.19.x. Can go: when loading into a fresh torch Adam works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_dynatrain.patches.methods import wrap


def install() -> None:
    """Apply the mend; idempotent, each process by itself."""
    from megatron.core.optimizer import distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        wrap(distrib_optimizer.DistributedOptimizer, "sharded_state_dict", _sharded_state_dict)


def _sharded_state_dict(
    original: Callable[..., Any],
    self: Any,
    model_sharded_state_dict: Any = None,
    is_loading: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if is_loading and isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
        make_adam_state(self.optimizer)
    return original(self, model_sharded_state_dict or {}, is_loading, *args, **kwargs)


def make_adam_state(optimizer: torch.optim.Adam) -> None:
    """Give every parameter of a fresh Adam its state: `step` 0 in float32 and zero moments of its shape and dtype."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
