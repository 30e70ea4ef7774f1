"""The demo's verdict: it fails for every reason it should fail for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from demo_report import (
    Comparison,
    Losses,
    ReportError,
    compare,
    failures,
    plot,
    read_losses,
    read_switches,
    report,
)

GOOD = {
    "iteration": 20,
    "from": "tp2 dp2",
    "to": "pp2 dp2",
    "outcome": "committed",
    "error": None,
    "verify": "digest",
    "moved_bytes": 1000,
    "minimum_bytes": 1000,
}
SAME = {"training": Comparison(1e-7, 3, 100)}


def series(*values: float) -> dict[tuple[int, int], float]:
    return {(iteration, 0): value for iteration, value in enumerate(values, start=1)}


def write_events(folder: Path, values: list[tuple[str, int, float]]) -> None:
    writer = EventFileWriter(str(folder))
    for tag, step, value in values:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(step=step, wall_time=step, summary=summary))
    writer.close()


def test_good_switches_have_no_failures() -> None:
    assert failures([GOOD, GOOD], 2, SAME) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"outcome": "refused", "error": "heads"}, "was refused: heads"),
        ({"outcome": "aborted"}, "was aborted"),
        ({"error": "late"}, "has an error: late"),
        ({"verify": "off"}, "was not checked: verify is 'off'"),
        ({"verify": None}, "was not checked"),
        ({"moved_bytes": 1001}, "moved 1001 bytes, the minimum is 1000"),
        ({"moved_bytes": None, "minimum_bytes": None}, "moved None bytes"),
    ],
)
def test_a_bad_switch_is_named(change: dict[str, Any], reason: str) -> None:
    found = failures([GOOD, {**GOOD, "iteration": 40, **change}], 2, SAME)
    assert any(reason in line for line in found)
    assert all("iteration 40" in line for line in found)


def test_a_missing_switch_is_a_failure() -> None:
    assert failures([GOOD], 2, SAME) == ["the schedule has 2 switches, 1 were recorded"]


@pytest.mark.parametrize(("worst", "count"), [(1e-5, 0), (1.01e-5, 1), (math.inf, 1), (math.nan, 1)])
def test_curves_that_part_are_a_failure(worst: float, count: int) -> None:
    assert len(failures([], 0, {"training": Comparison(worst, 7, 10)})) == count


def test_compare_names_the_worst_iteration() -> None:
    assert compare(series(2.0, 4.0, 8.0), series(2.0, 5.0, 8.0)) == Comparison(0.2, 2, 3)


def test_compare_takes_a_loss_that_is_no_number_as_worst() -> None:
    found = compare(series(2.0, math.nan), series(2.0, math.nan))
    assert (found.worst, found.iteration) == (math.inf, 2)


@pytest.mark.parametrize(("one", "other"), [(series(1.0, 2.0), series(1.0)), (series(), series())])
def test_compare_needs_the_same_iterations(
    one: dict[tuple[int, int], float], other: dict[tuple[int, int], float]
) -> None:
    with pytest.raises(ReportError, match=f"{len(one)} and {len(other)}"):
        compare(one, other)


def test_losses_are_read_exactly_and_from_all_files(tmp_path: Path) -> None:
    value = float(np.float32(3.1032032966613770))
    write_events(tmp_path, [("lm loss", 1, value), ("lm loss validation", 1, 1.5), ("lm loss validation", 1, 1.25)])
    writer = EventFileWriter(str(tmp_path), filename_suffix=".second")
    writer.add_event(Event(step=2, summary=Summary(value=[Summary.Value(tag="lm loss", simple_value=0.5)])))
    writer.close()
    losses = read_losses(tmp_path)
    assert losses.train == {(1, 0): value, (2, 0): 0.5}
    assert losses.validation == {(1, 0): 1.5, (1, 1): 1.25}


def test_an_iteration_trained_twice_is_an_error(tmp_path: Path) -> None:
    write_events(tmp_path, [("lm loss", 1, 1.0), ("lm loss", 2, 2.0), ("lm loss", 2, 2.0)])
    with pytest.raises(ReportError, match=r"more than once at iterations \[2\]"):
        read_losses(tmp_path)


def test_a_run_without_losses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no scalar 'lm loss'"):
        read_losses(tmp_path)


def test_an_unfinished_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "switches.jsonl"
    assert read_switches(path) == []
    path.write_text(json.dumps(GOOD) + "\n" + '{"iteration": 4')
    assert read_switches(path) == [GOOD]


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    losses = Losses(series(3.0, 2.0, 1.0), {(2, 0): 2.5, (2, 1): 2.4})
    plot(losses, losses, [{**GOOD, "iteration": 2}], tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("outcome", "code", "word"), [("committed", 0, "OK"), ("aborted", 1, "FAILED")])
def test_the_verdict_follows_the_records(tmp_path: Path, outcome: str, code: int, word: str) -> None:
    for side in ("switched", "unchanged"):
        values = [("lm loss", 1, 3.0), ("lm loss", 2, 2.0), ("lm loss validation", 2, 2.5)]
        write_events(tmp_path / side / "tensorboard", values)
    (tmp_path / "switched" / "dynatrain").mkdir()
    record = {**GOOD, "iteration": 1, "outcome": outcome}
    (tmp_path / "switched" / "dynatrain" / "switches.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "schedule.yaml").write_text("switches: [{at_iteration: 1, to: {pp: 2}}]\n")
    console = Console(record=True, width=200)
    assert report(tmp_path, tmp_path / "schedule.yaml", console) == code
    assert word in console.export_text()
    assert (tmp_path / "losses.png").is_file()
