"""What a function knows about the rank it runs on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import FileStore


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of a case.

    Attributes:
        rank: Global rank.
        world: Number of ranks of the case.
        tmp: Directory of the case, shared by its ranks and gone after it.
        timeout: Seconds that the case may take.
    """

    rank: int
    world: int
    tmp: Path
    timeout: float

    def store(self, name: str, size: int | None = None) -> FileStore:
        """Return the store of that name, the same one on every rank; of `size` users, by default the world."""
        from torch.distributed import FileStore

        return FileStore(str(self.tmp / f"store.{name}"), size or self.world)

    def init_process_group(self, name: str = "default", *, rank: int | None = None, size: int | None = None) -> None:
        """Make the default group over gloo. Collective over its ranks.

        Args:
            name: Name of its store.
            rank: Rank in the group, by default the global one.
            size: Size of the group, by default the world.
        """
        from datetime import timedelta

        import torch.distributed as dist

        size = size or self.world
        dist.init_process_group(
            "gloo",
            store=self.store(name, size),
            rank=self.rank if rank is None else rank,
            world_size=size,
            timeout=timedelta(seconds=self.timeout),
        )
