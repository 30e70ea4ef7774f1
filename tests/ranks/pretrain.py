"""Runs `scripts/pretrain_gpt.py` in a rank and records every step."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron.training.training as training
from megatron.training import get_args

from tests.ranks.context import RankContext
from tests.ranks.records import PretrainRecord, StepRecord

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def _import_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_gpt", SCRIPT)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {SCRIPT}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _import_script()


class PretrainRun:
    """One rank's run, before it starts: a hook adds what it wants called, or patches what it wants.

    A hook that wraps one of Megatron's functions wraps it beneath the recorder.

    Attributes:
        context: The rank.
        argv: Megatron's flags.
        record: What the test gets back; hooks use `record.extra`.
        main: Runs the script; a hook may put another entry here.
        after_setup: Called with (model, optimizer, scheduler) when they exist and a checkpoint is loaded.
        before_step: Called with (model, optimizer, scheduler) before each step.
        plugin: The plugin, where the hook `dynamic` installed it.
    """

    def __init__(self, context: RankContext, argv: Sequence[str]) -> None:
        self.context = context
        self.argv = list(argv)
        self.record = PretrainRecord(rank=context.rank)
        self.main: Callable[[], None] = script.main
        self.after_setup: list[Callable[[Any, Any, Any], None]] = []
        self.before_step: list[Callable[[Any, Any, Any], None]] = []
        self.plugin: Any = None

    def run(self) -> PretrainRecord:
        """Run the script and return the record. Collective over all ranks."""
        sys.argv = [str(SCRIPT), *self.argv]
        training.train_step = self._recorded(training.train_step)
        training.setup_model_and_optimizer = self._announced(training.setup_model_and_optimizer)
        try:
            self.main()
        except SystemExit as end:  # --exit-interval ends the process
            self.record.exit_code = end.code
        return self.record

    def _announced(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(setup)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            for call in self.after_setup:
                call(*result[:3])
            return result

        return setup_model_and_optimizer

    def _recorded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def train_step(
            forward: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any
        ) -> Any:
            for call in self.before_step:
                call(model, optimizer, scheduler)
            inner = list(getattr(optimizer, "chained_optimizers", [optimizer]))
            lr = float(inner[0].param_groups[0]["lr"])  # the step ends with that of the next one
            result = step(forward, iterator, model, optimizer, scheduler, *args, **kwargs)
            loss, grad_norm = result[0].get("lm loss"), result[5]
            self.record.steps.append(
                StepRecord(
                    iteration=kwargs["iteration"],
                    loss=None if loss is None else float(loss),
                    grad_norm=None if grad_norm is None else float(grad_norm),
                    lr=lr,
                    consumed_samples=int(get_args().consumed_train_samples),
                    adam_steps=_adam_steps(inner),
                )
            )
            return result

        return train_step


def _adam_steps(optimizers: Sequence[Any]) -> tuple[int, ...]:
    steps = set()
    for optimizer in optimizers:
        states = optimizer.optimizer.state.values()
        steps |= {int(state["step"]) for state in states if "step" in state}
    return tuple(sorted(steps))
