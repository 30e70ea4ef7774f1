"""What a switch does with each buffer of a model: the registry of states that are not parameters."""

from __future__ import annotations

import enum

import torch

from megatron_dynatrain.errors import UnsupportedError


class BufferRule(enum.StrEnum):
    """What happens to a buffer in a switch."""

    MOVED = "moved"
    """It is part of the model: moved like a parameter, in its own dtype."""
    REBUILT = "rebuilt"
    """Its value is a function of the configuration, or zero at an iteration boundary: the target's own is right."""


_REBUILT = frozenset(
    (
        # Router counters: Megatron empties them when it updates the bias at the end of a step.
        "local_tokens_per_expert",
        "qb_beta_accum",
        "qb_beta_count",
        # Tables of rotary positions.
        "inv_freq",
        "cos_cached",
        "sin_cached",
    )
)
_MOVED = frozenset(
    (
        # Running totals of the global auxiliary loss: they go on over steps.
        "global_tokens_per_expert",
        "ga_steps",
    )
)


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
