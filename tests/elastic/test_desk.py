"""The desk: one request at a time, in order of arrival, each answered once and for all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dynatrain.elastic import desk as desk_module
from megatron_dynatrain.elastic.desk import Event, Order, RequestDesk
from megatron_dynatrain.errors import DeadlineError, ScheduleError
from megatron_dynatrain.requests import LayoutRequest, Preparing, Reply, Spool

_PATIENCE_S = 20


@dataclass(frozen=True)
class Layout:
    name: str

    def describe(self) -> str:
        return self.name


@dataclass(frozen=True)
class Switch:
    target: Layout


@dataclass
class Job:
    """A job that does at once what it is ordered to, and notes it."""

    layout: str = "first"
    way: str | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    drops: list[str] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    done: list[tuple[str, str]] = field(default_factory=list)
    desk: RequestDesk | None = None
    iteration: int = 0

    def read(self, _: str, request: LayoutRequest) -> str:
        if request.to == "unknown":
            raise ScheduleError("unknown layout 'unknown'", hint="did you mean 'known'?")
        return str(request.to)

    def check(self, asked: object) -> tuple[Switch, int]:
        if asked == self.layout:
            raise ScheduleError("already so")
        return Switch(Layout(str(asked))), 0

    def in_the_way(self) -> str | None:
        return self.way

    def preparing(self) -> Preparing | None:
        return Preparing(to="x", trigger="request", phase="build", step=4, done=self.ready.is_set())

    def propose(self, order: Order) -> int | None:
        assert self.desk is not None
        if self.ended:
            return None
        layout = order.switch.target.describe()
        self.done.append((order.kind, layout))
        self.iteration += 1
        if layout in self.fails and order.kind == "prepare":
            raise DeadlineError(self.fails[layout])
        what: Any = "begun" if order.kind == "prepare" else "committed"
        if self.drops and self.drops[0] == order.kind:
            self.drops.pop(0)
            what = "dropped"
        if what == "committed":
            self.layout = layout
        self.desk.events.put(Event(order.attempt, what, self.iteration))
        return self.iteration


@contextmanager
def serving(spool: Spool, job: Job) -> Iterator[RequestDesk]:
    desk = RequestDesk(spool, job, job)  # type: ignore[arg-type]
    job.desk = desk
    desk.refuse_left_over()
    thread = threading.Thread(target=desk.run, daemon=True)
    thread.start()
    try:
        yield desk
    finally:
        desk.stop()
        thread.join(_PATIENCE_S)
        assert not thread.is_alive()


def wait_for(ready: Callable[[], object]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.005)


def reply(spool: Spool, name: str, *stages: str) -> Reply:
    wait_for(lambda: (found := spool.reply(name)) is not None and found.stage in stages)
    found = spool.reply(name)
    assert found is not None
    return found


def ask(spool: Spool, to: str) -> str:
    name = spool.submit(LayoutRequest(to=to))
    number = len(list(spool.folder.iterdir()))
    path = spool.folder / f"{name}.json"
    if path.exists():  # ids of one second are in no order, times of arrival are
        os.utime(path, ns=(number, number))
    return name


def test_requests_are_served_one_at_a_time_in_order_of_arrival(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(desk_module, "_POLL_S", 0.02)
    spool, job = Spool(tmp_path), Job()
    with serving(spool, job) as desk:
        names = [ask(spool, "second")]
        reply(spool, names[0], "preparing")
        names += [ask(spool, "third"), ask(spool, "second")]
        waiting = [reply(spool, name, "accepted") for name in names[1:]]
        assert waiting[0].detail == f"waits for request {names[0]}"
        assert desk.stages() == {names[0]: "preparing", names[1]: "accepted", names[2]: "accepted"}
        job.ready.set()
        final = [reply(spool, name, "committed", "refused") for name in names]
    assert [(r.stage, r.to, r.iteration) for r in final] == [
        ("committed", "second", 2),
        ("committed", "third", 4),
        ("committed", "second", 6),
    ]
    layouts = ["second", "third", "second"]
    assert job.done == [(kind, layout) for layout in layouts for kind in ("prepare", "switch")]
    assert sorted(path.suffix for path in spool.folder.iterdir()) == [".json"] * 3  # the answers alone


def test_what_a_planned_switch_came_before_is_begun_again(tmp_path: Path) -> None:
    spool, job = Spool(tmp_path), Job(drops=["prepare", "switch"])
    job.ready.set()
    with serving(spool, job):
        found = reply(spool, ask(spool, "second"), "committed", "refused")
    assert found.stage == "committed"
    assert [kind for kind, _ in job.done] == ["prepare", "prepare", "switch", "prepare", "switch"]


def test_a_preparation_that_is_dropped_while_it_runs_is_begun_again(tmp_path: Path) -> None:
    spool, job = Spool(tmp_path), Job()
    with serving(spool, job) as desk:
        name = ask(spool, "second")
        reply(spool, name, "preparing")
        for _ in range(2):  # told twice, as at the boundary of an order that is void anyway
            desk.events.put(Event(1, "dropped", 5))
        wait_for(lambda: len(job.done) == 2)
        job.ready.set()
        assert reply(spool, name, "committed", "refused").stage == "committed"
    assert [kind for kind, _ in job.done] == ["prepare", "prepare", "switch"]


def test_a_request_waits_for_what_is_in_the_way(tmp_path: Path) -> None:
    spool, job = Spool(tmp_path), Job(way="the planned switch at_iteration: 5")
    job.ready.set()
    with serving(spool, job):
        name = ask(spool, "first")  # what the job trains under now, but perhaps not after the planned switch
        assert reply(spool, name, "accepted", "refused").detail == "waits for the planned switch at_iteration: 5"
        assert job.done == []
        job.layout, job.way = "planned", None
        assert reply(spool, name, "committed", "refused").stage == "committed"


def test_what_can_not_be_done_is_refused_at_once_and_the_next_request_is_served(tmp_path: Path) -> None:
    spool, job = Spool(tmp_path), Job(fails={"slow": "rank 1 does not answer"})
    job.ready.set()
    spool.folder.mkdir()
    with serving(spool, job):
        (spool.folder / "broken.json").write_text("{")
        (spool.folder / "odd.json").write_text('{"to": "second", "leave": [1]}')
        (spool.folder / "big.json").write_text('{"to": "' + "x" * 100_000 + '"}')
        (spool.folder / "a note.txt").write_text("not for the job")
        (spool.folder / "folder.json").mkdir()
        names = ["broken", "odd", "big", ask(spool, "unknown"), ask(spool, "first"), ask(spool, "slow")]
        errors = [reply(spool, name, "refused").error or "" for name in names]
        assert reply(spool, ask(spool, "second"), "committed", "refused").stage == "committed"
    words = ["not a request", "leave", "bytes", "did you mean 'known'?", "already so", "rank 1 does not answer"]
    assert [word for word, error in zip(words, errors, strict=True) if word not in error] == []
    assert (spool.folder / "a note.txt").exists()


def test_what_is_left_over_is_refused_before_the_job_takes_requests(tmp_path: Path) -> None:
    spool, job = Spool(tmp_path), Job()
    name, taken = ask(spool, "second"), ask(spool, "third")
    spool.claim(taken)  # by a job that died
    with serving(spool, job):
        errors = [reply(spool, left, "refused").error or "" for left in (name, taken)]
    assert all("left over" in error for error in errors)
    assert job.done == []
    assert spool.left_over() == []


def test_what_is_pending_when_the_training_ends_is_refused(tmp_path: Path) -> None:
    spool, job = Spool(tmp_path), Job()
    with serving(spool, job) as desk:
        names = [ask(spool, "second")]
        reply(spool, names[0], "preparing")
        names.append(ask(spool, "third"))
        reply(spool, names[1], "accepted")
        desk.stop()
        names.append(ask(spool, "fourth"))
        found = [reply(spool, name, "refused") for name in names]
    assert [r.error for r in found] == ["the training ended before the switch"] * 3


def test_a_switch_that_was_committed_last_is_answered_so(tmp_path: Path) -> None:
    spool, job = Spool(tmp_path), Job()
    job.ready.set()
    with serving(spool, job) as desk:
        stop, put = desk.stop, desk.events.put

        class Ending:
            """The training thread: it tells what it did, then ends."""

            def put(self, event: Event) -> None:
                put(event)
                if event.what == "committed":
                    stop()

            get = desk.events.get

        desk.events = Ending()  # type: ignore[assignment]
        assert reply(spool, ask(spool, "second"), "committed", "refused").stage == "committed"


def test_an_error_that_nobody_foresaw_refuses_the_request(tmp_path: Path) -> None:
    class Broken(Job):
        def check(self, _: object) -> tuple[Switch, int]:
            raise KeyError("a fault")

    spool = Spool(tmp_path)
    with serving(spool, Broken()):
        for _ in range(2):
            assert "KeyError: 'a fault'" in (reply(spool, ask(spool, "second"), "refused").error or "")


def test_what_is_prepared_for_a_request_that_fails_is_dropped(tmp_path: Path) -> None:
    class Late(Job):
        def propose(self, order: Order) -> int | None:
            if order.kind == "switch":
                raise DeadlineError("rank 1 does not answer")
            return super().propose(order)

    spool, job = Spool(tmp_path), Late()
    job.ready.set()
    with serving(spool, job):
        assert "rank 1" in (reply(spool, ask(spool, "second"), "refused").error or "")
        wait_for(lambda: [kind for kind, _ in job.done] == ["prepare", "drop"])
