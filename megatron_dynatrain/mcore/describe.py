"""Read a layout-free model description from the real model chunks, from what Megatron itself declares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from megatron_dynatrain.errors import PlacementError, UnsupportedError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.vps.tensor import Home, ModelDescription, ParameterSpec, Segment, Where

TIED_OUTPUT = "output_layer.weight"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of one chunk on this rank: its global name, its place and what Megatron declares of it."""

    name: str
    chunk: int
    home: Home
    parameter: torch.nn.Parameter
    declared: ShardedTensor | ShardedTensorFactory


def named_parameters(chunks: Sequence[torch.nn.Module]) -> list[NamedParameter]:
    """Return the parameters of this rank's chunks in module order; local.

    Raises:
        UnsupportedError: A parameter that sharded_state_dict doesn't declare, or a persistent buffer.
    """
    found = []
    for chunk, wrapped in enumerate(chunks):
        model = unwrap_model(wrapped)
        declared = {item.data.data_ptr(): item for item in _sharded(model.sharded_state_dict()) if _has_data(item)}
        layers = _layer_prefixes(model)
        _refuse_buffers(model)
        for local_name, parameter in model.named_parameters():
            item = declared.get(parameter.data_ptr())
            if item is None:
                raise UnsupportedError(
                    "a parameter is not in the model's sharded_state_dict, so its place in the whole model is unknown",
                    subject=local_name,
                    hint="declare it in the module's sharded_state_dict()",
                )
            name, layer = _global_name(local_name, layers)
            home = Home(Where.LAYER, layer) if layer is not None else Home(_end_of_pipeline(model, parameter))
            found.append(NamedParameter(name, chunk, home, parameter, item))
    return found


def describe_local(chunks: Sequence[torch.nn.Module], layout: ParallelLayout) -> list[ParameterSpec]:
    """Return the specs of this rank's parameters in module order; local, equal on the ranks of one pipeline stage.

    Raises:
        PlacementError: A parameter's attributes and its declared sharding disagree; names both.
        UnsupportedError: A fused parameter whose parts are not understood, by name.
    """
    specs = []
    for item in named_parameters(chunks):
        parameter = item.parameter
        specs.append(
            ParameterSpec(
                name=item.name,
                segments=_segments(item, layout),
                home=item.home,
                dtype=dtype_name(parameter.dtype),
                trainable=parameter.requires_grad,
                shared_embedding=False,
            )
        )
    return specs


def merge(per_rank: Sequence[Sequence[ParameterSpec]], *, num_layers: int, tied: bool) -> ModelDescription:
    """Merge the specs of all ranks into the description of the whole model; pure.

    Raises:
        PlacementError: Two ranks describe the same parameter differently.
    """
    first: dict[str, ParameterSpec] = {}
    for specs in per_rank:
        for spec in specs:
            known = first.setdefault(spec.name, spec)
            if known != spec:
                raise PlacementError(
                    "two ranks describe a parameter differently", subject=spec.name, expected=known, got=spec
                )
    specs = sorted(first.values(), key=_module_order)
    if tied:
        specs = _with_tied_copy(specs)
    return ModelDescription(parameters=tuple(specs), num_layers=num_layers)


def _module_order(spec: ParameterSpec) -> tuple[int, int]:
    # sorted() is stable: within a stage part the module order of the ranks stays.
    if spec.home.where is Where.FIRST:
        return 0, 0
    if spec.home.where is Where.LAYER:
        return 1, spec.home.layer or 0
    return 2, 0


def _with_tied_copy(specs: list[ParameterSpec]) -> list[ParameterSpec]:
    """Describe both copies of a tied embedding: on the first stage, and on the last where it is another stage."""
    embedding = next((s for s in specs if s.home.where is Where.FIRST and "word_embeddings" in s.name), None)
    if embedding is None:
        raise UnsupportedError("the model ties its output layer to an embedding that was not found")
    first = ParameterSpec(
        name=embedding.name,
        segments=embedding.segments,
        home=embedding.home,
        dtype=embedding.dtype,
        trainable=embedding.trainable,
        shared_embedding=True,
    )
    last = ParameterSpec(
        name=TIED_OUTPUT,
        segments=embedding.segments,
        home=Home(Where.LAST_IF_SPLIT),
        dtype=embedding.dtype,
        trainable=embedding.trainable,
        shared_embedding=True,
    )
    rest = [s for s in specs if s.name not in (embedding.name, TIED_OUTPUT)]
    at = specs.index(embedding)
    return [*rest[:at], first, *rest[at:], last]


def _sharded(value: object) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    if isinstance(value, ShardedTensor | ShardedTensorFactory):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sharded(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sharded(item)


def _has_data(item: ShardedTensor | ShardedTensorFactory) -> bool:
    return isinstance(item.data, torch.Tensor) and item.data.numel() > 0


def _layer_prefixes(model: torch.nn.Module) -> dict[str, int]:
    """Return module path -> global zero-based number of every transformer layer (Megatron's `layer_number` - 1)."""
    return {
        f"{path}.": module.layer_number - 1
        for path, module in model.named_modules()
        if isinstance(getattr(module, "layer_number", None), int) and path.rsplit(".", 1)[-1].isdigit()
    }


def _global_name(local_name: str, layers: dict[str, int]) -> tuple[str, int | None]:
    for prefix, number in layers.items():
        if local_name.startswith(prefix):
            path = prefix[:-1].rsplit(".", 1)[0]
            return f"{path}.{number}.{local_name[len(prefix) :]}", number
    return local_name, None


def _end_of_pipeline(model: torch.nn.Module, parameter: torch.nn.Parameter) -> Where:
    embedding = getattr(model, "embedding", None)
    if embedding is not None and any(parameter is other for other in embedding.parameters()):
        return Where.FIRST
    return Where.LAST


def _refuse_buffers(model: torch.nn.Module) -> None:
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in persistent and buffer is not None and buffer.numel() > 0:
            raise UnsupportedError(
                "a persistent buffer is in no list of states, so a switch would lose it",
                subject=name,
                got=f"{dtype_name(buffer.dtype)}{tuple(buffer.shape)}",
                hint="this model can't be switched yet",
            )


def _segments(item: NamedParameter, layout: ParallelLayout) -> tuple[Segment, ...]:
    key = _logical_key(item)
    declared, parameter = item.declared, item.parameter
    shard_dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    if isinstance(declared, ShardedTensorFactory):
        return (_fused_segment(item, key, shard_dim, layout),)
    shape = tuple(declared.global_shape[declared.prepend_axis_num :])
    _check_declared(item, declared, shape, shard_dim, layout)
    return (Segment(key, shape, shard_dim if len(shape) else None),)


def _logical_key(item: NamedParameter) -> str:
    # A tied output layer is declared under the embedding's key: one logical tensor, two copies.
    if item.name == TIED_OUTPUT and item.declared.key != TIED_OUTPUT:
        return item.declared.key
    return item.name


def _check_declared(
    item: NamedParameter,
    declared: ShardedTensor,
    shape: tuple[int, ...],
    shard_dim: int | None,
    layout: ParallelLayout,
) -> None:
    """Check the attributes (`tensor_model_parallel`, `partition_dim`) against the declared shape and offset."""
    local = tuple(item.parameter.shape)
    expected = tuple(n // layout.tp if d == shard_dim else n for d, n in enumerate(shape))
    offset = tuple(declared.global_offset[declared.prepend_axis_num :])
    if local != expected or any(o % n for o, n in zip(offset, local, strict=True) if n):
        raise PlacementError(
            "a parameter's attributes and its declared sharding disagree",
            subject=item.name,
            expected=f"local shape {expected} of {shape} split by tp {layout.tp} on dim {shard_dim} (partition_dim)",
            got=f"local shape {local} at offset {offset} (sharded_state_dict)",
            hint="the module's partition_dim or its sharded_state_dict is wrong",
        )
    if item.home.layer is not None and declared.prepend_axis_num == 1 and declared.global_offset[0] != item.home.layer:
        raise PlacementError(
            "a layer's number and its declared offset disagree",
            subject=item.name,
            expected=f"layer {item.home.layer} (layer_number - 1)",
            got=f"layer {declared.global_offset[0]} (sharded_state_dict)",
        )


def _fused_segment(item: NamedParameter, key: str, shard_dim: int | None, layout: ParallelLayout) -> Segment:
    """Return the canonical dims of a factory parameter: n equal parts along dim 0, each split by tp on its own.

    The factory's own build function is applied to the tensor of local element numbers, which shows where each element
    belongs; anything but equal parts in order is refused.
    """
    declared, parameter = item.declared, item.parameter
    numbers = torch.arange(parameter.numel()).view(parameter.shape)
    parts = list(_sharded(declared.build_fn(declared.key, numbers, declared.replica_id, None)))
    local = tuple(parameter.shape)
    count = len(parts)
    understood = shard_dim in (0, None) and count > 1 and local[0] % count == 0
    rows = local[0] // count if understood else 0
    whole = rows * (layout.tp if shard_dim == 0 else 1)
    for index, part in enumerate(parts):
        offset = part.global_offset[part.prepend_axis_num :]
        understood = (
            understood
            and part.key == declared.key
            and tuple(part.global_shape[part.prepend_axis_num :]) == (count * whole, *local[1:])
            and torch.equal(part.data, numbers[index * rows : (index + 1) * rows])
            and index * whole <= offset[0] < (index + 1) * whole
            and offset[0] - index * whole == (parts[0].global_offset[part.prepend_axis_num])
        )
    if not understood:
        raise UnsupportedError(
            "a fused parameter has parts that are not understood",
            subject=item.name,
            expected="equal parts along dim 0, each split by tp",
            got=[(p.key, tuple(p.global_offset), tuple(p.local_shape), tuple(p.global_shape)) for p in parts],
            hint="add a fused layout for it in mcore/describe.py, with a test that fails first",
        )
    return Segment(key, (count, whole, *local[1:]), 1 if shard_dim == 0 else None)


def is_tied(chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether the model ties its output layer to its word embedding; equal on every rank."""
    return bool(getattr(unwrap_model(chunks[0]), "share_embeddings_and_output_weights", False))


def number_of_layers(chunks: Sequence[torch.nn.Module]) -> int:
    """Return the number of transformer layers of the whole model; equal on every rank."""
    return int(unwrap_model(chunks[0]).config.num_layers)


def total_elements(description: ModelDescription) -> int:
    """Return the number of elements of all logical tensors, tied copies counted once."""
    shapes = {segment.key: segment.shape for spec in description.parameters for segment in spec.segments}
    return sum(math.prod(shape) for shape in shapes.values())
