"""A schedule pins the padded vocabulary for the whole run: shapes and losses don't depend on the layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.ranks.dynamic import Layout, SwitchedRun, layout_keys, run_switched
from tests.ranks.gpt_args import checkpoint_args, gpt_args
from tests.ranks.pool import RankPool

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

_DIVISOR = 128
_PINNED = _DIVISOR * 4  # 127 tokens; stock Megatron has 128, 256 and 512 rows at tp 1, 2 and 4


def count_rows(run: PretrainRun) -> None:
    """Record the rows of the embedding of all tensor-parallel ranks together before each step, in `extra["rows"]`."""
    rows: list[int] = run.record.extra.setdefault("rows", [])

    def before_step(model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron.training import get_args

        names = dict(model[0].named_parameters())
        table = next(parameter for name, parameter in names.items() if "word_embeddings" in name)
        rows.append(len(table) * get_args().tensor_model_parallel_size)

    run.before_step.append(before_step)


def _argv(sizes: tuple[int, ...], *checkpoint: str) -> list[str]:
    shape = {"layers": 1, "hidden": 32, "global_batch": 4, "train_iters": 1 + 2 * len(sizes)}
    return [*gpt_args(tp=sizes[0], extra=f"--make-vocab-size-divisible-by {_DIVISOR}", **shape), *checkpoint]


def _switches(sizes: tuple[int, ...]) -> dict[int, Layout]:
    return {1 + 2 * i: layout_keys(tp=tp) for i, tp in enumerate(sizes) if i}


def _run(ranks: RankPool, sizes: tuple[int, ...], start: Path) -> SwitchedRun:
    """Train two steps from a checkpoint on the layout of the first tensor-parallel size, then two on each other."""
    argv = _argv(sizes, *checkpoint_args(load=start))
    run = run_switched(ranks, 4, argv, _switches(sizes), hooks=(count_rows,))
    assert [record.outcome for record in run.switches] == ["committed"] * (len(sizes) - 1)
    return run


def test_shapes_and_losses_do_not_depend_on_the_layout(ranks: RankPool) -> None:
    """Three runs with the same layouts in their schedules, each in another order and launched at another of them."""
    start = ranks.scratch("start")
    first = (1, 2, 4)
    run_switched(ranks, 4, _argv(first, *checkpoint_args(save=start), "--exit-interval", "1"), _switches(first))
    runs = [_run(ranks, sizes, start) for sizes in (first, (2, 4, 1), (4, 1, 2))]
    for run in runs:
        assert all(record.extra["rows"] == [_PINNED] * 6 for record in run.ranks)
        assert [step.iteration for step in run.steps] == [1, 2, 3, 4, 5, 6]
        for step, other in zip(run.steps, runs[0].steps, strict=True):
            assert step.loss is not None
            assert other.loss is not None
            assert abs(step.loss - other.loss) <= 1e-6 * other.loss
