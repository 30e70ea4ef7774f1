"""Data iterators of the current world: rebuilt from the consumed samples after each switch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import megatron.training.training as megatron_training

from megatron_dynatrain.errors import UnsupportedError
from megatron_dynatrain.mcore.build import NoDraws
from megatron_dynatrain.mcore.follow import reads_data
from megatron_dynatrain.mcore.thread_world import builds_apart

Provider = Callable[..., Any]


@dataclass
class DataIterators:
    """The three iterators (or lists of them, one per virtual stage) as `pretrain()` holds them."""

    train: Any
    valid: Any
    test: Any

    def close(self) -> None:
        """End the worker processes and let go of the data sets; local, the iterators are at their end afterwards.

        Those of the launch live as long as `pretrain()` otherwise, which holds them beside the current ones.
        """
        for item in _flat((self.train, self.valid, self.test)):
            if not hasattr(item, "iterable"):  # Megatron's wrapper that can replay has it
                continue
            loader, item.iterable = item.iterable, iter(())
            if isinstance(loader, GeneratorType):
                loader.close()
            elif hasattr(loader, "_shutdown_workers"):
                loader._shutdown_workers()


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


def rebuild(build: Callable[[Provider], tuple[Any, Any, Any]], provider: Provider, vpp: int | None) -> DataIterators:
    """Make the iterators of the live layout, positioned at the consumed samples; collective.

    Megatron's samplers are a function of (consumed samples, micro-batch size, data-parallel rank and size), so every
    sample is used once and in the same global batch as without a switch.

    Args:
        build: Stock `build_train_valid_test_data_iterators`.
        provider: The job's dataset provider.
        vpp: Number of model chunks per stage; None without interleaving.
    """
    if vpp is None:
        return DataIterators(*build(provider))
    result = DataIterators([], [], [])
    for stage in range(vpp):
        staged = functools.partial(provider, vp_stage=stage)
        if getattr(provider, "is_distributed", False):
            staged.is_distributed = True  # type: ignore[attr-defined]
        train, valid, test = build(staged)
        result.train.append(train)
        result.valid.append(valid)
        result.test.append(test)
    return result


class Datasets:
    """Data sets made before the iterators: opening and indexing them takes time, placing iterators in them does not.

    Beside training only those of a provider with Megatron's mark `is_distributed` are opened, whose builders draw from
    generators of their own; others may draw from the streams of the running steps and wait for the boundary.

    Args:
        provider: The job's dataset provider.
        vpp: Number of model chunks per stage; None without interleaving.
    """

    def __init__(self, provider: Provider, vpp: int | None) -> None:
        self._samples = megatron_training.get_train_valid_test_num_samples()
        self._provider = provider
        self._made: dict[int | None, tuple[Any, Any, Any]] = {}
        marked = getattr(provider, "is_distributed", False)
        if not marked and (builds_apart() or not reads_data()):
            return
        with NoDraws() if builds_apart() else nullcontext():
            for stage in (None,) if vpp is None else range(vpp):
                of_stage = {} if stage is None else {"vp_stage": stage}
                self._made[stage] = provider(self._samples, **of_stage)

    def provider(self) -> Provider:
        """Return a dataset provider that gives these data sets, or makes others where other sizes are asked for."""

        @functools.wraps(self._provider)
        def provide(samples: Any, vp_stage: int | None = None) -> Any:
            if tuple(samples) == tuple(self._samples) and vp_stage in self._made:
                return self._made[vp_stage]
            return self._provider(samples) if vp_stage is None else self._provider(samples, vp_stage=vp_stage)

        return provide


def check_provider(provider: Provider, vpps: Iterable[int | None]) -> None:
    """Check, before the first step, that the dataset provider can serve every interleaved layout of the schedule.

    Raises:
        UnsupportedError: It has no `vp_stage` keyword and a layout has more than one chunk per stage.
    """
    if any(vpps) and "vp_stage" not in inspect.signature(provider).parameters:
        raise UnsupportedError(
            "an interleaved pipeline needs a dataset provider with a vp_stage keyword",
            phase="check",
            subject=getattr(provider, "__name__", "the dataset provider"),
            expected="def provider(train_val_test_num_samples, vp_stage=None)",
            hint="add the keyword, as Megatron's own interleaved schedule asks for it",
        )


def provider_of(called_with: Provider) -> Provider:
    """Return the job's own provider behind Megatron's per-stage partial."""
    return called_with.func if isinstance(called_with, functools.partial) else called_with


def stock_builder() -> Callable[[Provider], tuple[Any, Any, Any]]:
    """Return Megatron's iterator builder as it is now."""
    return megatron_training.build_train_valid_test_data_iterators
