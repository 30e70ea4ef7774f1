"""A synchronous save passes its results through a plain queue.

What: during `TorchDistSaveShardedStrategy.save` the result queue of `filesystem_async` is a `queue.Queue`.
Why: Megatron makes the queue by a spawned `multiprocessing.Manager`, which imports the main script again, so that the
first save of each rank costs seconds; a synchronous save writes and reads the results in one process. An asynchronous
save keeps the manager, because another process writes the results.
Versions: megatron-core 0.19.x. Can go: when `save` itself makes a plain queue.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from megatron_dynatrain.patches.methods import wrap


def install() -> None:
    """Apply the mend; idempotent, each process by itself."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    wrap(TorchDistSaveShardedStrategy, "save", _save)


def _save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    kept, filesystem_async._results_queue = filesystem_async._results_queue, queue.Queue()
    try:
        return original(*args, **kwargs)
    finally:
        filesystem_async._results_queue = kept
