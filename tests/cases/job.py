"""A job on Megatron core alone, for the cases: a model of the case's size, and steps with gradients of its choice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.build import hollow_build
from megatron_dynatrain.switch import Switcher, SwitchOptions
from megatron_dynatrain.switch_types import SwitchReport, Vocabulary
from tests.ranks.context import RankContext
from tests.ranks.independent_gather import LogicalState, gather

MakeModel = Callable[[TransformerConfig], torch.nn.Module]
OnEmpty = Callable[[list[torch.nn.Module], Any], None]
SEED = 1234

# Fused paths that need a GPU are off; so is dropout.
_CPU = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "add_bias_linear": False,
}


class Owned(NamedTuple):
    """What a rank's optimizer holds of one model parameter: its main parameter, its state, and where its run starts."""

    parameter: torch.nn.Parameter
    main: torch.Tensor
    state: dict[str, torch.Tensor]
    start: int


class CaseJob:
    """One rank of a job that can switch.

    Args:
        context: The rank.
        layout: Layout at the start.
        make_model: Makes the model of one pipeline stage, without wrappers.
        shape: Fields of Megatron's TransformerConfig.
        dtype: Dtype of the model's parameters.
        optimizer: Fields of Megatron's OptimizerConfig.
        options: Settings of the switches.
        vocabulary: Where `make_model` pads the vocabulary by the layout.
        config: The class of configuration that takes `shape`.

    Attributes:
        on_phase: Called with the name of each phase of a switch as it begins.
        on_empty: Called with a target's chunks and optimizer when their memory is there, before anything is in it.
        target: Chunks and optimizer of the last target that was built.
    """

    def __init__(
        self,
        context: RankContext,
        layout: ParallelLayout,
        make_model: MakeModel,
        *,
        shape: Mapping[str, Any],
        dtype: torch.dtype = torch.float32,
        optimizer: Mapping[str, Any] | None = None,
        options: SwitchOptions | None = None,
        vocabulary: Vocabulary | None = None,
        config: type[TransformerConfig] = TransformerConfig,
    ) -> None:
        self.rank = context.rank
        self.on_phase: Callable[[str], None] = lambda _: None
        self.on_empty: OnEmpty = lambda *_: None
        self.target: tuple[list[torch.nn.Module], Any] | None = None
        self._make_model = make_model
        self._shape = dict(shape)
        self._config = config
        self._dtype = dtype
        self._optimizer = dict(optimizer or {})
        logging.getLogger("megatron").setLevel(logging.ERROR)
        torch.manual_seed(SEED)
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            num_distributed_optimizer_instances=layout.instances,
            order=layout.order,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
        chunks, optimizer_ = self._build(layout)
        self.switcher = Switcher(
            layout=layout,
            chunks=chunks,
            optimizer=optimizer_,
            build=self._build_target,
            options=options or SwitchOptions(timeout=30, seed=SEED),
            vocabulary=vocabulary,
        )
        if self.switcher.refusal is not None:
            raise self.switcher.refusal
        self.switcher.on_phase = self._phase_begins

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The current world's chunks."""
        return self.switcher.world.chunks

    @property
    def optimizer(self) -> Any:
        """The current world's optimizer."""
        return self.switcher.world.optimizer

    @property
    def layout(self) -> ParallelLayout:
        """The current layout."""
        return self.switcher.world.layout

    def switch(self, layout: ParallelLayout, **others: Any) -> SwitchReport:
        """Switch; collective."""
        return self.switcher.switch(layout, **others)

    def gather(self) -> LogicalState | None:
        """Return the whole state on rank 0; collective."""
        return gather(self.chunks, self.optimizer)

    # --- building -----------------------------------------------------------------------------------------------------

    def _build_target(self, layout: ParallelLayout) -> tuple[list[torch.nn.Module], Any]:
        self.target = self._build(layout, hollow=True)
        return self.target

    def _phase_begins(self, phase: str) -> None:
        if phase == "transfer/bytes" and self.target is not None:
            with torch.no_grad():
                self.on_empty(*self.target)
        self.on_phase(phase)

    def _build(self, layout: ParallelLayout, *, hollow: bool = False) -> tuple[list[torch.nn.Module], Any]:
        half = {"bf16": self._dtype == torch.bfloat16, "fp16": self._dtype == torch.float16}
        with hollow_build() if hollow else nullcontext():
            config = self._config(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                params_dtype=self._dtype,
                pipeline_dtype=self._dtype,
                **half,
                **{**_CPU, **self._shape},
            )
            model = self._make_model(config)
            wrapped = Float16Module(config, model) if any(half.values()) else model
            ddp = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                num_distributed_optimizer_instances=layout.instances,
            )
            chunk = DistributedDataParallel(config, ddp, wrapped)
            settings = OptimizerConfig(
                optimizer="adam",
                use_distributed_optimizer=True,
                params_dtype=self._dtype,
                **half,
                **{"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 0.0, **self._optimizer},
            )
            return [chunk], get_megatron_optimizer(settings, [chunk])

    # --- the state ----------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's parameters by their name in Megatron's module, without wrappers."""
        return {
            name.removeprefix("module.").removeprefix("module."): parameter
            for name, parameter in self.chunks[0].named_parameters()
        }

    def owned(self) -> dict[str, Owned]:
        """Return what this rank's optimizer holds, by parameter name."""
        names = {parameter: name for name, parameter in self.parameters().items()}
        return {names[item.parameter]: item for item in owned_by(self.optimizer)}

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, gradient: float | Callable[[str], float]) -> tuple[bool, float]:
        """Do one optimizer step with a constant gradient, by parameter name; collective.

        Returns:
            Whether the step was done, and the gradient norm before clipping.
        """
        for name, parameter in self.parameters().items():
            if parameter.requires_grad:
                parameter.main_grad.fill_(gradient(name) if callable(gradient) else gradient)
        done, norm, _ = self.optimizer.step()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        return bool(done), float(norm or 0.0)


def owned_by(optimizer: Any) -> Iterator[Owned]:
    """Yield what a Megatron distributed optimizer holds on this rank, by its own index maps."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, (group, order) in getattr(inner, "model_param_group_index_map", {}).items():
            main = inner.optimizer.param_groups[group]["params"][order]
            run = inner._get_model_param_range_map(parameter)["param"]
            yield Owned(parameter, main, inner.optimizer.state[main], run.start)
