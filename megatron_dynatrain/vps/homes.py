"""Which pipeline stage, expert rank and tensor-parallel shard holds what of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_dynatrain.errors import LayoutError, PlacementError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import ModelDescription, ParameterSpec, Segment, Where


class Homes:
    """The parameters of each (pipeline rank, expert-parallel rank) of a layout.

    Raises:
        LayoutError: Layers or experts can't be spread over the layout, or Megatron would mix up the experts' shards.
    """

    def __init__(self, description: ModelDescription, layout: ParallelLayout) -> None:
        self._layout = layout
        self._chunks: dict[tuple[int, int], tuple[list[ParameterSpec], ...]] = {
            (pp, ep): tuple([] for _ in range(layout.num_chunks)) for pp in range(layout.pp) for ep in range(layout.ep)
        }
        self._tensors: dict[str, list[tuple[int, int | None]]] = {}
        stages = layer_stages(description, layout)
        for spec in description.parameters:
            stage = stage_of(spec, layout, stages)
            ep = expert_rank(spec, description, layout)
            if stage is not None:
                self._add(spec, stage, ep)
        if any(spec.expert is not None for spec in description.parameters):
            check_expert_grid(layout)

    def _add(self, spec: ParameterSpec, stage: tuple[int, int], ep: int | None) -> None:
        pp, chunk = stage
        for rank in range(self._layout.ep) if ep is None else (ep,):
            self._chunks[pp, rank][chunk].append(spec)
        for segment in spec.segments:
            places = self._tensors.setdefault(segment.key, [])
            if (pp, ep) not in places:
                places.append((pp, ep))

    def chunks(self, pp: int, ep: int) -> tuple[tuple[ParameterSpec, ...], ...]:
        """Return the parameters of a pipeline rank and expert-parallel rank, per chunk, in module order."""
        return tuple(tuple(chunk) for chunk in self._chunks[pp, ep])

    def places(self, tensor: str) -> tuple[tuple[int, int | None], ...]:
        """Return the (pipeline rank, expert-parallel rank) that hold a logical tensor; expert rank None means all.

        Raises:
            PlacementError: The model has no such tensor.
        """
        if tensor not in self._tensors:
            raise PlacementError("the model has no such logical tensor", subject=tensor)
        return tuple(self._tensors[tensor])


def layer_stages(description: ModelDescription, layout: ParallelLayout) -> dict[int, tuple[int, int]]:
    """Return the (pipeline rank, chunk) of each layer of the model."""
    spread = layout.stage_layers(description.num_layers)
    return {
        layer: (pp, chunk)
        for pp, chunks in enumerate(spread)
        for chunk, layers in enumerate(chunks)
        for layer in layers
    }


def stage_of(
    spec: ParameterSpec, layout: ParallelLayout, stages: Mapping[int, tuple[int, int]]
) -> tuple[int, int] | None:
    """Return the (pipeline rank, chunk) that holds a parameter, or None where no stage does.

    Args:
        spec: The parameter.
        layout: The layout.
        stages: (pipeline rank, chunk) of each layer.

    Raises:
        LayoutError: The parameter's layer is not in the model.
    """
    last = (layout.pp - 1, layout.num_chunks - 1)
    match spec.home.where:
        case Where.FIRST:
            return 0, 0
        case Where.LAST:
            return last
        case Where.LAST_IF_SPLIT:
            return last if layout.pp > 1 else None
        case Where.LAYER:
            stage = stages.get(spec.home.layer if spec.home.layer is not None else -1)
            if stage is None:
                raise LayoutError(
                    "the parameter's layer is not in the model",
                    subject=spec.name,
                    expected=f"layer 0..{len(stages) - 1}",
                    got=spec.home.layer,
                )
            return stage


def expert_rank(spec: ParameterSpec, description: ModelDescription, layout: ParallelLayout) -> int | None:
    """Return the expert-parallel rank that holds a parameter; None for a dense one, which all hold.

    Raises:
        LayoutError: ep doesn't divide the experts.
    """
    if spec.expert is None:
        return None
    experts = description.num_experts or 0
    if not 0 <= spec.expert < experts or experts % layout.ep:
        raise LayoutError(
            f"{experts} experts can't be spread evenly over ep {layout.ep}",
            subject=spec.name,
            expected=f"a multiple of {layout.ep}, and expert {spec.expert} among them",
            got=experts,
        )
    return spec.expert // (experts // layout.ep)


def check_expert_grid(layout: ParallelLayout) -> None:
    """Refuse a layout in which experts are reduced over dense groups that hold other shards of them.

    At ep 1 and etp equal to tp Megatron shards experts by the expert grid, and reduces their gradients over the dense
    dp-cp groups. Where the two grids differ it trains wrongly without an error.

    Raises:
        LayoutError: The grids differ.
    """
    if layout.experts_apart or layout.groups("tp") == layout.groups("tp", expert=True):
        return
    raise LayoutError(
        "experts in the dense buffer need the same tensor-parallel groups in both grids",
        subject="order",
        expected=f"an order that starts with tp, such as {layout.groups('tp', expert=True)} in both",
        got=f"{layout.order} with cp {layout.cp}: {layout.groups('tp')}",
    )


def parts_of(spec: ParameterSpec, layout: ParallelLayout) -> int:
    """Return over how many ranks tensor parallelism splits a parameter: tp, for experts etp."""
    return layout.tp if spec.expert is None else layout.etp


def local_shape(segment: Segment, parts: int) -> tuple[int, ...]:
    """Return the shape of one rank's shard of a segment that `parts` ranks split.

    Raises:
        LayoutError: The dim can't be split evenly.
    """
    if segment.shard_dim is None or parts == 1:
        return segment.shape
    size = segment.shape[segment.shard_dim]
    if size % parts:
        raise LayoutError(
            f"dim {segment.shard_dim} of {segment.shape} can't be split evenly over {parts} tensor-parallel ranks",
            subject=segment.key,
            expected=f"a multiple of {parts}",
            got=size,
        )
    return tuple(size // parts if dim == segment.shard_dim else n for dim, n in enumerate(segment.shape))


def local_box(segment: Segment, parts: int, index: int) -> Box:
    """Return the box, in global coordinates, that tensor-parallel rank `index` of `parts` holds of a segment."""
    shape = local_shape(segment, parts)
    origin = tuple(index * n if dim == segment.shard_dim and parts > 1 else 0 for dim, n in enumerate(shape))
    return Box.whole(shape).shift(origin)


def local_numel(spec: ParameterSpec, layout: ParallelLayout) -> int:
    """Return the elements of the parameter's local memory on any rank that holds it."""
    return sum(math.prod(local_shape(segment, parts_of(spec, layout))) for segment in spec.segments)
