"""Hooks that note what a run evaluates and which samples it reads; importing them imports no Megatron."""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation as a rank with the loss saw it.

    Attributes:
        prefix: Megatron's own words for when and on what.
        loss: Mean loss, exact.
        samples: Samples of the validation set consumed after it.
    """

    prefix: str
    loss: float
    samples: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample that a rank read.

    Attributes:
        iteration: Zero-based iteration that it was read for.
        index: Its number in the training set.
        tokens: Checksum of its tokens.
        stage: Pipeline stage of the reader, from 0.
        stages: Number of pipeline stages.
    """

    iteration: int
    index: int
    tokens: int
    stage: int
    stages: int


def note_evaluations(run: PretrainRun) -> None:
    """Put a list of `Evaluation` into `extra["evaluations"]`, empty on ranks without the loss."""
    import megatron.training.training as training
    from megatron.training import get_args

    seen: list[Evaluation] = []
    run.record.extra["evaluations"] = seen
    evaluate, announce = training.evaluate, training.evaluate_and_print_results
    prefixes: list[str] = []

    def evaluate_and_print_results(prefix: str, *args: Any, **kwargs: Any) -> Any:
        prefixes.append(prefix)
        return announce(prefix, *args, **kwargs)

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        loss = result[0].get("lm loss")
        if loss is not None:
            consumed = int(get_args().consumed_valid_samples)
            seen.append(Evaluation(prefix=prefixes[-1], loss=float(loss), samples=consumed))
        return result

    training.evaluate, training.evaluate_and_print_results = noted, evaluate_and_print_results


def note_samples(run: PretrainRun) -> None:
    """Put a list of `Sample` into `extra["samples"]`: every sample of the training set that this rank reads."""
    from megatron.core import parallel_state
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args

    seen: list[Sample] = []
    run.record.extra["samples"] = seen
    read = GPTDataset.__getitem__

    def noted(self: Any, index: int | None) -> Any:
        sample = read(self, index)
        if self.index_split is Split.train and index is not None:
            seen.append(
                Sample(
                    iteration=int(get_args().curr_iteration),
                    index=int(index),
                    tokens=zlib.crc32(sample["tokens"].numpy().tobytes()),
                    stage=parallel_state.get_pipeline_model_parallel_rank(),
                    stages=parallel_state.get_pipeline_model_parallel_world_size(),
                )
            )
        return sample

    GPTDataset.__getitem__ = noted  # type: ignore[method-assign]
