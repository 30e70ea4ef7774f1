"""Starting to read data leaves the random state alone.

What: a data loader's iterator puts torch's random state back after drawing the seed of its workers.
Why: dropout draws from CUDA's stream, the loader from the CPU's. Here both are one, and only tensor rank 0 has a
loader: its replicas would drop other units than the rest of the tensor group, and drift apart without an error.
Versions: torch 2.14. Can go: see `cpu`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import dataloader


def install() -> None:
    """Replace the constructor; each process once."""
    original = dataloader._BaseDataLoaderIter.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before = torch.get_rng_state()
        original(self, *args, **kwargs)
        torch.set_rng_state(before)

    dataloader._BaseDataLoaderIter.__init__ = init  # type: ignore[method-assign]
