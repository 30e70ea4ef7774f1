"""C09: a tied embedding exists once at pp 1 and twice at pp > 1, is moved as one logical parameter and counted once."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

VOCABULARY, HIDDEN = 16, 8
STOPS = [ParallelLayout(pp=pp, dp=4 // pp) for pp in (1, 4, 2, 1)]
NORM = 11.3137  # sqrt(16 * 8); counting both copies would give 16.0
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def _switch(context: RankContext, clip: float, dtype: str) -> list[dict[str, Any]]:
    import torch

    from tests.cases.job import CaseJob
    from tests.cases.models import T_SHAPE, gpt
    from tests.cases.training import train_step

    shape = {**T_SHAPE, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_query_groups": 2}
    make = gpt(VOCABULARY, tied=True)
    job = CaseJob(context, STOPS[0], make, shape=shape, optimizer={"clip_grad": clip}, dtype=getattr(torch, dtype))
    train_step(job)
    found = []
    for number, layout in enumerate(STOPS):
        record: dict[str, Any] = {}
        if number:
            before = job.gather()
            report = job.switch(layout)
            after = job.gather()
            record["bytes"] = (report.moved_bytes, report.minimum_bytes)
            record["differences"] = None if before is None or after is None else before.differences(after)
        record["right after"] = _tied(job)
        state = job.gather()
        if state is not None:
            record["keys"] = sorted({key for key, _ in state.bits if "word_embeddings" in key or "output" in key})
            record["copies"] = {kind: count for (key, kind), count in state.copies.items() if key == EMBEDDING}
        record["loss"] = train_step(job)
        record["after a step"] = _tied(job)
        job.gather()
        moment = _first(job)
        _, record["norm"] = job.step(lambda name: 1.0 if name in (EMBEDDING, OUTPUT) else 0.0)
        record["clipped"] = None if moment is None else (moment, _first(job))
        found.append(record)
    return found


def _tied(job: Any) -> dict[str, list[float]]:
    """Return all values of each copy of the tied parameter on this rank, by name."""
    return {
        name: parameter.detach().flatten().tolist()
        for name, parameter in job.parameters().items()
        if name in (EMBEDDING, OUTPUT)
    }


def _first(job: Any) -> float | None:
    """The first element of exp_avg of the tied parameter, where this rank's optimizer holds it."""
    for name, item in job.owned().items():
        if name in (EMBEDDING, OUTPUT) and item.start == 0:
            return float(item.state["exp_avg"].flatten()[0])
    return None


@pytest.mark.parametrize(("clip", "dtype"), [(0.0, "float32"), (1.0, "float32"), (1.0, "bfloat16")])
def test_c09_one_logical_parameter_at_every_stop(ranks: RankPool, clip: float, dtype: str) -> None:
    found = ranks.run(4, _switch, clip, dtype)
    for number, layout in enumerate(STOPS):
        stop = [record[number] for record in found]
        for when in ("right after", "after a step"):
            for rank, record in enumerate(stop):
                stage = layout.coordinate(rank)["pp"]
                names = [EMBEDDING] if stage == 0 else [OUTPUT] if stage == layout.pp - 1 else []
                assert list(record[when]) == names, (layout.describe(), rank)
            copies = [values for record in stop for values in record[when].values()]
            assert len(copies) == (layout.dp if layout.pp == 1 else 2 * layout.dp)
            assert all(values == copies[0] for values in copies)
        assert stop[0]["keys"] == [EMBEDDING]
        # Each copy has an optimizer state of its own; `gather` fails where two copies differ in a bit.
        places = 1 if layout.pp == 1 else 2
        states = dict.fromkeys(("main", "exp_avg", "exp_avg_sq"), places)
        assert stop[0]["copies"] == {"param": places * layout.dp, **states}
        assert stop[0].get("differences", []) == []
        assert all(record["norm"] == pytest.approx(NORM, abs=1e-4) for record in stop), layout.describe()
        assert "bytes" not in stop[0] or stop[0]["bytes"][0] == stop[0]["bytes"][1]
        clipped = [record["clipped"] for record in stop if record["clipped"] is not None]
        assert len(clipped) == (1 if layout.pp == 1 else 2)
        for before, after in clipped:  # exp_avg grows by a tenth of the gradient that is left after clipping
            assert after - 0.9 * before == pytest.approx(0.1 * (min(1.0, clip / NORM) if clip else 1.0), rel=1e-3)
    losses = [record["loss"] for record in found[0]]
    assert len({tuple(r["loss"] for r in record) for record in found}) == 1
    assert all(0 < loss < 10 for loss in losses)
