"""Read a layout-free model description from the real model chunks, from what Megatron itself declares."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.utils import unwrap_model

from megatron_dynatrain.errors import PlacementError, UnsupportedError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.buffers import BufferRule, rule_of
from megatron_dynatrain.mcore.fused import Declared, declared_tensors, segments_of
from megatron_dynatrain.mcore.names import MTP_COPY, TIED_OUTPUT, Names
from megatron_dynatrain.vps.tensor import Home, ModelDescription, ParameterSpec, Segment, StateKind, Where

__all__ = ["NamedTensor", "describe_local", "dtype_name", "facts_of", "merge", "named_tensors"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or moved buffer of one chunk on this rank: global name, place and what Megatron declares of it."""

    name: str
    chunk: int
    home: Home
    expert: int | None
    tensor: torch.Tensor
    declared: Declared | None
    is_buffer: bool = False

    @property
    def trainable(self) -> bool:
        """Whether the optimizer owns it."""
        return not self.is_buffer and self.tensor.requires_grad


def named_tensors(chunks: Sequence[torch.nn.Module]) -> list[NamedTensor]:
    """Return the parameters and moved buffers of this rank's chunks, in module order; local.

    Raises:
        UnsupportedError: A parameter that sharded_state_dict doesn't declare, or a buffer that nobody listed.
    """
    found: list[NamedTensor] = []
    for chunk, wrapped in enumerate(chunks):
        model = unwrap_model(wrapped)
        _refuse_tied_mtp(model)
        declared = {
            item.data.data_ptr(): item
            for item in declared_tensors(model.sharded_state_dict())
            if isinstance(item.data, torch.Tensor) and item.data.numel() > 0
        }
        names = Names(model)
        _refuse_extra_state(model)
        for local_name, parameter in model.named_parameters():
            if parameter.data_ptr() not in declared:
                raise UnsupportedError(
                    "a parameter is not in the model's sharded_state_dict, so its place in the whole model is unknown",
                    subject=local_name,
                    hint="declare it in the module's sharded_state_dict()",
                )
            known = names.of(local_name, parameter)
            item = declared[parameter.data_ptr()]
            found.append(NamedTensor(known.name, chunk, known.home, known.expert, parameter, item))
        found.extend(_buffers(model, chunk, names, declared))
    return found


def _refuse_extra_state(model: torch.nn.Module) -> None:
    """Refuse what modules keep beside parameters and buffers (`get_extra_state`), where it is not empty."""
    known = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in known or value is None or (isinstance(value, torch.Tensor) and value.numel() == 0):
            continue
        if isinstance(value, io.BytesIO) and not value.getbuffer().nbytes:
            continue
        raise UnsupportedError(
            "a module keeps state beside its parameters and buffers, which a switch would lose",
            subject=name,
            expected="no extra state, or an empty one",
            got=type(value).__name__,
        )


def _refuse_tied_mtp(model: torch.nn.Module) -> None:
    """Refuse a multi-token-prediction stage that is not the first where embeddings are tied.

    Megatron-Core 0.19 gives that stage an output weight that nothing uses or keeps equal to the embedding, and its
    `sharded_state_dict` asserts that there is none, so that such a job can't be saved either.
    """
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    if tied and getattr(model, "mtp_process", False) and not getattr(model, "pre_process", True):
        raise UnsupportedError(
            "multi-token prediction with tied embeddings can't be on another stage than the embedding",
            subject="--mtp-num-layers",
            expected="pp 1, or --untie-embeddings-and-output-weights",
            got=f"pp {model.config.pipeline_model_parallel_size} with tied embeddings",
        )


def _buffers(model: torch.nn.Module, chunk: int, names: Names, declared: dict[int, Declared]) -> Iterator[NamedTensor]:
    persistent = set(model.state_dict(keep_vars=True))
    for local_name, buffer in model.named_buffers():
        if buffer is None or buffer.numel() == 0:
            continue
        item = declared.get(buffer.data_ptr())
        rule = rule_of(local_name, buffer, persistent=local_name in persistent, declared=item is not None)
        if rule is BufferRule.MOVED:
            known = names.of(local_name, buffer)
            yield NamedTensor(known.name, chunk, known.home, known.expert, buffer, item, is_buffer=True)


def describe_local(
    chunks: Sequence[torch.nn.Module], layout: ParallelLayout, *, real_rows: int | None = None
) -> list[ParameterSpec]:
    """Return the specs of this rank's parameters and buffers in module order; local, equal on equal ranks.

    Args:
        chunks: The model chunks.
        layout: Their layout.
        real_rows: Rows of the vocabulary that are data; None where padding is to be seen as data too.

    Raises:
        PlacementError: A parameter's attributes and its declared sharding disagree; names both.
        UnsupportedError: A fused parameter whose parts are not understood, by name.
    """
    return [_spec(item, layout, real_rows) for item in named_tensors(chunks)]


def _spec(item: NamedTensor, layout: ParallelLayout, real_rows: int | None) -> ParameterSpec:
    segments = _segments(item, layout)
    if getattr(item.declared, "allow_shape_mismatch", False):  # what Megatron pads to fit the layout
        segments = tuple(replace(segment, real_rows=real_rows) for segment in segments)
    return ParameterSpec(
        name=item.name,
        segments=segments,
        home=item.home,
        dtype=dtype_name(item.tensor.dtype),
        trainable=item.trainable,
        expert=item.expert,
        is_buffer=item.is_buffer,
    )


def _segments(item: NamedTensor, layout: ParallelLayout) -> tuple[Segment, ...]:
    key = _logical_key(item)
    if item.declared is None:
        return (Segment(key, tuple(item.tensor.shape) or (1,)),)
    _check_numbers(item)
    split = getattr(item.tensor, "tensor_model_parallel", False)
    return segments_of(
        item.name,
        key,
        item.tensor,
        item.declared,
        shard_dim=item.tensor.partition_dim if split else None,
        parts=layout.tp if item.expert is None else layout.etp,
    )


def _logical_key(item: NamedTensor) -> str:
    """Return the key of the logical tensor: the name, except for copies of another stage's parameter."""
    if item.name.endswith(MTP_COPY):
        return item.name.removesuffix(MTP_COPY)
    if item.name == TIED_OUTPUT and item.declared is not None and item.declared.key != TIED_OUTPUT:
        return item.declared.key  # a tied output layer is declared under the embedding's key
    return item.name


def _check_numbers(item: NamedTensor) -> None:
    """Check layer and expert numbers against the offsets that Megatron declares, where it declares them as offsets."""
    declared = item.declared
    axes = getattr(declared, "prepend_axis_num", 0)
    if not axes:
        return
    numbers = [n for n in (item.home.layer, item.expert) if n is not None]
    offsets = tuple(declared.global_offset[:axes])  # type: ignore[union-attr]
    if len(numbers) >= axes and offsets != tuple(numbers[-axes:] if axes < len(numbers) else numbers):
        raise PlacementError(
            "a layer's or expert's number and its declared offset disagree",
            subject=item.name,
            expected=f"layer {item.home.layer}, expert {item.expert}",
            got=f"offsets {offsets} (sharded_state_dict)",
        )


def check_described(
    description: ModelDescription,
    chunks: Sequence[torch.nn.Module],
    layout: ParallelLayout,
    *,
    real_rows: int | None = None,
) -> None:
    """Check that chunks that were built from it declare what the description says, shape by shape; local.

    The chunks must have storage: hollow parameters can't be told apart by their memory.

    Raises:
        PlacementError: Names the first parameter that is another one than described.
    """
    known = {spec.name: spec for spec in description.parameters}
    for spec in describe_local(chunks, layout, real_rows=real_rows):
        expected = known.get(spec.name)
        # The home of a copy and its bucket follow the layout; the placement was checked against the real buffers.
        if expected is None or spec != replace(expected, home=spec.home, shared_embedding=spec.shared_embedding):
            raise PlacementError(
                "the target's model declares a parameter in another way than the job's model",
                subject=spec.name,
                expected=expected,
                got=spec,
            )


# --- the whole model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFacts:
    """What every rank knows of the whole model."""

    num_layers: int
    num_experts: int | None
    tied: bool
    mtp: bool
    grouped_experts: bool = False


def facts_of(chunks: Sequence[torch.nn.Module]) -> ModelFacts:
    """Return what a rank's chunks say of the whole model; equal on every rank."""
    model = unwrap_model(chunks[0])
    return ModelFacts(
        num_layers=int(model.config.num_layers),
        num_experts=model.config.num_moe_experts,
        tied=bool(getattr(model, "share_embeddings_and_output_weights", False)),
        mtp=bool(getattr(model.config, "mtp_num_layers", None)),
        grouped_experts=Names(model).grouped_experts,
    )


def merge(per_rank: Sequence[Sequence[ParameterSpec]], facts: ModelFacts) -> ModelDescription:
    """Merge the specs of all ranks into the description of the whole model; pure.

    Raises:
        PlacementError: Two ranks describe the same parameter differently.
    """
    found: dict[str, ParameterSpec] = {}
    for specs in per_rank:
        for spec in specs:
            known = found.setdefault(spec.name, spec)
            if known != spec:
                raise PlacementError(
                    "two ranks describe a parameter differently", subject=spec.name, expected=known, got=spec
                )
    found = {name: spec for name, spec in found.items() if not _is_copy(spec, facts)}
    embedding = [spec for spec in found.values() if spec.home.where is Where.FIRST]
    layers = _in_module_order([s for s in found.values() if s.home.where is Where.LAYER], facts)
    last = _in_module_order([spec for spec in found.values() if spec.home.where is Where.LAST], facts)
    copies: list[ParameterSpec] = []
    if facts.mtp:
        copies = [replace(s, name=s.name + MTP_COPY, home=Home(Where.LAST_IF_SPLIT)) for s in embedding]
    elif facts.tied:
        table = next(s for s in embedding if _is_table(s))
        last.append(replace(table, name=TIED_OUTPUT, home=Home(Where.LAST_IF_SPLIT), shared_embedding=True))
    if facts.mtp or facts.tied:
        embedding, copies = _shared(embedding), _shared(copies)
    return ModelDescription(
        parameters=(*embedding, *copies, *layers, *last),
        num_layers=facts.num_layers,
        num_experts=facts.num_experts,
    )


def with_state_dtypes(
    description: ModelDescription, per_rank: Sequence[tuple[dict[str, str], str, bool] | None]
) -> ModelDescription:
    """Return the description with the dtypes in which the optimizers store moments and main parameters; pure.

    Args:
        description: The model.
        per_rank: What each rank's optimizer says (`LiveState.state_dtypes`).

    Raises:
        PlacementError: Two ranks store them differently.
    """
    said = [dtypes for dtypes in per_rank if dtypes is not None]
    for dtypes in said:
        if dtypes != said[0]:
            raise PlacementError(
                "two ranks store optimizer states in different dtypes",
                subject="optimizer states",
                expected=said[0],
                got=dtypes,
            )
    if not said:
        return description
    moments, main, in_state = said[0]
    kinds = tuple((StateKind(name), dtype) for name, dtype in moments.items())
    return replace(description, moment_dtypes=kinds, main_dtype=main, main_in_state=in_state)


def _is_copy(spec: ParameterSpec, facts: ModelFacts) -> bool:
    """Return whether a spec is a copy that merge() makes itself, because not every layout has it."""
    return spec.home.where is Where.LAST_IF_SPLIT or (facts.tied and spec.name == TIED_OUTPUT)


def _is_table(spec: ParameterSpec) -> bool:
    return spec.name.split(MTP_COPY)[0].endswith("word_embeddings.weight")


def _shared(specs: list[ParameterSpec]) -> list[ParameterSpec]:
    """Mark the word embedding, of which another stage has a copy."""
    return [replace(spec, shared_embedding=True) if _is_table(spec) else spec for spec in specs]


def _in_module_order(specs: list[ParameterSpec], facts: ModelFacts) -> list[ParameterSpec]:
    """Return the layers' specs in the order of an undivided model's modules.

    Within a layer the order of the ranks stays. Experts come from several ranks: they stand where the first of them
    stands, one after the other, or, where a linear holds all experts, linear after linear.
    """
    place: dict[tuple[int | None, str], int] = {}
    keys = {}
    for number, spec in enumerate(specs):
        if spec.expert is None:
            keys[spec.name] = (spec.home.layer or 0, number, 0, 0)
            continue
        module, _, leaf = spec.name.partition(f".experts.{spec.expert}.")
        start = place.setdefault((spec.home.layer, module), number)
        linear = place.setdefault((spec.home.layer, f"{module}/{leaf}"), number)
        within = (linear, spec.expert) if facts.grouped_experts else (spec.expert, linear)
        keys[spec.name] = (spec.home.layer or 0, start, *within)
    return sorted(specs, key=lambda spec: keys[spec.name])
