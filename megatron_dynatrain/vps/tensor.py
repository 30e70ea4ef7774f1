"""Logical tensors: what a model holds, with layout-free keys and canonical dims."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "uint8": 1}
"""Bytes per element by dtype name (`str(torch.dtype)` without the `torch.` prefix)."""


class StateKind(enum.StrEnum):
    """What is kept per logical tensor."""

    PARAM = "param"
    """The model parameter, in the model's dtype, on every data-parallel rank."""
    MAIN = "main_param"
    """The fp32 main parameter of the distributed optimizer, where it is a memory of its own."""
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    BUFFER = "buffer"
    """A persistent buffer (not a parameter), on every data-parallel rank."""


class Where(enum.StrEnum):
    """Which pipeline stage holds a parameter."""

    FIRST = "first"
    """The first stage (embedding)."""
    LAYER = "layer"
    """The stage that holds transformer layer `Home.layer`."""
    LAST = "last"
    """The last stage (final norm, output layer)."""
    LAST_IF_SPLIT = "last_if_split"
    """The last stage, but only where it is not also the first: the copy of a tied embedding."""


@dataclass(frozen=True, slots=True)
class Home:
    """The place of a parameter in the pipeline; `layer` is the global, zero-based layer number."""

    where: Where
    layer: int | None = None

    def __post_init__(self) -> None:
        if (self.layer is not None) != (self.where is Where.LAYER):
            raise ValueError(f"a home at {self.where} can't have layer {self.layer}")


@dataclass(frozen=True, slots=True)
class Segment:
    """One logical tensor inside a parameter.

    The local memory of a parameter is the concatenation, in order, of the local shards of its segments, each dense and
    row-major in canonical dims. One segment `[2, ffn, h]` sharded on dim 1 is a gated fc1; several segments are a
    packed projection.

    Args:
        key: Layout-free key of the logical tensor, unique in the model (tied copies share it).
        shape: Global canonical shape, in elements, padding included.
        shard_dim: Canonical dim that tensor parallelism splits evenly; None where every tp rank holds all of it.
        real_rows: Rows of dim 0 that are data, where the others are padding whose number follows the layout (a table
            of the vocabulary); None where all of the shape is data.
    """

    key: str
    shape: tuple[int, ...]
    shard_dim: int | None = None
    real_rows: int | None = None

    def __post_init__(self) -> None:
        if self.real_rows is not None and not 0 < self.real_rows <= self.shape[0]:
            raise ValueError(f"{self.key}: {self.real_rows} real rows in a table of shape {self.shape}")
        if self.shard_dim is not None and not 0 <= self.shard_dim < len(self.shape):
            raise ValueError(f"{self.key}: shard_dim {self.shard_dim} is not a dim of shape {self.shape}")

    @property
    def numel(self) -> int:
        """Number of elements of the whole logical tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter (or persistent buffer) of the model as Megatron's modules name it, with global numbers.

    Args:
        name: Module path with the global layer number (and global expert number), e.g.
            `decoder.layers.3.mlp.linear_fc1.weight`. Unique in the model.
        segments: The logical tensors it holds, in memory order.
        home: Its place in the pipeline.
        dtype: Name of the model's dtype of it, e.g. `bfloat16`.
        trainable: Whether the optimizer owns it.
        expert: Global expert number; None for a dense parameter. Experts are split by etp and ep instead of tp.
        shared_embedding: Whether Megatron gives it a DDP bucket of its own (`param.shared_embedding`).
        is_buffer: Whether it is a persistent buffer.
    """

    name: str
    segments: tuple[Segment, ...]
    home: Home
    dtype: str
    trainable: bool = True
    expert: int | None = None
    shared_embedding: bool = False
    is_buffer: bool = False


@dataclass(frozen=True)
class ModelDescription:
    """The whole model, free of any layout; picklable and equal on every rank.

    Args:
        parameters: All parameters in module order (the order of `named_parameters()` of an undivided model).
        num_layers: Number of transformer layers.
        num_experts: Number of routed experts per MoE layer; None for a dense model.
        moment_dtypes: Optimizer states per trainable parameter: state kind to dtype name, e.g.
            `{EXP_AVG: "float32", EXP_AVG_SQ: "float32"}`.
        main_dtype: Dtype name of the separate main parameter kept for 16-bit parameters. A float32 parameter has no
            separate main parameter: the optimizer's shard is a view of it.
        main_in_state: Whether the optimizer makes the main parameters in its first step, with the moments.
    """

    parameters: tuple[ParameterSpec, ...]
    num_layers: int
    num_experts: int | None = None
    moment_dtypes: tuple[tuple[StateKind, str], ...] = field(
        default=((StateKind.EXP_AVG, "float32"), (StateKind.EXP_AVG_SQ, "float32"))
    )
    main_dtype: str = "float32"
    main_in_state: bool = False

    def __post_init__(self) -> None:
        names: set[str] = set()
        logical: dict[str, tuple[Segment, str]] = {}
        for spec in self.parameters:
            if spec.name in names:
                raise ValueError(f"two parameters are named {spec.name}")
            names.add(spec.name)
            for segment in spec.segments:
                if logical.setdefault(segment.key, (segment, spec.dtype)) != (segment, spec.dtype):
                    raise ValueError(f"{spec.name}: another parameter describes {segment.key} in another way")

    @property
    def made_by_first_step(self) -> tuple[StateKind, ...]:
        """States that don't exist before the optimizer's first step."""
        moments = tuple(kind for kind, _ in self.moment_dtypes)
        return (*moments, StateKind.MAIN) if self.main_in_state else moments

    @property
    def padded_rows(self) -> int | None:
        """Rows of the tables of the vocabulary, padding included; None where no real rows are told apart."""
        return next((s.shape[0] for spec in self.parameters for s in spec.segments if s.real_rows is not None), None)

    def padded_to(self, rows: int) -> ModelDescription:
        """Return the same model with tables of the vocabulary that have this number of rows."""
        parameters = tuple(
            replace(spec, segments=tuple(_padded(segment, rows) for segment in spec.segments))
            for spec in self.parameters
        )
        return replace(self, parameters=parameters)

    def states_of(self, spec: ParameterSpec) -> tuple[tuple[StateKind, str], ...]:
        """Return the states kept for a parameter, as (kind, dtype name), in a fixed order."""
        if spec.is_buffer:
            return ((StateKind.BUFFER, spec.dtype),)
        states = [(StateKind.PARAM, spec.dtype)]
        if spec.trainable:
            if spec.dtype != "float32":
                states.append((StateKind.MAIN, self.main_dtype))
            states.extend(self.moment_dtypes)
        return tuple(states)


def _padded(segment: Segment, rows: int) -> Segment:
    return segment if segment.real_rows is None else replace(segment, shape=(rows, *segment.shape[1:]))
