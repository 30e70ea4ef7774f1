"""Files of requests and of the status: whole or not there, in order, and read by anybody."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dynatrain import requests
from megatron_dynatrain.errors import StateError
from megatron_dynatrain.requests import (
    Heartbeat,
    JobStatus,
    LayoutRequest,
    Preparing,
    Reply,
    Spool,
    read_status,
    why_dead,
    write_status,
)


def status(**changes: Any) -> JobStatus:
    values: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "heartbeat": time.time(),
        "layout": "tp2 dp2",
        "ranks": (0, 1, 2, 3),
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "iteration": 7,
        "train_iters": 100,
    }
    return JobStatus(**{**values, **changes})


def test_neither_torch_nor_megatron_is_imported() -> None:
    code = "import sys, megatron_dynatrain.cli_live; print([n for n in ('torch', 'megatron') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_requests_arrive_in_the_order_of_their_files_and_are_taken_up_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    assert spool.arrivals() == []
    names = [spool.submit(LayoutRequest(to=to, by="me")) for to in ("a", "b", "c")]
    for number, name in enumerate(reversed(names)):
        os.utime(spool.folder / f"{name}.json", ns=(number, number))
    (spool.folder / ".draft.json").write_text("{}")
    assert spool.arrivals() == names[::-1]
    assert spool.claim(names[0]) == LayoutRequest(to="a", by="me")
    assert spool.arrivals() == [names[2], names[1]]
    assert not spool.withdraw(names[0])
    assert spool.withdraw(names[1])
    with pytest.raises(FileNotFoundError):
        spool.claim(names[1])
    assert spool.left_over() == [names[0], names[2]]


def test_the_last_answer_ends_a_request_and_old_answers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_KEPT_REPLIES", 2)
    spool = Spool(tmp_path)
    names = [spool.submit(LayoutRequest(to={"tp": 2})) for _ in range(4)]
    for name in names:
        spool.claim(name)
        preparing = Preparing(to="tp2", trigger=f"request {name}", phase="build", step=4)
        spool.answer(Reply(id=name, stage="preparing", preparing=preparing))
        spool.answer(Reply(id=name, stage="committed", iteration=3))
        os.utime(spool.folder / f"{name}.reply.json", ns=(names.index(name),) * 2)
    assert spool.left_over() == []
    kept = [name for name in names if spool.reply(name) is not None]
    assert kept == names[2:]
    assert spool.reply(names[3]) == Reply(id=names[3], stage="committed", iteration=3)


def test_a_status_is_read_as_it_was_written_and_no_draft_stays(tmp_path: Path) -> None:
    written = status(preparing=Preparing(to="pp2", trigger="request x", phase="groups", step=3))
    write_status(tmp_path / "new", written)
    assert read_status(tmp_path / "new") == written
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["status.json"]
    later = written.model_dump_json()[:-1] + ', "later": 1}'
    (tmp_path / "new" / "status.json").write_text(later)
    assert read_status(tmp_path / "new") == written


def test_no_job_and_a_broken_status_are_told(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no job there"):
        read_status(tmp_path)
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(StateError, match="can't be read"):
        read_status(tmp_path)


def test_a_job_is_dead_without_its_process_or_without_a_heartbeat() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert why_dead(status()) is None
    assert "is gone" in (why_dead(status(pid=gone.pid)) or "")
    assert why_dead(status(pid=gone.pid, host="elsewhere")) is None
    now = time.time()
    assert why_dead(status(host="elsewhere", heartbeat=now - 29), now) is None
    assert "31 s old" in (why_dead(status(host="elsewhere", heartbeat=now - 31), now) or "")
    assert "has ended, after iteration 7" in (why_dead(status(state="ended")) or "")


def test_the_heartbeat_writes_first_last_and_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "HEARTBEAT_S", 0.005)
    counted: list[int] = []
    told = threading.Event()

    def now() -> JobStatus:
        counted.append(len(counted))
        if len(counted) == 5:
            told.wait(20)  # the thread is held here until it is stopped
        return status(iteration=counted[-1])

    beat = Heartbeat(tmp_path, now, failed=pytest.fail)
    beat.start()
    assert read_status(tmp_path).iteration >= 0
    while len(counted) < 5:
        time.sleep(0.005)
    threading.Timer(0.05, told.set).start()
    beat.stop(10)
    assert read_status(tmp_path).iteration == counted[-1] == 5
    written = len(counted)
    time.sleep(0.02)
    assert len(counted) == written


def test_a_status_that_can_not_be_written_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "HEARTBEAT_S", 0.005)
    (tmp_path / "file").write_text("")
    told: list[Exception] = []
    beat = Heartbeat(tmp_path / "file", status, failed=told.append)
    beat.start()
    time.sleep(0.05)
    beat.stop(10)
    assert len(told) == 1
