"""Writers of metrics stay with the last rank, which is another process once ranks are numbered anew."""

from __future__ import annotations

from argparse import Namespace

import megatron.training.global_vars as megatron_globals


def follow_last_rank(args: Namespace) -> None:
    """Close the TensorBoard writer of a process that is no longer the last rank, and open one on the new last rank.

    Megatron has the losses on the last pipeline stage and the writer on the last rank: a writer that stayed where it
    was would go silent. Local; a no-op where the last rank stays.
    """
    writer = megatron_globals._GLOBAL_TENSORBOARD_WRITER
    last = args.rank == args.world_size - 1
    if writer is not None and not last:
        writer.close()
        megatron_globals._GLOBAL_TENSORBOARD_WRITER = None
    elif writer is None and last and getattr(args, "tensorboard_dir", None):
        megatron_globals._set_tensorboard_writer(args)


def close_writer() -> None:
    """Write what the TensorBoard writer still holds and close it: the process leaves the layout, or ends. Local."""
    writer = megatron_globals._GLOBAL_TENSORBOARD_WRITER
    if writer is not None:
        writer.close()
        megatron_globals._GLOBAL_TENSORBOARD_WRITER = None
