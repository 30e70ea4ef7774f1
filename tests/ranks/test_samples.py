"""Every sample is used once, in the same global batch as without a switch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.ranks.dynamic import layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.observe import Sample, note_samples
from tests.ranks.pool import RankPool
from tests.ranks.records import PretrainRecord

BATCH, STEPS = 8, 5
Batch = list[tuple[int, int]]


def batches(records: Sequence[PretrainRecord]) -> dict[int, Batch]:
    """Return iteration -> sorted (index, checksum of the tokens) of its global batch.

    The first and the last pipeline stage read the same samples, and only tensor rank 0 reads: each stage's readers
    together must have the batch.
    """
    read: dict[int, dict[int, Batch]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for sample in record.extra["samples"]:
            assert isinstance(sample, Sample)
            assert sample.stage in (0, sample.stages - 1)
            read[sample.iteration][sample.stage].append((sample.index, sample.tokens))
    result = {}
    for iteration, by_stage in sorted(read.items()):
        first, *others = [sorted(samples) for _, samples in sorted(by_stage.items())]
        assert all(other == first for other in others), f"the stages read different samples at {iteration}"
        result[iteration] = first
    return result


def test_global_batches_are_those_of_a_run_that_never_switches(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, layers=2, hidden=32, seq=16, global_batch=BATCH, train_iters=STEPS)
    switches = {
        1: layout_keys(pp=2),
        2: layout_keys(),
        3: layout_keys(tp=2, pp=2, sp=True, micro_batch_size=4),
        4: layout_keys(tp=2, micro_batch_size=2),
    }
    switched = run_switched(ranks, 4, argv, switches, hooks=(note_samples,))
    assert [record.outcome for record in switched.switches] == ["committed"] * len(switches)
    found = batches(switched.ranks)
    never = batches(ranks.pretrain(4, argv, hooks=(note_samples,)))
    assert list(never) == list(range(STEPS))
    assert all(len(batch) == BATCH for batch in never.values())
    assert found == never
    uses = Counter(index for batch in found.values() for index, _ in batch)
    assert uses == Counter(range(STEPS * BATCH))
