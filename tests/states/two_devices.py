"""Host and device told apart on a machine without a GPU."""

from __future__ import annotations

from typing import Any


def two_devices() -> None:
    """Let tensors of this process say that they are on a GPU, except those that came from pinned memory."""
    import torch

    class Host(torch.Tensor):
        """A tensor in pinned memory, and what is computed from it."""

        is_cuda = False

    tensor: Any = torch.Tensor
    tensor.is_cuda = True
    tensor.pin_memory = lambda self, *_: self.as_subclass(Host)
