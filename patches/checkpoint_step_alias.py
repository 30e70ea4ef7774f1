"""After a load every parameter has a `step` of its own.

What: `DistributedOptimizer.load_state_dict` clones each `step` of torch's Adam when it is done.
Why: it puts one tensor into the state of all parameters, and `torch.optim.Optimizer.load_state_dict` keeps a `step` as
it is. Adam then adds 1 to it once for each parameter: `step` grows by the number of parameters in every step, and the
bias correction is wrong, without an error.
Needed: only where neither Transformer Engine nor Apex is installed.
Versions: megatron-core 0.19.x. Can go: when `load_state_dict` makes one tensor for each parameter.
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
        wrap(distrib_optimizer.DistributedOptimizer, "load_state_dict", _load_state_dict)


def _load_state_dict(original: Callable[..., Any], self: Any, state_dict: Any) -> Any:
    result = original(self, state_dict)
    for state in self.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    return result
