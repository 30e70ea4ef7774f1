"""C02: a fused projection is split per segment: gate and up, or the parts of a packed projection, each on its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.routing.windows import plan_rank
from megatron_dynatrain.vps.placement import Placement, slab_name
from megatron_dynatrain.vps.tensor import Home, ModelDescription, ParameterSpec, Segment, StateKind, Where
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

VOCABULARY = 64
FC1 = "decoder.layers.2.mlp.linear_fc1.weight"
STATES = ("param", "exp_avg", "exp_avg_sq")
TP2, TP4, TP1 = ParallelLayout(tp=2, dp=2), ParallelLayout(tp=4, dp=1), ParallelLayout(tp=1, dp=4)

# Global rows of [gate 8; up 8] in the order of a rank's local memory, by tp size and rank.
GATED_ROWS = {
    1: [list(range(16))],
    2: [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
    4: [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]],
}


# --- (a) SwiGLU on real models ----------------------------------------------------------------------------------------


def _switch_gated(context: RankContext) -> dict[str, Any]:
    """Forward before and after a switch; then witness values through tp2 -> tp4 -> tp2 -> tp1 -> tp2."""
    from tests.cases.job import CaseJob
    from tests.cases.models import T_SHAPE, gpt, logits
    from tests.cases.witness import fill

    job = CaseJob(context, TP2, gpt(VOCABULARY), shape=T_SHAPE)
    found: dict[str, Any] = {"logits": {}, "rows": {}, "states": []}
    job.step(0.0)  # makes the moments
    for layout in (None, TP4, TP2, TP1):
        if layout is not None:
            job.switch(layout)
        found["logits"][job.layout.describe(), len(found["logits"])] = logits(job.chunks[0]).numpy()
    job.switch(TP2)
    fill(job)
    found["states"].append(("tp2 dp2", job.gather()))
    for layout in (TP4, TP2, TP1, TP2):
        job.switch(layout)
        found["rows"][layout.tp] = _rows(job)
        found["states"].append((layout.describe(), job.gather()))
    return found


def _rows(job: Any) -> dict[str, list[float]]:
    """Which rows of fc1 this rank holds, per state, read off the witness values: state -> rows in local order."""
    from tests.cases.witness import OFFSETS, number_of

    start = number_of(FC1) * 4096
    owned = job.owned().get(FC1)
    parameter = job.parameters()[FC1].detach()
    rows: dict[str, list[float]] = {"param": ((parameter[:, 0] - start) / 32).tolist()}
    if owned is not None:
        for state in STATES[1:]:
            elements = (owned.state[state].flatten() - OFFSETS[state] - start).tolist()
            local = [(owned.start + i) // 32 for i in range(len(elements))]
            seen = dict(zip(local, (int(element) // 32 for element in elements), strict=True))
            rows[state] = [float(seen[row]) for row in sorted(seen)]
            rows[f"{state} local"] = [float(row) for row in sorted(seen)]
    return rows


@pytest.fixture(scope="module")
def gated(ranks: RankPool) -> list[dict[str, Any]]:
    return ranks.run(4, _switch_gated)


def test_c02a_gate_and_up_of_a_real_model(gated: list[dict[str, Any]]) -> None:
    for tp, expected in GATED_ROWS.items():
        held: dict[str, set[float]] = {state: set() for state in STATES}
        for rank, record in enumerate(gated):
            mine, rows = expected[rank % tp], record["rows"][tp]
            assert rows["param"] == mine, (tp, rank)
            held["param"] |= set(mine)
            for state in STATES[1:]:
                if state in rows:
                    assert rows[state] == [mine[int(row)] for row in rows[f"{state} local"]], (tp, rank, state)
                    held[state] |= set(rows[state])
        assert all(rows == set(range(16)) for rows in held.values()), (tp, held)
    assert GATED_ROWS[4][1] == [2, 3, 10, 11]


def test_c02a_witness_values_and_forward_come_through(gated: list[dict[str, Any]]) -> None:
    states = gated[0]["states"]
    assert [layout for layout, _ in states] == ["tp2 dp2", "tp4", "tp2 dp2", "dp4", "tp2 dp2"]
    first = states[0][1]
    for layout, state in states[1:]:
        assert first.differences(state) == [], layout
        copies = {
            count
            for (key, kind), count in state.copies.items()
            if key.endswith("linear_fc1.weight") and kind in STATES[1:]
        }
        assert copies == {1}, layout
    whole = [_whole(gated, *stop) for stop in gated[0]["logits"]]
    assert np.abs(whole[0]).max() > 0.01
    for stop, logits in zip(gated[0]["logits"], whole, strict=True):
        assert np.abs(logits - whole[0]).max() <= 1e-6, stop


def _whole(found: list[dict[str, Any]], layout: str, index: int) -> np.ndarray:
    """The logits of all tensor-parallel ranks side by side; replicas must be equal."""
    tp = {"tp2 dp2": 2, "tp4": 4, "dp4": 1}[layout]
    parts = [record["logits"][layout, index] for record in found]
    for rank, part in enumerate(parts):
        assert np.array_equal(part, parts[rank % tp])
    return np.concatenate(parts[:tp], axis=-1)


# --- (b) a packed projection ------------------------------------------------------------------------------------------

PACKED = (8, 8, 16, 16, 4, 4)
WIDTH = 4
KEPT_ON_RANK_0 = [*range(4), *range(8, 12), *range(16, 24), *range(32, 40), 48, 49, 52, 53]


def packed_model() -> ModelDescription:
    segments = tuple(Segment(f"in_proj.{name}", (size, WIDTH), 0) for name, size in zip("qkvzba", PACKED, strict=True))
    spec = ParameterSpec("in_proj", segments, Home(Where.LAYER, 0), dtype="bfloat16")
    return ModelDescription((spec,), num_layers=1)


def _switch_packed(context: RankContext) -> dict[str, Any]:
    """Move a packed projection over gloo: tp1 dp2 -> tp2 -> tp1 dp2; an element is its place in the packed matrix."""
    import torch

    from megatron_dynatrain.elastic.groups import WorldGroups
    from megatron_dynatrain.transport.base import Deadline
    from megatron_dynatrain.transport.execute import run_plan
    from megatron_dynatrain.transport.torch_p2p import TorchTransport

    group = WorldGroups(
        context.store("packed"), ranks=range(2), rank=context.rank, tag="packed", backend="gloo", timeout=20
    ).group()
    transport = TorchTransport(group, rank=context.rank, ranks=(0, 1))
    one, two = (Placement(packed_model(), layout) for layout in (ParallelLayout(dp=2), ParallelLayout(tp=2, dp=1)))
    numbers = torch.arange(56 * WIDTH)
    memory = {slab.name: numbers[slice(*slab.run)].to(getattr(torch, slab.dtype)) for slab in one.slabs(context.rank)}
    first = {name: flat.clone() for name, flat in memory.items()}
    found: dict[str, Any] = {}
    for source, target in ((one, two), (two, one)):
        after = {
            slab.name: torch.full((slab.numel,), -1.0, dtype=getattr(torch, slab.dtype))
            for slab in target.slabs(context.rank)
        }
        run_plan(plan_rank(source, target, context.rank), memory, after, transport, deadline=Deadline(20))
        memory = after
        found[target.layout.describe()] = {name: flat.float().tolist() for name, flat in memory.items()}
    found["same"] = first.keys() == memory.keys() and all(torch.equal(first[name], memory[name]) for name in first)
    return found


def test_c02b_packed_segments_over_gloo(ranks: RankPool) -> None:
    found = ranks.run(2, _switch_packed)
    kept = {0: KEPT_ON_RANK_0, 1: [row for row in range(56) if row not in KEPT_ON_RANK_0]}
    for rank, record in enumerate(found):
        elements = [float(row * WIDTH + column) for row in kept[rank] for column in range(WIDTH)]
        for state in (StateKind.MAIN, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
            assert record["tp2"][slab_name(state, 0, "in_proj")] == elements, (rank, state)
        assert record["tp2"][slab_name(StateKind.PARAM, 0, "in_proj")] == elements  # whole numbers below 256 are exact
        assert record["same"]
