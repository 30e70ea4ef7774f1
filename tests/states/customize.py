"""Hooks that change the model as a user's script would: through the configuration's own list of hooks before DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

Chunks = list[Any]


def before_wrapping(run: PretrainRun, change: Callable[[Any], None]) -> None:
    """Let the script apply `change` to every model chunk, of every layout, before DDP wraps it."""
    from tests.ranks.pretrain import script

    stock = script.gpt_config_from_args

    def apply(chunks: Chunks) -> Chunks:
        for chunk in chunks:
            change(chunk)
        return chunks

    def gpt_config_from_args(args: Any) -> Any:
        config = stock(args)
        config.pre_wrap_hooks.append(apply)
        return config

    script.gpt_config_from_args = gpt_config_from_args


def layers_of(chunk: Any) -> dict[int, Any]:
    """Return the chunk's layers by their global, zero-based number."""
    return {layer.layer_number - 1: layer for layer in chunk.decoder.layers}


# --- frozen -----------------------------------------------------------------------------------------------------------


def freeze_some(run: PretrainRun) -> None:
    """Freeze the embeddings, the output layer, the final norm and the MLP of layer 0."""
    before_wrapping(run, _freeze_some)


def _freeze_some(chunk: Any) -> None:
    for name, parameter in chunk.named_parameters():
        if name.startswith(("embedding.word", "output_layer", "decoder.final_layernorm")):
            parameter.requires_grad_(False)
    if 0 in layers_of(chunk):
        layers_of(chunk)[0].mlp.requires_grad_(False)


def freeze_the_end(run: PretrainRun) -> None:
    """Freeze layer 1 and all that comes after it: at pp 2 a whole stage."""
    before_wrapping(run, _freeze_the_end)


def _freeze_the_end(chunk: Any) -> None:
    for name, parameter in chunk.named_parameters():
        if name.startswith(("output_layer", "decoder.final_layernorm")):
            parameter.requires_grad_(False)
    if 1 in layers_of(chunk):
        layers_of(chunk)[1].requires_grad_(False)


# --- added ------------------------------------------------------------------------------------------------------------


def add_low_rank(run: PretrainRun) -> None:
    """Freeze the attention's projections and give each an addition of low rank."""
    before_wrapping(run, _add_low_rank)


def _add_low_rank(chunk: Any) -> None:
    from tests.states.low_rank import LowRank

    for layer in layers_of(chunk).values():
        layer.self_attention.linear_qkv = LowRank(layer.self_attention.linear_qkv, rank=4)


# --- what nobody knows ------------------------------------------------------------------------------------------------


def add_unlisted_buffer(run: PretrainRun) -> None:
    """Give every layer a buffer that is in no state dict."""
    before_wrapping(run, _add_unlisted_buffer)


def _add_unlisted_buffer(chunk: Any) -> None:
    import torch

    for layer in layers_of(chunk).values():
        layer.mlp.register_buffer("tokens_seen", torch.zeros(3), persistent=False)


def add_listed_buffer(run: PretrainRun) -> None:
    """Give every layer a buffer that its state dict declares, counted up in each forward; layer 1's is `extra`."""
    before_wrapping(run, _add_listed_buffer)

    def keep(model: Any, optimizer: Any, scheduler: Any) -> None:
        for name, buffer in model[0].named_buffers():
            if name.endswith("1.tokens_seen") or (name.endswith("0.tokens_seen") and _first_layer(model) == 1):
                run.record.extra.setdefault("seen", {})[len(run.record.steps)] = buffer.tolist()

    run.before_step.append(keep)


def _first_layer(model: Any) -> int:
    from megatron.core.utils import unwrap_model

    return min(layers_of(unwrap_model(model[0])))


def _add_listed_buffer(chunk: Any) -> None:
    import torch

    for number, layer in layers_of(chunk).items():
        layer.register_buffer("tokens_seen", torch.full((3,), 1 / 3 + number, dtype=torch.float64))
        layer.register_forward_hook(_count)


def _count(module: Any, args: Any, output: Any) -> None:
    del args, output
    module.tokens_seen += 1 / 7


def add_odd_fusion(run: PretrainRun) -> None:
    """Declare fc1 of every MLP in two parts that are not one after the other: its even rows and its odd rows."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.transformer.mlp import MLP

    stock = MLP.sharded_state_dict

    def build(key: str, tensor: Any, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        del flattened_range
        size = parallel_state.get_tensor_model_parallel_world_size()
        rows, *rest = tensor.shape[0] // 2, *tensor.shape[1:]
        first = parallel_state.get_tensor_model_parallel_rank() * rows
        place = (rows * size, *rest), (first, *(0 for _ in rest)), (size, *(1 for _ in rest))
        return [
            ShardedTensor(f"{key}.{name}", part, part.dtype, (rows, *rest), *place, replica_id)
            for name, part in (("even", tensor[::2]), ("odd", tensor[1::2]))
        ]

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        declared = stock(self, *args, **kwargs)
        for name, item in declared.items():
            if name.endswith("linear_fc1.weight"):
                declared[name] = ShardedTensorFactory(item.key, item.data, build, list, item.replica_id)
        return declared

    MLP.sharded_state_dict = sharded_state_dict


def use_another_adam(run: PretrainRun) -> None:
    """Let Megatron build its distributed optimizer around a class derived from AdamW."""
    import torch

    class Sophisticated(torch.optim.AdamW):
        """An AdamW that could keep anything."""

    torch.optim.AdamW = Sophisticated  # Megatron looks it up when it builds the optimizer


def add_optimizer_state(run: PretrainRun) -> None:
    """Give every parameter a third moment after the first step."""

    def add(model: Any, optimizer: Any, scheduler: Any) -> None:
        for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
            for state in inner.optimizer.state.values():
                if "exp_avg" in state:
                    state["exp_avg_cubed"] = state["exp_avg"] ** 3

    run.before_step.append(add)
