"""Everything that a rank would import lazily is imported ahead, once: a 4-rank case then takes half the time."""

from __future__ import annotations

import importlib
import warnings

# Roots whose import brings in what building, training and saving a small GPT imports by and by.
# fmt: off
_LAZY = (
    "getpass", "pytest",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries.null_tokenizer",
    "megatron.core.tokenizers.text.models.default_tokenizer",
    "torch._decomp.decompositions_for_rng", "torch._dynamo.backends.registry", "torch._dynamo.polyfills.loader",
    "torch._dynamo.symbolic_convert", "torch._functorch.deprecated", "torch._inductor.standalone_compile",
    "torch._inductor.test_operators", "torch.distributed.checkpoint", "torch.nn.utils._expanded_weights", "torch.onnx",
    "torch.utils._device", "torch.utils.serialization.config",
)
# fmt: on


def import_all() -> None:
    """Import torch, the CPU patches, Megatron and the modules it imports lazily."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        torch.set_num_threads(1)
        from megatron_dynatrain.patches import cpu

        cpu.install()
        importlib.import_module("tests.ranks.pretrain")
        for name in _LAZY:
            importlib.import_module(name)
