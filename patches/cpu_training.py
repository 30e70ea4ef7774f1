"""`megatron.training.pretrain()` without a GPU.

What: `initialize_megatron` gets `allow_no_cuda=True`, and `compile_helpers` does nothing.
Why: it asserts a CUDA device. The wheel ships the compiled dataset helpers but not their Makefile, so that the call to
compile them ends the process.
Versions: megatron-core 0.19.x, the first whose wheel has `megatron.training`. Can go: the first with `cpu`, the second
when the wheel ships the Makefile or skips the call where the helpers are importable.
"""

from __future__ import annotations

import functools


def install() -> None:
    """Replace both functions; each process once."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.training.training as training

    if isinstance(training.initialize_megatron, functools.partial):
        return
    dataset_utils.compile_helpers = lambda: None
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
