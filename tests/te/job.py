"""One rank of te-check; importing it imports Megatron."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_dynatrain.errors import SwitchAborted
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.switch import SwitchOptions
from tests.cases.job import CaseJob
from tests.ranks.context import RankContext
from tests.states.two_devices import two_devices
from tests.te.cases import MODELS, OPTIMIZERS, Case, Keys, Model
from tests.te.warm import a_gpu
from tests.te.witness import fill, wrong_states

SEQUENCE, VOCABULARY, STEP, RATE = 16, 64, 7, 0.0625
_FUNCTIONS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
Spoil = Callable[[list[torch.nn.Module], Any], None]


@dataclasses.dataclass
class Outcome:
    """What one rank saw of a switch.

    Attributes:
        elements: Elements of all states that it held before.
        states: Kinds of state with their dtypes.
        wrong: State -> elements that are not the witness bits, after the switch.
        notes: What else is not as it must be.
        moved: Moved bytes and the least possible, over all ranks.
        aborted: The error of the attempt before, where a fault was to be found by the plugin.
    """

    elements: int
    states: list[str] = dataclasses.field(default_factory=list)
    wrong: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    moved: tuple[int, int] = (0, 0)
    aborted: str = ""


class TeJob(CaseJob):
    """A job of Transformer Engine's layers and FusedAdam."""

    def __init__(self, context: RankContext, case: Case, *, verify: Any = "digest") -> None:
        model = MODELS[case.model]
        if OPTIMIZERS[case.optimizer][1].get("optimizer_cpu_offload"):
            two_devices()
        self._sequence_parallel = False
        super().__init__(
            context,
            layout_of(context.world, case.source),
            lambda config: make_model(model, config),
            shape=_shape_of(model),
            dtype=getattr(torch, model.dtype),
            optimizer=_with_dtypes(OPTIMIZERS[case.optimizer][1]),
            options=SwitchOptions(verify=verify, timeout=30, seed=1234),
        )

    def _build(self, layout: ParallelLayout, *, hollow: bool = False) -> tuple[list[torch.nn.Module], Any]:
        self._shape["sequence_parallel"] = layout.sequence_parallel
        return super()._build(layout, hollow=hollow)


def _shape_of(model: Model) -> dict[str, Any]:
    shape = {**model.shape, "activation_func": _FUNCTIONS[model.shape["activation_func"]]}
    return {name: value for name, value in shape.items() if name not in _latent(shape)}


def layout_of(world: int, sizes: Keys) -> ParallelLayout:
    """Return a layout of a world of ranks."""
    return ParallelLayout.for_world(world, **sizes)


def _with_dtypes(settings: Keys) -> dict[str, Any]:
    return {key: getattr(torch, value) if key.endswith("_dtype") else value for key, value in settings.items()}


def make_model(model: Model, config: TransformerConfig) -> torch.nn.Module:
    """Make one stage of a model, as Megatron's own builders do on a GPU."""
    stage: dict[str, Any] = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": model.tied,
        "position_embedding_type": "learned_absolute" if model.tied else "rope",
    }
    if model.mla:
        known = {f.name: getattr(config, f.name) for f in dataclasses.fields(TransformerConfig) if f.init}
        config = MLATransformerConfig(**{**known, "multi_latent_attention": True, **_latent(model.shape)})
    with a_gpu():
        if model.pattern is not None:
            return HybridModel(
                config, hybrid_stack_spec, VOCABULARY, SEQUENCE, hybrid_layer_pattern=model.pattern, **stage
            )
        if config.experimental_attention_variant is not None:
            return GPTModel(
                config,
                get_transformer_block_with_experimental_attention_variant_spec(config),
                VOCABULARY,
                SEQUENCE,
                **stage,
            )
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=model.mla,
        )
        if config.mtp_num_layers:
            stage["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True)
        return GPTModel(config, spec, VOCABULARY, SEQUENCE, **stage)


def _latent(shape: Keys) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(MLATransformerConfig)} - {
        f.name for f in dataclasses.fields(TransformerConfig)
    }
    return {name: value for name, value in shape.items() if name in names}


# --- a switch ---------------------------------------------------------------------------------------------------------


def check(context: RankContext, case: Case) -> Outcome:
    """Fill every state with witness bits, switch, and compare every bit on the ranks of the target."""
    return _switched(TeJob(context, case), case)


def check_fault(context: RankContext, case: Case, spoil: Spoil) -> Outcome:
    """Put a fault into the target's memory on rank 0: the plugin must abort, and without it the witness must see it."""
    job = TeJob(context, case)
    start(job.optimizer)
    fill(job.chunks, job.optimizer, cast=cast_of_main(case))
    job.on_phase = _spoiled(context, job, "verify/digest", spoil)
    try:
        job.switch(layout_of(context.world, case.target))
        aborted = ""
    except SwitchAborted as error:
        aborted = str(error)
    job.switcher.options = dataclasses.replace(job.switcher.options, verify="off")
    job.on_phase = _spoiled(context, job, "verify/digest", spoil)
    outcome = _switched(job, case)
    outcome.aborted = aborted
    return outcome


def _spoiled(context: RankContext, job: TeJob, at: str, spoil: Spoil) -> Callable[[str], None]:
    @torch.no_grad()
    def on_phase(phase: str) -> None:
        if phase == at and context.rank == 0 and job.target is not None:
            spoil(*job.target)

    return on_phase


def _switched(job: TeJob, case: Case) -> Outcome:
    cast = cast_of_main(case)
    if case.started:
        start(job.optimizer)
    outcome = Outcome(fill(job.chunks, job.optimizer, cast=cast))
    extra = extra_states(job.chunks)
    report = job.switch(layout_of(len(job.layout.ranks), case.target))
    outcome.wrong = wrong_states(job.chunks, job.optimizer, cast=cast)
    outcome.moved = (report.moved_bytes, report.minimum_bytes)
    outcome.states = state_kinds(job.optimizer)
    outcome.notes = notes_on(job.optimizer, case)
    if not extra or any(size for size in (*extra.values(), *extra_states(job.chunks).values())):
        outcome.notes.append("extra states that are not empty, or none at all")
    return outcome


def cast_of_main(case: Case) -> bool:
    """Return whether a job's parameters are casts of its main parameters."""
    settings = OPTIMIZERS[case.optimizer][1]
    if MODELS[case.model].dtype == "float32":
        return False
    if not case.started and settings.get("use_precision_aware_optimizer"):
        return False  # no main parameters before the first step
    remainders = settings.get("use_precision_aware_optimizer") and settings["store_param_remainders"]
    return not remainders or MODELS[case.model].dtype != "bfloat16"


def start(optimizer: Any) -> None:
    """Make the states of a first step, and change the learning rates."""
    make_states(optimizer)
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            group["lr"] = RATE * group["lr"]


def make_states(optimizer: Any) -> None:
    """Make the states that the inner optimizers make in their first step, with another step count."""
    for inner in inner_optimizers(optimizer):
        for part in parts_of(inner):
            for group in part.param_groups:
                if is_fused(part):
                    group["step"] = STEP
                for shard in group["params"]:
                    _make_state(part, shard)
        if is_hybrid(inner.optimizer):
            inner.optimizer._sync_sub_optimizers_state_to_hdo()


def _make_state(part: Any, shard: torch.Tensor) -> None:
    if is_fused(part):
        part.initialize_state(shard, part.store_param_remainders and shard.dtype == torch.bfloat16)
        return
    moments = {name: torch.zeros_like(shard) for name in ("exp_avg", "exp_avg_sq")}
    part.state[shard] = {"step": torch.tensor(float(STEP)), **moments}


def parts_of(inner: Any) -> list[Any]:
    """Return the optimizers that step the shards of one of Megatron's distributed optimizers."""
    return inner.optimizer.sub_optimizers if is_hybrid(inner.optimizer) else [inner.optimizer]


def is_hybrid(optimizer: Any) -> bool:
    """Return whether an optimizer is Megatron's HybridDeviceOptimizer."""
    return type(optimizer).__name__ == "HybridDeviceOptimizer"


def is_fused(optimizer: Any) -> bool:
    """Return whether an optimizer is Transformer Engine's FusedAdam."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__name__}" == "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield Megatron's distributed optimizers that own something or could."""
    for inner in optimizer.chained_optimizers:
        if not inner.is_stub_optimizer:
            yield inner


def state_kinds(optimizer: Any) -> list[str]:
    """Return the kinds of state that the inner optimizers hold, with their dtypes."""
    return sorted(
        {
            f"{name} {str(value.dtype).removeprefix('torch.')}"
            for inner in inner_optimizers(optimizer)
            for state in inner.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        }
    )


def notes_on(optimizer: Any, case: Case) -> list[str]:
    """Return what is not as it must be of step, learning rate, accessors and the optimizer's own state dict."""
    notes = []
    for inner in inner_optimizers(optimizer):
        notes += _notes_on_parts(inner)
        steps = steps_of(inner)
        if steps != ({STEP} if case.started else {None}):
            notes.append(f"step {steps}")
            continue
        if case.started and {group["lr"] for group in inner.optimizer.param_groups} != {RATE * 1e-3}:
            notes.append("learning rate")
        if case.started and {group["step"] for group in inner.state_dict()["optimizer"]["param_groups"]} != {STEP}:
            notes.append("step in the state dict")
        for parameter in inner.model_param_group_index_map if case.started else ():
            notes += _accessor_notes(inner, parameter)
    return notes


def steps_of(inner: Any) -> set[Any]:
    """Return the step counts of FusedAdam's groups and of torch's states."""
    fused = [group.get("step") for part in parts_of(inner) if is_fused(part) for group in part.param_groups]
    others = [int(s["step"]) for part in parts_of(inner) if not is_fused(part) for s in part.state.values()]
    return {*fused, *others}


def _notes_on_parts(inner: Any) -> list[str]:
    """Check the kinds of the optimizers that step, and that each sees the states that the one around them has."""
    hybrid, parts = inner.optimizer, parts_of(inner)
    wanted = ({True, False},) if is_hybrid(hybrid) else ({True},)
    notes = [] if {is_fused(part) for part in parts} in wanted else [f"kinds of optimizers: {parts}"]
    if is_hybrid(hybrid):
        seen = {id(state) for part in parts for state in part.state.values()}
        if seen != {id(state) for state in hybrid.state.values()} or not seen:
            notes.append("the optimizers on host and device have other states than the one around them")
    return notes


def _accessor_notes(inner: Any, parameter: torch.Tensor) -> list[str]:
    """Compare what Megatron's accessor reads with what is stored: it would fail without FusedAdam's scales."""
    group, order = inner.model_param_group_index_map[parameter]
    stored = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][order]]
    read = inner._get_main_param_and_optimizer_states(parameter)
    return [
        f"the accessor of {name}"
        for name in ("exp_avg", "exp_avg_sq")
        if not torch.equal(read[name].view(torch.int32), stored[name].float().view(torch.int32))
    ]


def extra_states(chunks: list[torch.nn.Module]) -> dict[str, int]:
    """Return the bytes or elements of every `_extra_state`, by name."""
    found = {}
    for chunk in chunks:
        for name, value in chunk.state_dict(keep_vars=True).items():
            if "_extra_state" in name and value is not None:
                found[name] = value.numel() if isinstance(value, torch.Tensor) else value.getbuffer().nbytes
    return found


def refused_extra_state(context: RankContext, case: Case) -> str:
    """Give one of Transformer Engine's modules an extra state that is not empty; return the refusal."""
    from transformer_engine.pytorch import LayerNormLinear

    LayerNormLinear.get_extra_state = lambda _: torch.ones(3, dtype=torch.uint8)
    try:
        TeJob(context, case)
    except Exception as error:  # whatever it is, the report shows it
        return str(error)
    return ""
