"""Samples per iteration as a function of the samples before it: constant, or Megatron's step schedule (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from megatron_dynatrain.errors import ScheduleError

FLAG = "--step-batch-size-schedule"

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A global batch size and where it begins.

    Args:
        samples: Consumed samples from which on it holds.
        size: Samples per iteration.
        text: The step as it is written, e.g. `250B:1536`; empty for a constant size.
    """

    samples: int
    size: int
    text: str = ""

    def __str__(self) -> str:
        """Return the step as errors name it."""
        return f"step {self.text} of {FLAG}, from {self.samples} samples on"


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The global batch sizes of a training.

    Args:
        steps: By samples, the first at 0; `constant` and `parse_batches` make them.
        fixed: Whether it is one size that only a layout changes, and not Megatron's step schedule.
    """

    steps: tuple[BatchStep, ...]
    fixed: bool = False

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """Return one size for ever."""
        return cls((BatchStep(0, size),), fixed=True)

    def step_at(self, samples: int) -> BatchStep:
        """Return the step that the iteration after `samples` consumed samples belongs to."""
        return next((step for step in reversed(self.steps) if step.samples <= samples), self.steps[0])

    def size_at(self, samples: int) -> int:
        """Return the samples of the iteration after `samples` consumed samples."""
        return self.step_at(samples).size

    def iterations_until(self, samples: int, target: int) -> int:
        """Return after how many iterations, counted from `samples`, at least `target` samples are consumed.

        Negative for a target before `samples`, counted back with the size of `samples`.
        """
        if target <= samples:
            return -((samples - target) // self.size_at(samples))
        done = 0
        for step, begin, end in self._stretches(samples):
            until = target if end is None else min(end, target)
            count = _ceil(until - begin, step.size)
            done += count
            if begin + count * step.size >= target:
                return done
        raise ValueError(f"no iteration reaches {target} samples")  # the last stretch has no end

    def samples_after(self, samples: int, iterations: int) -> int:
        """Return the samples after some iterations, counted from `samples`; negative ones have the size of now."""
        if iterations < 0:
            return samples + iterations * self.size_at(samples)
        for step, begin, end in self._stretches(samples):
            count = iterations if end is None else min(iterations, (end - begin) // step.size)
            samples, iterations = begin + count * step.size, iterations - count
            if iterations == 0:
                break
        return samples

    def met(self, start: int, end: int | None) -> tuple[BatchStep, ...]:
        """Return the steps that iterations belong to which begin at `start` samples or later, and before `end`.

        A step that one iteration jumps over is not among them.
        """
        return tuple(step for step, begin, _ in self._stretches(start) if end is None or begin < end)

    def _stretches(self, samples: int) -> Iterator[tuple[BatchStep, int, int | None]]:
        """Yield each step that iterations belong to from `samples` on, and the samples before and after them."""
        while True:
            step = self.step_at(samples)
            following = next((later.samples for later in self.steps if later.samples > samples), None)
            if following is None:
                yield step, samples, None
                return
            end = samples + _ceil(following - samples, step.size) * step.size
            yield step, samples, end
            samples = end


@lru_cache(maxsize=8)
def parse_batches(text: str, seq_length: int | None) -> BatchSchedule:
    """Return the batch sizes that `--step-batch-size-schedule` says, by Megatron's rules.

    Entries `THRESHOLD:SIZE` with blanks or commas between them; numbers may end with K, M, B or T (1e3 ... 1e12).
    An iteration belongs to the last entry whose threshold isn't above the samples consumed before it. Source:
    `StepBatchsizeNumMicroBatchesCalculator` in `megatron/core/num_microbatches_calculator.py` of 0.19.

    Args:
        text: Value of the flag.
        seq_length: Tokens per sample: thresholds are tokens then, rounded down to samples; None where they are samples.

    Raises:
        ScheduleError: The text is not such a schedule.
    """
    steps = tuple(sorted((_step(entry, seq_length) for entry in text.replace(",", " ").split()), key=_samples))
    if not steps or steps[0].samples != 0:
        raise _wrong("a first entry with threshold 0", text)
    for before, step in pairwise(steps):
        if step.samples == before.samples:
            raise _wrong("another threshold, in samples, for each entry", f"{before.text} and {step.text}")
    for step in steps:
        if step.size < 1:
            raise _wrong("batch sizes of at least 1", step.text)
    return BatchSchedule(steps)


def _step(entry: str, seq_length: int | None) -> BatchStep:
    threshold, _, size = entry.partition(":")
    try:
        samples = _number(threshold) // (seq_length or 1)
        return BatchStep(samples, _number(size), entry)
    except (ValueError, OverflowError):
        raise _wrong("entries THRESHOLD:SIZE, as 250B:1536", entry) from None


def _number(text: str) -> int:
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


def _samples(step: BatchStep) -> int:
    return step.samples


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _wrong(expected: str, got: str) -> ScheduleError:
    return ScheduleError(
        "the schedule of batch sizes can't be read", phase="check", subject=FLAG, expected=expected, got=got
    )
