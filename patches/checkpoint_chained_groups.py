"""A checkpoint of several chained optimizers can be loaded by one.

What: `DistributedOptimizer.load_state_dict` joins the param_groups of the numbered optimizers of the checkpoint.
Why: with EP > 1 (or an expert TP of its own) the experts have an optimizer of their own, and the two are saved under
the keys 0 and 1; with EP 1 there is one, which finds no key 'optimizer'. The state of the parameters is keyed by
parameter and needs nothing.
Versions: megatron-core 0.19.x. Can go: when the checkpoint keys param_groups by what they are. The other direction,
one optimizer to two, is not mended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_dynatrain.patches.methods import wrap


def install() -> None:
    """Apply the mend; idempotent, each process by itself."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    wrap(DistributedOptimizer, "load_state_dict", _load_state_dict)


def _load_state_dict(original: Callable[..., Any], self: Any, state_dict: Mapping[Any, Any]) -> Any:
    return original(self, join_chained(state_dict))


def join_chained(state_dict: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the state of one optimizer from that of several numbered ones; others as they are."""
    if "optimizer" in state_dict or 0 not in state_dict:
        return state_dict
    parts = [state_dict[index] for index in sorted(key for key in state_dict if isinstance(key, int))]
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    shared = {key: value for key, value in parts[0].items() if key != "optimizer"}
    own = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
    return {**shared, **own, "optimizer": {"param_groups": groups}}
