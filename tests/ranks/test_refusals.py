"""What can't be done is refused before anything moves, in the same words on every rank, and the job goes on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.ranks.attempts import Act, attempted
from tests.ranks.dynamic import all_steps, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool
from tests.ranks.test_aborts import check_unharmed, everywhere

if TYPE_CHECKING:
    from megatron_dynatrain.layout import ParallelLayout
    from megatron_dynatrain.switch import Switcher
    from tests.ranks.pretrain import PretrainRun


@contextmanager
def ask_for(switcher: Switcher, *, world: int = 2, **sizes: Any) -> Iterator[ParallelLayout]:
    """Ask the Switcher for a layout that no schedule was checked for."""
    from megatron_dynatrain.layout import ParallelLayout

    yield ParallelLayout.for_world(world, **sizes)


@contextmanager
def batch_of_two(switcher: Switcher) -> Iterator[ParallelLayout]:
    """Ask for micro-batches of two samples on two data-parallel ranks, with a global batch of two."""
    from megatron.training import get_args

    from megatron_dynatrain.layout import ParallelLayout

    args = get_args()
    before, args.micro_batch_size = args.micro_batch_size, 2
    try:
        yield ParallelLayout.for_world(2)
    finally:
        args.micro_batch_size = before


@contextmanager
def options(switcher: Switcher, **changes: Any) -> Iterator[None]:
    """Use other options for one attempt."""
    before, switcher.options = switcher.options, dataclasses.replace(switcher.options, **changes)
    try:
        yield
    finally:
        switcher.options = before


@contextmanager
def unlisted_buffer(switcher: Switcher) -> Iterator[None]:
    """Register a persistent buffer that nobody listed, on one rank."""
    import torch

    model = switcher.world.chunks[0].module
    if switcher.rank == 1:
        model.register_buffer("running_mean_of_something", torch.ones(3))
    try:
        yield
    finally:
        if switcher.rank == 1:
            del model.running_mean_of_something


@contextmanager
def unlisted_state(switcher: Switcher) -> Iterator[None]:
    """Give the optimizer a state that nobody listed, for one parameter on one rank."""
    import torch

    inner = getattr(switcher.world.optimizer, "chained_optimizers", [switcher.world.optimizer])[0]
    state = next(iter(inner.optimizer.state.values()))
    if switcher.rank == 0:
        state["max_exp_avg_sq"] = torch.zeros(1)
    try:
        yield
    finally:
        state.pop("max_exp_avg_sq", None)


@contextmanager
def different_steps(switcher: Switcher) -> Iterator[None]:
    """Let the step counts of the running job differ between ranks."""
    inner = getattr(switcher.world.optimizer, "chained_optimizers", [switcher.world.optimizer])[0]
    step = next(iter(inner.optimizer.state.values()))["step"]
    step += switcher.rank
    try:
        yield
    finally:
        step -= switcher.rank


# Attempt -> what the refusal must name.
_REFUSED: dict[Act, tuple[str, ...]] = {
    functools.partial(ask_for, pp=2): ("3 layers", "pp 2"),
    functools.partial(ask_for, tp=2): ("num_attention_heads", "tp 2", "got: 3"),
    functools.partial(ask_for, world=4): ("subject: ranks", "[0, 1]", "ranks [2, 3] of dp4"),
    batch_of_two: ("global_batch_size", "dp 2", "got: 2"),
    functools.partial(options, memory_limit=1000): ("doesn't fit in memory", "1000 bytes", "rank"),
    unlisted_buffer: ("running_mean_of_something", "rank 1"),
    unlisted_state: ("max_exp_avg_sq", "rank 0"),
    different_steps: ("step counts differ", "subject: step"),
}


def test_what_cannot_be_done_at_run_time_is_refused_and_harms_nothing(ranks: RankPool) -> None:
    """3 layers and 3 heads: no other even layout of 2 ranks exists, but an uneven pipeline does."""
    argv = gpt_args(
        layers=3,
        heads=3,
        hidden=48,
        seq=64,
        global_batch=2,
        train_iters=len(_REFUSED) + 3,
        extra="--hidden-dropout 0.1",
    )
    uneven = layout_keys(pp=2, first=1)
    switches = {number + 1: uneven for number in range(len(_REFUSED) + 1)}
    hook = functools.partial(attempted, acts=(*_REFUSED, None))
    run = run_switched(ranks, 2, argv, switches, hooks=(hook,), timeout=10, ahead=0)
    *failed, last = everywhere(run)
    for words, attempt in zip(_REFUSED.values(), failed, strict=True):
        assert attempt.kind == "SwitchRefused", attempt.error
        assert attempt.error is not None
        missing = [word for word in words if word not in attempt.error]
        assert not missing, f"{missing} not in: {attempt.error}"
    assert last.kind is None
    assert all(record.moved_bytes in (None, 0) for record in run.switches[:-1])
    check_unharmed(run, ranks, 2, argv, len(_REFUSED), rounding=1e-1)


def odd_fused_parameter(run: PretrainRun) -> None:
    """Let the gated projection of the first layer declare its two parts in the other order."""

    def after_setup(model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron.core.utils import unwrap_model

        mlp = unwrap_model(model[0]).decoder.layers[0].mlp
        stock = mlp.sharded_state_dict

        def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
            declared = stock(*args, **kwargs)
            for item in declared.values():
                if hasattr(item, "build_fn"):
                    build = item.build_fn
                    item.build_fn = lambda *of, build=build: build(*of)[::-1]
            return declared

        mlp.sharded_state_dict = sharded_state_dict

    run.after_setup.append(after_setup)


def test_a_fused_parameter_that_nobody_understands_refuses_every_switch_by_its_name(ranks: RankPool) -> None:
    argv = gpt_args(layers=2, hidden=32, seq=64, global_batch=2, swiglu=True, tied=False, train_iters=4)
    run = run_switched(ranks, 2, argv, {1: layout_keys(pp=2), 2: layout_keys(tp=2)}, hooks=(odd_fused_parameter,))
    assert [record.outcome for record in run.switches] == ["refused", "refused"]
    for record in run.switches:
        assert record.error is not None
        assert "decoder.layers.0.mlp.linear_fc1.weight" in record.error
    assert run.steps == all_steps(ranks.pretrain(2, argv))
