"""All mends of Megatron's distributed checkpoints, for 0.19.x; each file says what it mends and when it can go."""

from __future__ import annotations

from megatron_dynatrain.patches import (
    checkpoint_adam_state,
    checkpoint_bucket_padding,
    checkpoint_chained_groups,
    checkpoint_queue,
    checkpoint_step,
    checkpoint_step_alias,
)

# The wrapper installed last is called first: several of them wrap the same method.
MENDS = (
    checkpoint_queue,
    checkpoint_adam_state,
    checkpoint_step,
    checkpoint_step_alias,
    checkpoint_bucket_padding,
    checkpoint_chained_groups,
)


def install() -> None:
    """Apply every mend that this process needs; idempotent, each process by itself."""
    for mend in MENDS:
        mend.install()
