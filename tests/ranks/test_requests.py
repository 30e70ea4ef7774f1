"""Requests to a running job: prepared and done like a planned switch, or refused, and the job is unharmed."""

from __future__ import annotations

import functools
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dynatrain.requests import read_status, why_dead
from tests.ranks.asking import Ask, run_asked, wait_for
from tests.ranks.dynamic import dynamic_flags, layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

_SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "seq": 32, "global_batch": 4}


def look(run: PretrainRun) -> None:
    """Note in `extra` the plugin's threads, the groups, the store's keys and the open files, before each step."""
    from torch.distributed import distributed_c10d

    from megatron_dynatrain.elastic.groups import live_groups
    from megatron_dynatrain.training.loop import Segments

    seen = run.record.extra.setdefault("seen", [])

    def names() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("dynatrain"))

    def counts(*_: Any) -> None:
        keys = distributed_c10d._get_default_store().num_keys()
        seen.append((names(), live_groups(), keys, len(list(Path("/proc/self/fd").iterdir()))))

    run.before_step.append(counts)
    stock = Segments.train

    def train(self: Segments, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(self, *args, **kwargs)
        finally:
            run.record.extra["after"] = names()

    Segments.train = train  # type: ignore[method-assign]


def test_a_request_is_done_as_a_planned_switch_at_the_same_iteration_bit_for_bit(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=30)
    asked = run_asked(ranks, 2, argv, [Ask(2, layout_keys(pp=2))], hooks=(look,))
    (reply,), (record,) = asked.replies, asked.switches
    assert (reply.stage, reply.error, reply.to) == ("committed", None, "pp2")
    assert (record.outcome, record.trigger) == ("committed", f"request {reply.id}")
    assert record.iteration == reply.iteration
    assert record.ahead_s is not None
    assert record.ahead_s > 0
    planned = run_switched(ranks, 2, argv, {record.iteration: layout_keys(pp=2)})
    assert asked.steps == planned.steps
    for rank, found in enumerate(asked.ranks):
        listening = ["dynatrain-requests", *(["dynatrain-status"] if rank == 0 else [])]
        assert found.extra["seen"][0][0] == listening
        assert found.extra["after"] == []
    status = read_status(asked.directory)
    assert (status.state, status.layout, status.iteration) == ("ended", "pp2", 30)
    assert "ended" in (why_dead(status) or "")


def test_what_does_not_fit_is_refused_and_the_job_is_unharmed(ranks: RankPool) -> None:
    asks = [
        Ask(1, "dep"),
        Ask(1, {"tpp": 1}),
        Ask(2, {"tp": 8}),
        Ask(2, {"pp": 2, "tp": 1, "vpp": 3}),
        Ask(3, {"micro_batch_size": 3}),
        Ask(3, {"tp": 2}),
    ]
    argv = gpt_args(tp=2, **_SMALL, train_iters=5)
    flags = dynamic_flags(ranks.scratch("schedule"), {100: layout_keys()})
    schedule = Path(flags[2])
    schedule.write_text("{version: 1, layouts: {deep: {tp: 1, pp: 2}}, switches: [{at_iteration: 4, to: deep}]}")
    run = run_asked(ranks, 2, argv, asks, flags=[*flags[1:3], "--dynamic-parallelism-prepare-ahead", "0"])
    words = ["'deep'", "'tp'", "doesn't divide the world size 2", "vpp", "multiple of micro batch 3", "already so"]
    assert [reply.stage for reply in run.replies] == ["refused"] * len(asks)
    assert [word for word, reply in zip(words, run.replies, strict=True) if word not in (reply.error or "")] == []
    assert [record.trigger for record in run.switches] == ["at_iteration: 4"]
    assert run.steps == run_switched(ranks, 2, argv, {4: layout_keys(pp=2)}, ahead=0).steps


def test_requests_at_once_are_served_in_order_and_leave_nothing(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=120)
    there, back = layout_keys(pp=2), {"tp": 2, "pp": 1, "global_batch_size": 8}
    asks = [Ask(2, there), Ask(2, back), Ask(2, {"tp": 5}), Ask(2, there), Ask(2, back)]
    run = run_asked(ranks, 2, argv, asks, hooks=(look,))
    names = [name for number, name in enumerate(run.names) if number != 2]
    assert [(record.target, record.trigger, record.outcome) for record in run.switches] == [
        (layout, f"request {name}", "committed") for name, layout in zip(names, ["pp2", "tp2"] * 2, strict=True)
    ]
    assert [reply.stage for reply in run.replies] == ["committed", "committed", "refused", "committed", "committed"]
    samples = [after.consumed_samples - before.consumed_samples for before, after in pairwise(run.steps)]
    _, second, _, last = (record.iteration for record in run.switches)
    assert samples == [4] * second + [8] * (len(samples) - second)
    for record in run.ranks:
        counts = [seen[1:] for seen in record.extra["seen"]]
        then, now = (
            [min(column) for column in zip(*part, strict=True)] for part in (counts[second:][:5], counts[last:])
        )
        assert [name for name, a, b in zip(("groups", "keys", "files"), then, now, strict=True) if b > a] == []


def test_a_planned_switch_goes_first_and_the_later_ones_go_on_as_written(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=40)
    flags = dynamic_flags(ranks.scratch("schedule"), {8: layout_keys(), 36: layout_keys(tp=2)}, ahead=6)
    run = run_asked(ranks, 2, argv, [Ask(4, layout_keys(pp=2))], flags=[*flags[1:3], *flags[-2:]])
    assert [(record.target, record.outcome) for record in run.switches] == [
        ("dp2", "committed"),
        ("pp2", "committed"),
        ("tp2", "committed"),
    ]
    triggers = [record.trigger for record in run.switches]
    assert triggers == ["at_iteration: 8", f"request {run.names[0]}", "at_iteration: 36"]
    assert run.switches[0].ahead_s
    assert [reply.stage for reply in run.replies] == ["committed"]


def hold_preparation(run: PretrainRun, *, until: int) -> None:
    """Let what is prepared for a request get nowhere before an iteration."""
    from megatron.training import get_args

    from megatron_dynatrain.switch import Switcher

    stock, own = Switcher.prepare_ahead, Switcher.__init__
    builds = run.record.extra.setdefault("builds", [])

    def prepare_ahead(self: Switcher, layout: Any, **kwargs: Any) -> None:
        step = get_args().curr_iteration
        builds.append(step)

        def held(target: Any) -> Any:
            if threading.current_thread().name == "dynatrain-prepare" and step < until:
                wait_for(lambda: self.preparing is None)  # it is being dropped
            return self.stock_build(target)

        self.build = held
        stock(self, layout, **kwargs)

    def init(self: Switcher, **kwargs: Any) -> None:
        self.stock_build = kwargs["build"]
        own(self, **kwargs)

    Switcher.__init__, Switcher.prepare_ahead = init, prepare_ahead  # type: ignore[method-assign]


def test_what_is_prepared_for_a_request_is_dropped_for_a_planned_switch_and_begun_again(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=60)
    flags = dynamic_flags(ranks.scratch("schedule"), {25: layout_keys()}, ahead=0)
    hooks = (functools.partial(hold_preparation, until=24),)
    asks, flags = [Ask(1, layout_keys(pp=2))], [*flags[1:3], *flags[-2:]]
    run = run_asked(ranks, 2, argv, asks, flags=flags, hooks=hooks, hold_from=25)
    first, second = run.ranks[0].extra["builds"]
    assert first < 24 <= second
    assert run.ranks[1].extra["builds"] == [first, second]
    assert [(record.target, record.outcome) for record in run.switches] == [("dp2", "committed"), ("pp2", "committed")]
    assert run.switches[0].iteration == 25
    assert run.switches[0].ahead_s == 0
    assert [reply.stage for reply in run.replies] == ["committed"]


def fail_preparation(run: PretrainRun) -> None:
    """Raise in the background on rank 1."""
    from megatron_dynatrain.training.builder import ModelBuilder

    stock = ModelBuilder.__call__

    def build(self: ModelBuilder, layout: Any) -> Any:
        if run.context.rank == 1 and threading.current_thread().name == "dynatrain-prepare":
            raise ValueError("no such model")
        return stock(self, layout)

    ModelBuilder.__call__ = build  # type: ignore[method-assign]


def test_a_preparation_that_fails_is_answered_with_its_error_and_the_job_goes_on(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=25)
    run = run_asked(ranks, 2, argv, [Ask(1, layout_keys(pp=2))], hooks=(fail_preparation,), timeout=4)
    (reply,) = run.replies
    assert reply.stage == "refused"
    assert "no such model" in (reply.error or "")
    assert "rank 1" in (reply.error or "")
    assert [record.outcome for record in run.switches] == ["refused"]
    assert run.steps == run_asked(ranks, 2, argv, []).steps


def test_a_request_that_is_pending_when_the_training_ends_is_refused(ranks: RankPool) -> None:
    argv = gpt_args(tp=2, **_SMALL, train_iters=6)
    asks = [Ask(1, layout_keys(pp=2)), Ask(4, layout_keys())]
    hooks = (functools.partial(hold_preparation, until=100), look)
    run = run_asked(ranks, 2, argv, asks, hooks=hooks, hold_from=100)
    assert [reply.error for reply in run.replies] == ["the training ended before the switch"] * 2
    assert run.switches == ()
    assert [record.extra["after"] for record in run.ranks] == [[], []]
