"""A target that is built in the background while training goes on: same bits, no harm when it fails or is dropped."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks.context import RankContext
from tests.ranks.dynamic import Layout, all_steps, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

THREAD = "dynatrain-prepare"
_PHASES = ["fit", "memory", "groups", "build", "plan", "pairs"]
_SMALL: dict[str, Any] = {"layers": 4, "hidden": 32, "seq": 32, "global_batch": 4}
_CHAINS: dict[str, tuple[dict[str, Any], list[Layout]]] = {
    "dense": ({"tp": 2}, [layout_keys(pp=2, vpp=2), layout_keys(), layout_keys(tp=2, sp=True)]),
    "moe": (
        {"experts": 2, "bf16": True, "ep": 2, "swiglu": True},
        [layout_keys(ep=1), layout_keys(pp=2, ep=1), layout_keys(ep=2)],
    ),
}


def in_background() -> bool:
    return threading.current_thread().name == THREAD


@pytest.mark.parametrize("name", _CHAINS)
def test_steps_beside_the_preparation_and_after_the_switch_have_the_same_bits(ranks: RankPool, name: str) -> None:
    keys, layouts = _CHAINS[name]
    argv = gpt_args(**keys, **_SMALL, train_iters=4 * len(layouts) + 4)
    if name == "dense":  # the steps draw while the target is built
        argv[argv.index("--attention-dropout") + 1] = argv[argv.index("--hidden-dropout") + 1] = "0.1"
    switches = {4 * (number + 1): layout for number, layout in enumerate(layouts)}
    at_boundary, beside = (run_switched(ranks, 2, argv, switches, ahead=ahead) for ahead in (0, 2))
    assert [(record.outcome, record.error) for record in beside.switches] == [("committed", None)] * len(layouts)
    assert [record.ahead_s > 0 for record in at_boundary.switches] == [False] * len(layouts)
    assert [record.ahead_s > 0 for record in beside.switches] == [True] * len(layouts)
    assert beside.steps == at_boundary.steps


def fail_beside(run: PretrainRun, *, phases: list[str], rank: int) -> None:
    """Raise in the background thread of one rank, in another phase of each preparation."""
    from megatron_dynatrain.switch import Switcher

    stock, left = Switcher.prepare_ahead, list(phases)

    def prepare_ahead(self: Switcher, *args: Any, **kwargs: Any) -> None:
        phase = left.pop(0) if left else None

        def on_phase(name: str) -> None:
            if name == f"prepare/{phase}" and self.rank == rank and in_background():
                raise ValueError(f"bad {phase}")

        self.on_phase = on_phase
        stock(self, *args, **kwargs)

    Switcher.prepare_ahead = prepare_ahead  # type: ignore[method-assign]


def test_an_error_beside_training_refuses_the_switch_on_every_rank_and_the_next_one_works(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=2 * len(_PHASES) + 5)
    switches = {2 * (number + 1): layout_keys(pp=2) for number in range(len(_PHASES) + 1)}
    hook = functools.partial(fail_beside, phases=_PHASES, rank=1)
    run = run_switched(ranks, 2, argv, switches, hooks=(hook,), timeout=4)
    *failed, last = run.switches
    for phase, record in zip(_PHASES, failed, strict=True):
        assert record.outcome == "refused"
        assert record.error is not None
        assert f"ValueError: bad {phase}" in record.error
        assert "[rank 1, phase prepare]" in record.error
    assert last.outcome == "committed"
    never = all_steps(ranks.pretrain(2, argv))
    before = 2 * len(switches)
    assert run.steps[:before] == never[:before]
    losses = [[step.loss for step in steps[before:]] for steps in (run.steps, never)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def fail_inside_the_build(run: PretrainRun) -> None:
    """Raise on rank 1 where the others go on to gather over all ranks: in the background, and then at the boundary."""
    import megatron.training.training as megatron_training

    stock, rank = megatron_training.get_megatron_optimizer, run.context.rank
    calls: list[int] = []

    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) in (2, 3):
            raise ValueError("no optimizer")
        return stock(*args, **kwargs)

    megatron_training.get_megatron_optimizer = get_megatron_optimizer


@pytest.mark.parametrize("ahead", [0, 2])
def test_ranks_that_wait_for_one_that_failed_do_not_wait_for_the_deadline(ranks: RankPool, ahead: int) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=11)
    switches = {3: layout_keys(pp=2), 6: layout_keys(pp=2), 9: layout_keys(pp=2)}
    hooks = (fail_inside_the_build,)
    run = run_switched(ranks, 2, argv, switches, hooks=hooks, ahead=ahead, timeout=300, limit=60)
    assert [record.outcome for record in run.switches] == ["refused", "refused", "committed"]
    assert all("[rank 1, phase prepare] ValueError: no optimizer" in str(r.error) for r in run.switches[:2])


def look_from_both_threads(run: PretrainRun) -> None:
    """Note in `extra` what the background thread and another one see of the layout, while a target is built."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import get_args

    from megatron_dynatrain.training.builder import ModelBuilder

    build, init = ModelBuilder.__call__, ModelBuilder.__init__
    seen = run.record.extra.setdefault("seen", {})
    launch: list[object] = []
    stranger = ThreadPoolExecutor(1)  # threads that the background thread starts see what it sees

    def look(name: str) -> None:
        args = get_args()
        with get_cuda_rng_tracker().fork():
            stream = get_cuda_rng_tracker()._current_state_name
        seen[name] = (
            (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.rank),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            dist.get_rank(),
            dist.group.WORLD is launch[0],
            stream,
        )

    def made(self: ModelBuilder, *args: Any) -> None:
        launch.append(dist.group.WORLD)
        stranger.submit(int).result()
        init(self, *args)

    def called(self: ModelBuilder, *args: Any) -> Any:
        look("background" if in_background() else "boundary")
        stranger.submit(look, "other").result()
        return build(self, *args)

    ModelBuilder.__init__, ModelBuilder.__call__ = made, called  # type: ignore[method-assign]


def test_only_the_background_thread_sees_the_other_layout(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=6)
    run = run_switched(ranks, 2, argv, {4: layout_keys(pp=2, ranks=[1, 0])}, hooks=(look_from_both_threads,))
    assert [record.outcome for record in run.switches] == ["committed"]
    for rank, record in enumerate(run.ranks):
        other = 1 - rank
        assert record.extra["seen"]["other"] == ((2, 1, rank), 2, 1, rank, True, "model-parallel-rng")
        assert record.extra["seen"]["background"] == ((1, 2, other), 1, 2, other, False, "default-rng")


def count_messages(run: PretrainRun) -> None:
    """Count the collectives, point-to-point messages and decisions of each step, in `extra["messages"]`."""
    import torch.distributed as dist

    from megatron_dynatrain.elastic.control import ControlPlane

    counts: list[int] = []
    collectives = "all_reduce broadcast all_gather_into_tensor reduce_scatter_tensor barrier all_to_all_single"
    others = "batch_isend_irecv all_gather_object broadcast_object_list reduce all_gather"
    for owner, names in ((dist, collectives), (dist, others), (ControlPlane, "decide gather")):
        for name in names.split():
            setattr(owner, name, _counted(getattr(owner, name), counts))
    found = run.record.extra.setdefault("messages", [])

    def step_begins(*_: Any) -> None:
        found.append(len(counts))

    run.before_step.append(step_begins)


def _counted(function: Any, counts: list[int]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        counts.append(1)
        return function(*args, **kwargs)

    return call


def test_steps_without_a_switch_send_nothing_more_than_without_the_plugin(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=8)
    plain = ranks.pretrain(2, argv, hooks=(count_messages,))
    plugged = run_switched(ranks, 2, argv, {7: layout_keys(pp=2)}, hooks=(count_messages,), ahead=1)
    for without, record in zip(plain, plugged.ranks, strict=True):
        stock, ours = (r.extra["messages"][:6] for r in (without, record))  # as the next step begins, it is prepared
        assert [after - before for before, after in pairwise(ours)] == [
            after - before for before, after in pairwise(stock)
        ]
        assert stock[5] > stock[4]


# --- without train() --------------------------------------------------------------------------------------------------


def drop_preparations(context: RankContext) -> dict[str, Any]:
    """Prepare, drop, prepare something else than what is switched to; return what was seen."""
    from megatron_dynatrain.elastic.groups import live_groups
    from megatron_dynatrain.errors import StateError
    from megatron_dynatrain.layout import ParallelLayout
    from tests.ranks.core_job import CoreJob, Sizes, local_digests

    pp2, dp2, tp2 = (ParallelLayout.for_world(context.world, **keys) for keys in ({"pp": 2}, {}, {"tp": 2}))
    job = CoreJob(Sizes(), tp2)
    switcher = job.switcher
    found: dict[str, Any] = {"losses": [job.step()]}
    groups, before = live_groups(), local_digests(switcher.world.chunks, switcher.world.optimizer)
    for number in range(3):
        switcher.prepare_ahead(pp2)
        if number == 1:
            switcher.preparing.join(60)
            with pytest.raises(StateError, match="already"):
                switcher.prepare_ahead(dp2)
        switcher.cancel_preparation()
        found[f"cancelled {number}"] = (
            live_groups() == groups,
            local_digests(switcher.world.chunks, switcher.world.optimizer) == before,
            [thread.name for thread in threading.enumerate() if thread.name == THREAD],
        )
    switcher.prepare_ahead(pp2)
    found["losses"].append(job.step())
    found["other"] = job.switch(dp2).outcome
    switcher.prepare_ahead(tp2)
    found["losses"].append(job.step())
    found["same"] = job.switch(tp2).outcome
    found["losses"].append(job.step())
    found["groups"] = (live_groups(), groups)
    return found


def test_a_preparation_can_be_dropped_at_any_moment_and_leaves_nothing(ranks: RankPool) -> None:
    for found in ranks.run(2, drop_preparations):
        for number in range(3):
            assert found[f"cancelled {number}"] == (True, True, [])
        assert (found["other"], found["same"]) == ("committed", "committed")
        assert found["groups"][0] <= found["groups"][1] + 1  # the launch's own groups are not the world's


def draw_while_built(context: RankContext) -> tuple[str, str]:
    """Build a target with a model that draws random numbers: beside training, then at the boundary."""
    import torch

    from megatron_dynatrain.errors import SwitchRefused
    from megatron_dynatrain.layout import ParallelLayout
    from tests.ranks.core_job import CoreJob, Sizes

    job = CoreJob(Sizes(), ParallelLayout.for_world(context.world))
    job.step()
    target, build = ParallelLayout.for_world(context.world, tp=2), job.switcher.build

    def drawing(layout: ParallelLayout) -> Any:
        from megatron_dynatrain.mcore.build import hollow_build

        with hollow_build():
            torch.rand(3)
        return build(layout)

    job.switcher.build = drawing
    job.switcher.prepare_ahead(target)
    with pytest.raises(SwitchRefused) as refused:
        job.switch(target)
    return str(refused.value), job.switch(target).outcome


def test_a_model_that_draws_random_numbers_while_it_is_built_is_refused_beside_training_only(ranks: RankPool) -> None:
    for error, outcome in ranks.run(2, draw_while_built):
        assert "torch.rand" in error
        assert "--dynamic-parallelism-prepare-ahead 0" in error
        assert outcome == "committed"


def unmarked_provider(run: PretrainRun) -> None:
    """Give the job a dataset provider without Megatron's mark, which draws from torch's stream; note where it ran."""
    import megatron.training.training as megatron_training
    import torch

    stock = megatron_training.build_train_valid_test_data_iterators
    threads = run.record.extra.setdefault("threads", [])

    def build(provider: Any) -> Any:
        inner = getattr(provider, "func", provider)

        def unmarked(samples: Any, vp_stage: int | None = None) -> Any:
            threads.append(threading.current_thread().name)
            torch.randperm(5)
            return inner(samples)

        return stock(unmarked)

    megatron_training.build_train_valid_test_data_iterators = build


def test_data_that_may_draw_from_the_streams_of_the_steps_wait_for_the_boundary(ranks: RankPool) -> None:
    argv = gpt_args(**_SMALL, train_iters=8)
    argv[argv.index("--hidden-dropout") + 1] = "0.1"
    runs = [
        run_switched(ranks, 2, argv, {5: layout_keys(pp=2)}, hooks=(unmarked_provider,), ahead=ahead)
        for ahead in (0, 3)
    ]
    assert [record.outcome for run in runs for record in run.switches] == ["committed"] * 2
    assert runs[0].steps == runs[1].steps
    for record in runs[1].ranks:
        assert set(record.extra["threads"]) == {"MainThread"}
