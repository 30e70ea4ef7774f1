"""`dynatrain request` and `dynatrain status`: what is asked, what is shown, exit codes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_dynatrain.cli import app
from megatron_dynatrain.cli_live import read_layout
from megatron_dynatrain.records import SwitchRecord, append_record
from megatron_dynatrain.requests import LayoutRequest, Preparing, Reply, Spool, write_status
from tests.pure.test_requests import status

_PATIENCE_S = 20
PREPARING = Preparing(to="pp2 dp2", trigger="request r", phase="build", step=4)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@contextmanager
def job(directory: Path, *replies: dict[str, Any]) -> Iterator[list[LayoutRequest]]:
    """A job that gives these answers to the first request, one after the other, and keeps what was asked."""
    write_status(directory, status())
    spool = Spool(directory)
    asked: list[LayoutRequest] = []

    def answer() -> None:
        end = time.monotonic() + _PATIENCE_S
        while not (names := spool.arrivals()):
            assert time.monotonic() < end
            time.sleep(0.005)
        asked.append(spool.claim(names[0]))
        for fields in replies:
            spool.answer(Reply(id=names[0], **fields))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield asked
    thread.join(_PATIENCE_S)


COMMITTED = {"stage": "committed", "to": "pp2 dp2", "iteration": 12}


def test_wait_returns_when_the_switch_is_committed(tmp_path: Path) -> None:
    stages = [{"stage": "accepted"}, {"stage": "preparing", "preparing": PREPARING}, {"stage": "switching"}, COMMITTED]
    with job(tmp_path, *stages) as asked:
        result = run("request", "--dir", tmp_path, "--to", "tp=1,pp=2,vpp=null", "--wait")
    assert result.exit_code == 0
    assert "committed: pp2 dp2 since the boundary after iteration 12" in result.stdout
    assert asked[0].to == {"tp": 1, "pp": 2, "vpp": None}
    assert "@" in asked[0].by


def test_without_wait_it_returns_once_accepted(tmp_path: Path) -> None:
    with job(tmp_path, {"stage": "accepted", "detail": "waits for the planned switch at_iteration: 5"}) as asked:
        result = run("request", "--dir", tmp_path, "--to", "deep")
    assert result.exit_code == 0
    assert "accepted, waits for the planned switch at_iteration: 5: request 2" in result.stdout
    assert asked[0].to == "deep"


@pytest.mark.parametrize("wait", [[], ["--wait"]])
@pytest.mark.parametrize("stage", ["refused", "aborted"])
def test_what_did_not_happen_is_said_with_its_reason(tmp_path: Path, stage: str, wait: list[str]) -> None:
    with job(tmp_path, {"stage": stage, "error": "unknown layout 'dep'"}):
        result = run("request", "--dir", tmp_path, "--to", "dep", *wait)
    assert result.exit_code == 1
    assert f"is {stage}\nunknown layout 'dep'" in result.stderr
    assert result.stdout == ""


def test_json_is_one_object(tmp_path: Path) -> None:
    with job(tmp_path, {"stage": "accepted"}, COMMITTED):
        result = run("request", "--dir", tmp_path, "--to", "deep", "--wait", "--json")
    data = json.loads(result.stdout)
    assert (data["ok"], data["reply"]["stage"], data["reply"]["iteration"]) == (True, "committed", 12)
    with job(tmp_path, {"stage": "refused", "error": "no"}):
        result = run("request", "--dir", tmp_path, "--to", "deep", "--json")
    assert result.exit_code == 1
    assert (json.loads(result.stdout)["ok"], json.loads(result.stdout)["error"]) == (False, "no")


def test_a_request_that_nobody_takes_up_is_taken_back(tmp_path: Path) -> None:
    write_status(tmp_path, status())
    result = run("request", "--dir", tmp_path, "--to", "deep", "--timeout", 0.2)
    assert result.exit_code == 1
    assert "did not take the request up in 0.2 s: it is taken back" in result.stderr
    assert Spool(tmp_path).left_over() == []


def test_a_request_that_the_job_goes_on_with_is_said_to(tmp_path: Path) -> None:
    with job(tmp_path, {"stage": "preparing", "preparing": PREPARING}):
        result = run("request", "--dir", tmp_path, "--to", "deep", "--wait", "--timeout", 1)
    assert result.exit_code == 1
    assert "the job goes on with the request" in result.stderr
    assert "preparing" in result.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"state": "ended"}, "the training has ended, after iteration 7"), ({"heartbeat": 1.0}, "last sign of life")],
)
def test_nothing_is_asked_of_a_dead_job(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_status(tmp_path, status(**changes))
    result = run("request", "--dir", tmp_path, "--to", "deep")
    assert result.exit_code == 1
    assert words in result.stderr
    assert not (tmp_path / "requests").exists()


def test_a_job_that_dies_while_somebody_waits_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dynatrain.cli_live._LOOK_AT_JOB_S", 0.1)
    write_status(tmp_path, status())
    killed = threading.Timer(0.2, lambda: write_status(tmp_path, status(heartbeat=1.0)))
    killed.start()
    result = run("request", "--dir", tmp_path, "--to", "deep", "--timeout", _PATIENCE_S)
    assert result.exit_code == 1
    assert "last sign of life" in result.stderr
    assert Spool(tmp_path).left_over() == []


@pytest.mark.parametrize("text", ["", "tp=2,pp", "{tp: ", "{1: 2}", "tp=[1", "{}"])
def test_what_is_no_layout_is_wrong_usage(tmp_path: Path, text: str) -> None:
    assert run("request", "--dir", tmp_path, "--to", text).exit_code == 2


def test_a_layout_is_a_name_or_keys() -> None:
    assert read_layout(" deep ") == "deep"
    assert read_layout("tp=2, sequence_parallel=true") == {"tp": 2, "sequence_parallel": True}
    assert read_layout("{tp: 1, ranks: [1, 0]}") == {"tp": 1, "ranks": [1, 0]}


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_of_a_running_job(tmp_path: Path) -> None:
    write_status(
        tmp_path, status(preparing=PREPARING, requests={"r": "preparing"}, next_planned="at_iteration: 9 -> x")
    )
    append_record(
        tmp_path,
        SwitchRecord(iteration=3, source="dp4", target="tp2 dp2", trigger="request q", outcome="committed"),
    )
    result = run("status", "--dir", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:3] == [
        "layout     tp2 dp2, micro batch 1, global batch 8",
        "ranks      0 1 2 3",
        "iteration  7 of 100",
    ]
    for words in (
        "preparing  pp2 dp2 for request r: build (4 of 6)",
        "planned    at_iteration: 9 -> x",
        "request    r: preparing",
        "switch at iteration 3: dp4 -> tp2 dp2 committed",
    ):
        assert words in result.stdout
    data = json.loads(run("status", "--dir", tmp_path, "--json").stdout)
    assert (data["ok"], data["status"]["preparing"]["phase"], data["switches"][0]["to"]) == (True, "build", "tp2 dp2")


def test_status_of_a_dead_job_and_of_none(tmp_path: Path) -> None:
    result = run("status", "--dir", tmp_path)
    assert result.exit_code == 1
    assert "no job there" in result.stderr
    write_status(tmp_path, status(heartbeat=1.0))
    result = run("status", "--dir", tmp_path)
    assert result.exit_code == 1
    assert "this job runs no more\nthe job is dead or stopped" in result.stderr
    assert "iteration  7 of 100" in result.stdout
    data = json.loads(run("status", "--dir", tmp_path, "--json").stdout)
    assert (data["ok"], data["status"]["iteration"]) == (False, 7)
    assert "last sign of life" in data["error"]
