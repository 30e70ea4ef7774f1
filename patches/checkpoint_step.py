"""Loading a parameter's optimizer state doesn't ask for `step`.

What: `DistributedOptimizer._set_main_param_and_optimizer_states` gets `step: None` where the caller has none; it skips
what is not a tensor.
Why: it copies every tensor of the parameter's state, and torch's Adam keeps `step` as a tensor, but a checkpoint has
`step` in the param_groups and no entry for each parameter: KeyError 'step'.
Needed: only where neither Transformer Engine nor Apex is installed.
Versions: megatron-core 0.19.x. Can go: when the setter leaves out states that the caller doesn't give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_dynatrain.patches.methods import wrap


def install() -> None:
    """Apply the mend; idempotent, each process by itself."""
    from megatron.core.optimizer import distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        wrap(distrib_optimizer.DistributedOptimizer, "_set_main_param_and_optimizer_states", _set)


def _set(original: Callable[..., Any], self: Any, model_param: Any, tensors: Mapping[str, Any]) -> Any:
    return original(self, model_param, {"step": None, **tensors})
