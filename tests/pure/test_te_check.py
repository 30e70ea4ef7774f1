"""docs/te_check.md is the result of a whole run of `make te-check` in which everything was as it must be."""

from __future__ import annotations

from pathlib import Path

from tests.te.cases import CASES
from tests.te.faults import faults
from tests.te.report import Result, render
from tests.te.runs import RUNS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "te_check.md"


def _rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its head."""
    lines = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def test_every_switch_of_the_table_was_run_and_kept_every_bit() -> None:
    rows = _rows(DOCUMENT.read_text(encoding="utf-8"), "Switches")
    planned = _rows(render([Result(case, 0, (), "") for case in CASES], [], [], _STAMP), "Switches")
    assert [row[:5] for row in rows] == [row[:5] for row in planned]
    assert {row[6] for row in rows} == {"equal"}
    assert min(int(row[5]) for row in rows) > 10_000


def test_every_run_of_pretrain_kept_every_bit() -> None:
    rows = _rows(DOCUMENT.read_text(encoding="utf-8"), "Inside `pretrain()`")
    assert [row[0].partition(", `")[0] for row in rows] == [run.words for run in RUNS]
    assert {row[2] for row in rows} == {"equal"}


def test_every_fault_was_seen_by_the_plugin_and_by_the_witness() -> None:
    rows = _rows(DOCUMENT.read_text(encoding="utf-8"), "Faults")
    assert [row[0] for row in rows[:-1]] == [fault.words for fault in faults()]
    assert "_extra_state" in rows[-1][2]
    assert not [row for row in rows if "not seen" in row]


_STAMP = {"date": "", "commit": "", "dirty": "", "versions": ""}
