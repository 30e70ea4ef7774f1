"""What a switch does with each buffer of a model: the registry of states that are not parameters.

Router counters. A step counts tokens per expert on each rank; `finalize_model_grads` sums them over all ranks of the
stage, updates `expert_bias` (or `qb_beta`) and empties the counters (`reset_model_temporary_tensors`). At an iteration
boundary they are zero, and the rule is: **counters start at zero on every rank after a switch**, whatever they were.
The totals of the global auxiliary loss are emptied there too, but they are sums over the whole stage, the same on all
of its ranks, so they can be moved as they are, and are.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from megatron_dynatrain.errors import UnsupportedError, VerificationError


class BufferRule(enum.StrEnum):
    """What happens to a buffer in a switch."""

    MOVED = "moved"
    """It is part of the model: moved like a parameter, in its own dtype."""
    REBUILT = "rebuilt"
    """Its value is a function of the configuration, or zero at an iteration boundary: the target's own is right."""


_COUNTERS = frozenset(("local_tokens_per_expert", "qb_beta_accum", "qb_beta_count"))
"""Sums of one rank within one step."""
_TABLES = frozenset(("inv_freq", "cos_cached", "sin_cached"))
"""Tables of rotary positions."""
_REBUILT = _COUNTERS | _TABLES
_MOVED = frozenset(("global_tokens_per_expert", "ga_steps"))
"""Buffers that are not in the state dict and are moved nevertheless."""


def rule_of(name: str, buffer: torch.Tensor, *, persistent: bool, declared: bool) -> BufferRule:
    """Return the rule of a buffer.

    Args:
        name: Its module path.
        buffer: The buffer.
        persistent: Whether it is in the module's state dict.
        declared: Whether the model's sharded_state_dict declares it.

    Raises:
        UnsupportedError: Nobody listed it: it would be lost without a word.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf in _REBUILT:
        return BufferRule.REBUILT
    if (persistent and declared) or leaf in _MOVED:
        return BufferRule.MOVED
    raise UnsupportedError(
        "a buffer is in no list of states, so a switch would lose it",
        subject=name,
        expected="one that the model's sharded_state_dict declares, or one of " + ", ".join(sorted(_REBUILT | _MOVED)),
        got=f"{str(buffer.dtype).removeprefix('torch.')}{tuple(buffer.shape)}",
        hint="make it persistent, or add it to mcore/buffers.py with a test",
    )


def check_counters(chunks: Sequence[torch.nn.Module], *, rank: int) -> None:
    """Check that the counters of a target start at zero; local.

    Raises:
        VerificationError: Names the first that doesn't.
    """
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.rsplit(".", 1)[-1] in _COUNTERS and bool(buffer.count_nonzero()):
                raise VerificationError(
                    "a counter of the target doesn't start at zero",
                    rank=rank,
                    phase="verify",
                    subject=name,
                    expected="zeros, as at every iteration boundary",
                    got=buffer.tolist(),
                )
