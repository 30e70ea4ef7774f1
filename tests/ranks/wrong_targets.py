"""Targets that are another model than the job's, each built for one attempt; importing this imports no Megatron."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dynatrain.switch import Switcher

_LAYER = "decoder.layers.1"
GATED, SPLIT = f"{_LAYER}.mlp.linear_fc1.weight", f"{_LAYER}.mlp.linear_fc2.weight"
PLAIN, TABLE = f"{_LAYER}.input_layernorm.weight", "embedding.word_embeddings.weight"


@contextmanager
def _built(switcher: Switcher, change: Callable[[Any], None]) -> Iterator[None]:
    """Change the model of the target on rank 1 after it was built, before anything looks at it."""
    build = switcher.build

    def build_another(layout: Any) -> Any:
        from megatron.core.utils import unwrap_model

        chunks, optimizer = build(layout)
        if switcher.rank == 1:
            change(unwrap_model(chunks[0]))
        return chunks, optimizer

    switcher.build = build_another
    try:
        yield
    finally:
        switcher.build = build


def _declared(switcher: Switcher, change: Callable[[dict[str, Any]], None]) -> AbstractContextManager[None]:
    """Change what the target's model says in its sharded_state_dict."""

    def wrap(model: Any) -> None:
        stock = model.sharded_state_dict

        def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            found = dict(stock(*args, **kwargs))
            change(found)
            return found

        model.sharded_state_dict = sharded_state_dict

    return _built(switcher, wrap)


def not_gated(switcher: Switcher) -> AbstractContextManager[None]:
    """Declare a gated projection as one matrix: the same elements in another order."""

    def change(found: dict[str, Any]) -> None:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        item = found[GATED]
        shape = tuple(item.data.shape)
        found[GATED] = ShardedTensor(
            item.key, item.data, item.data.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape), item.replica_id
        )

    return _declared(switcher, change)


def other_shape(switcher: Switcher) -> AbstractContextManager[None]:
    """Declare a whole matrix with its dims the other way round."""

    def change(found: dict[str, Any]) -> None:
        item = found[SPLIT]
        found[SPLIT] = dataclasses.replace(item, global_shape=item.global_shape[::-1])

    return _declared(switcher, change)


def not_declared(switcher: Switcher) -> AbstractContextManager[None]:
    """Declare nothing of one parameter."""
    return _declared(switcher, lambda found: found.pop(PLAIN))


def split_by_attribute(switcher: Switcher) -> AbstractContextManager[None]:
    """Say on the parameter that tensor parallelism splits it, where it doesn't."""

    def change(model: Any) -> None:
        parameter = dict(model.named_parameters())[PLAIN]
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0

    return _built(switcher, change)


def other_dtype(switcher: Switcher) -> AbstractContextManager[None]:
    """Hold one parameter in 16 bits."""

    def change(model: Any) -> None:
        import torch

        parameter = dict(model.named_parameters())[TABLE]
        parameter.data = parameter.data.to(torch.bfloat16)

    return _built(switcher, change)


def no_longer_trained(switcher: Switcher) -> AbstractContextManager[None]:
    """Freeze one parameter when the optimizer has it already."""
    return _built(switcher, lambda model: dict(model.named_parameters())[PLAIN].requires_grad_(False))


def one_parameter_more(switcher: Switcher) -> AbstractContextManager[None]:
    """Give the model a parameter that the job's model hasn't."""

    def change(model: Any) -> None:
        import torch

        model.decoder.layers[1].mlp.scale = torch.nn.Parameter(torch.ones(3))

    return _built(switcher, change)
