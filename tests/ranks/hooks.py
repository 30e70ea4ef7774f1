"""Hooks for `RankPool.pretrain`, called in each rank before it starts; importing them imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun


def mend_checkpoints(run: PretrainRun, *, without: str | None = None) -> None:
    """Apply the mends of Megatron's checkpoints; with `functools.partial` all but that of the file `without`."""
    from megatron_dynatrain.patches import checkpoint

    for mend in checkpoint.MENDS:
        name = mend.__name__.rpartition(".")[2]
        if name != without:
            mend.install()
    run.record.extra["without"] = without


def count_managers(run: PretrainRun) -> None:
    """Count the manager processes that are started, in `extra["managers"]`."""
    from multiprocessing.managers import BaseManager
    from typing import Any

    start = BaseManager.start
    run.record.extra["managers"] = 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        run.record.extra["managers"] += 1
        start(self, *args, **kwargs)

    BaseManager.start = counted  # type: ignore[method-assign]


def dynamic(run: PretrainRun) -> None:
    """Install the plugin, as `python -m megatron_dynatrain.run` does; `extra["job"]` is not kept, tests read files."""
    from megatron_dynatrain.patches import checkpoint
    from megatron_dynatrain.training.install import install

    checkpoint.install()
    run.plugin = install()
