"""The runs behind the table: one that switches, ones that start anew at B, and one that stays at A."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dynatrain.layout import DEFAULT_ORDER, ParallelLayout
from tests.oracle import hooks
from tests.oracle.chain import Chain, Row
from tests.ranks.dynamic import SwitchedRun, run_switched
from tests.ranks.gpt_args import checkpoint_args, gpt_args
from tests.ranks.hooks import mend_checkpoints
from tests.ranks.independent_gather import LogicalState
from tests.ranks.pool import RankPool
from tests.ranks.records import PretrainRecord, StepRecord, losses

WAIT, LIMIT = 120.0, 480.0
"""Seconds: of a wait inside a switch, and of a run. Both only stop what hangs."""


@dataclasses.dataclass(frozen=True)
class ChainRun:
    """What one run through a chain left.

    Attributes:
        run: Its records.
        saved: Directory of the checkpoints, one before each switch.
        before: Iteration -> the state before the switch there; the last one is that of the end.
        after: Iteration -> the state after the switch there.
    """

    run: SwitchedRun
    saved: Path
    before: dict[int, LogicalState]
    after: dict[int, LogicalState]


def argv_of(chain: Chain, layout: ParallelLayout, *, padded: bool = True) -> list[str]:
    """Return Megatron's flags of a launch with a layout.

    Args:
        padded: Give the size of the vocabulary, which a job with a schedule finds by itself.
    """
    model, sizes = chain.model, chain.sizes
    moe = {"ep": layout.ep, "etp": layout.etp} if model.moe else {}
    extra = [model.extra, *_more(layout)]
    if model.keywords.get("swiglu"):
        extra.append(sizes.gated)
    if padded:
        extra.append(f"--padded-vocab-size {chain.padded}")
    return gpt_args(
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        sp=layout.sequence_parallel,
        train_iters=chain.boundaries[-1],
        extra=" ".join(extra),
        **moe,
        **sizes.keywords(model),
    )


def _more(layout: ParallelLayout) -> list[str]:
    """Return the flags that `gpt_args` doesn't know."""
    split = layout.split
    words: list[str] = []
    if split.layout is not None:
        words.append(f"--pipeline-model-parallel-layout {split.layout}")
    elif layout.vpp is not None:
        words.append(f"--num-virtual-stages-per-pipeline-rank {layout.vpp}")
    if split.first is not None:
        words.append(f"--decoder-first-pipeline-num-layers {split.first}")
    if split.last is not None:
        words.append(f"--decoder-last-pipeline-num-layers {split.last}")
    if split.account_for_embedding:
        words.append("--account-for-embedding-in-pipeline-split")
    if split.account_for_loss:
        words.append("--account-for-loss-in-pipeline-split")
    if layout.instances > 1:
        words.append(f"--num-distributed-optimizer-instances {layout.instances}")
    if layout.order != DEFAULT_ORDER:
        words.append("--use-tp-pp-dp-mapping")
    return words


def run_chain(ranks: RankPool, chain: Chain) -> ChainRun:
    """Run through all layouts of a chain with the plugin, and save a checkpoint before each switch."""
    saved = ranks.scratch("saved")
    argv = [*argv_of(chain, chain.rows[0].source, padded=False), *checkpoint_args(save=saved, interval=2)]
    switches = {row.iteration: dict(row.keys[1]) for row in chain.rows}
    gather = functools.partial(hooks.gather_at, boundaries=frozenset(chain.boundaries))
    run = run_switched(
        ranks, chain.world, argv, switches, hooks=(*chain.model.hooks, gather), timeout=WAIT, limit=LIMIT
    )
    before, after = (_merged(run.ranks, name) for name in ("before", "after"))
    return ChainRun(run, saved, before, after)


def run_anew(ranks: RankPool, row: Row, online: ChainRun) -> Sequence[PretrainRecord]:
    """Start fresh processes at B, without the plugin, from the state before the switch; stop at the next boundary.

    B is launched on ranks in their order, whatever ranks the switch gave it: a launch can't name them.
    """
    chain = row.chain
    start, stop = row.iteration, chain.boundaries[row.number + 1]
    argv = argv_of(chain, row.target)
    observe = functools.partial(hooks.gather_at, boundaries=frozenset((start, stop)))
    shorten = functools.partial(hooks.stop_at, iteration=stop)
    begin: Any = mend_checkpoints
    if row.oracle == "checkpoint":
        argv += [*checkpoint_args(load=online.saved), "--ckpt-step", str(start)]
    else:
        samples = start * chain.sizes.global_batch
        state = online.before[start]
        begin = functools.partial(hooks.start_from, state=state, iteration=start, samples=samples)
    records: Sequence[PretrainRecord] = ranks.pretrain(
        chain.world, argv, hooks=(*chain.model.hooks, begin, observe, shorten), timeout=LIMIT
    )
    return records


def never_switched(ranks: RankPool, chain: Chain) -> list[float]:
    """Return the losses of the same training under the layout of the launch, without the plugin."""
    argv = argv_of(chain, chain.rows[0].source)
    return losses(ranks.pretrain(chain.world, argv, hooks=chain.model.hooks, timeout=LIMIT))


def steps_between(steps: Sequence[StepRecord], start: int, stop: int) -> list[StepRecord]:
    """Return the steps of some iterations, as one rank saw them."""
    return [step for step in steps if start <= step.iteration < stop]


def _merged(records: Sequence[PretrainRecord], name: str) -> dict[int, LogicalState]:
    found: dict[int, LogicalState] = {}
    for record in records:
        assert not found.keys() & record.extra[name].keys()
        found |= record.extra[name]
    return found


def gathered(records: Sequence[PretrainRecord]) -> tuple[dict[int, LogicalState], dict[int, LogicalState]]:
    """Return the states of a run that doesn't switch: (when it stopped, before a step), each by iteration."""
    return _merged(records, "before"), _merged(records, "after")
