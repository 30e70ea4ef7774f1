"""Every row of the table, by the oracle: a switch inside a run equals a stop at A and a start at B, bit for bit.

One run goes through a chain of layouts, with a checkpoint of Megatron's own before each switch. For each row:

1. The whole state, gathered right before and right after the switch by code of its own, is equal in all bits.
2. Fresh processes at B, without the plugin, start from the checkpoint before the switch. Their state, their steps and
   their state at the next boundary are those of the run that switched, in all bits. Where Megatron can't load the
   checkpoint under B, they start from the gathered state.

In fp32 every loss of the chain is that of a training that never leaves its first layout, too.
"""

from __future__ import annotations

import pytest

from tests.oracle import results
from tests.oracle.chain import Chain, Row
from tests.oracle.runs import ChainRun, gathered, never_switched, run_anew, run_chain, steps_between
from tests.oracle.table import CHAINS, ROWS
from tests.ranks.independent_gather import STATES, LogicalState
from tests.ranks.pool import RankFailure, RankPool

ROUNDING = 1e-6  # relative: fp32, other order of summation
_TIMEOUT = 600


def soak_marked(item: Chain | Row, name: str) -> object:
    marks = [pytest.mark.timeout(_TIMEOUT), *([pytest.mark.soak] if item.soak else [])]
    return pytest.param(item, id=name, marks=marks)


@pytest.fixture(scope="module")
def runs() -> dict[str, ChainRun | RankFailure]:
    """Chains that ran, and those that failed."""
    return {}


def went_through(ranks: RankPool, runs: dict[str, ChainRun | RankFailure], chain: Chain) -> ChainRun:
    """Return the run through a chain; it runs once, also where it fails."""
    if chain.name not in runs:
        try:
            runs[chain.name] = run_chain(ranks, chain)
        except RankFailure as failure:
            runs[chain.name] = failure
    found = runs[chain.name]
    if isinstance(found, RankFailure):
        raise found
    return found


def check_moved(row: Row, online: ChainRun) -> LogicalState:
    """Check that the switch was done and that the state is equal before and after it; return the state."""
    record = online.run.switches[row.number]
    assert (record.iteration, record.outcome, record.error) == (row.iteration, "committed", None)
    assert (record.source, record.target) == (row.source.describe(), row.target.describe())
    before, after = online.before[row.iteration], online.after[row.iteration]
    assert not before.differences(after)
    assert before.steps == (float(row.iteration),)
    expected = {*STATES, "buffer"} if "expert-bias" in row.chain.model.extra else set(STATES)
    assert {state for _, state in before.bits} == expected
    return before


@pytest.mark.parametrize("chain", [soak_marked(chain, chain.name) for chain in CHAINS])
def test_the_state_is_the_same_after_each_switch(
    ranks: RankPool, runs: dict[str, ChainRun | RankFailure], chain: Chain
) -> None:
    online = went_through(ranks, runs, chain)
    for row in chain.rows:
        check_moved(row, online)
    assert len(online.run.switches) == len(chain.rows)
    assert [step.iteration for step in online.run.steps] == list(range(chain.boundaries[-1]))
    if chain.model.dtype == "fp32":
        losses = [step.loss for step in online.run.steps]
        assert losses == pytest.approx(never_switched(ranks, chain), rel=ROUNDING)


@pytest.mark.parametrize("row", [soak_marked(row, row.id) for row in ROWS])
def test_a_switch_equals_a_stop_at_a_and_a_start_at_b(
    ranks: RankPool, runs: dict[str, ChainRun | RankFailure], row: Row
) -> None:
    online = went_through(ranks, runs, row.chain)
    state = check_moved(row, online)
    anew = run_anew(ranks, row, online)

    start, stop = row.iteration, row.chain.boundaries[row.number + 1]
    ended, loaded = gathered(anew)
    assert not loaded[start].differences(state), "the start at B got another state"
    for place, rank in enumerate(row.target.ranks):
        expected = anew[place].steps
        assert [step.iteration for step in expected] == list(range(start, stop))
        assert steps_between(online.run.ranks[rank].steps, start, stop) == expected
    assert not online.before[stop].differences(ended[stop])
    moved = online.run.switches[row.number].moved_bytes
    results.write(row, states=len(state.bits), moved_bytes=moved or 0)
