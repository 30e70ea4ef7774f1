"""The table covers what it promises, every row has a result, and the document is what the results say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.oracle import results, supported
from tests.oracle.chain import SPLIT_AXES, Row, at, axes_of, layout_of
from tests.oracle.table import CHAINS, ROWS


def row_of(name: str) -> Row:
    (row,) = (row for row in ROWS if row.id == name)
    return row


def test_the_table_is_as_long_as_promised() -> None:
    assert len(ROWS) >= 60
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert len({json.dumps(results.identity(row)) for row in ROWS}) == len(ROWS)  # no pair twice
    assert {row.chain.world for row in ROWS} == {2, 3, 4, 6, 8}
    assert {row.chain.model.dtype for row in ROWS} == {"fp32", "bf16", "fp16"}
    assert all(row.source != row.target for row in ROWS)
    assert all(set(chain.ci) <= set(range(len(chain.rows))) for chain in CHAINS)
    assert {row.oracle for row in ROWS if not row.soak} == {"checkpoint", "gather"}


def is_more(axis: str, row: Row) -> bool:
    """Whether the axis is used more after the switch than before; a way of splitting, an order: whether it is used."""
    before, after = (axes_of(layout, moe=True)[axis] for layout in (row.source, row.target))
    if isinstance(before, int):
        return bool(after > before)
    return after not in ("", (), (0, 0), (False, False))


@pytest.mark.parametrize("axis", list(axes_of(ROWS[0].source, moe=True)))
def test_each_axis_is_changed_alone_in_both_directions_and_with_others(axis: str) -> None:
    changed = [row for row in ROWS if axis in row.changed]
    alone = [row for row in changed if row.changed == (axis,)]
    assert {is_more(axis, row) for row in alone} >= ({True} if axis in SPLIT_AXES[1:2] else {True, False})
    assert len(changed) > len(alone)


def test_every_size_of_three_is_there() -> None:
    layouts = [layout for row in ROWS for layout in (row.source, row.target)]
    for name in ("tp", "cp", "dp", "pp", "ep", "etp", "instances"):
        assert any(getattr(layout, name) == 3 for layout in layouts), name


def test_changed_axes_are_named() -> None:
    assert row_of("2-sizes-2").changed == ("sp",)
    assert row_of("4-moe-fp32-6").changed == ("etp",)
    assert row_of("4-places-8").changed == ("tp", "pp", "vpp", "order", "ranks")
    with pytest.raises(KeyError, match="no keys of a layout"):
        at(dp=2)
    assert layout_of(at(tp=2, sp=True), 4).describe() == "tp2 dp2 sp"


def test_every_row_has_a_result_of_its_own() -> None:
    found = results.read()
    assert [row.id for row in ROWS if row.id not in found] == [], "run: make supported"
    assert sorted(found.keys() - {row.id for row in ROWS}) == [], "results of rows that are no more"
    for row in ROWS:
        result = found[row.id]
        assert {name: result[name] for name in results.identity(row)} == results.identity(row)
        assert result["result"] == "equal"
        assert result["states"] > 30
        assert result["date"]
        assert result["commit"]


def test_the_document_is_what_the_results_say() -> None:
    assert supported.DOCUMENT.read_text(encoding="utf-8") == supported.render(), "run: python -m tests.oracle.supported"


def test_a_result_is_written_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "FILE", tmp_path / "results.json")
    monkeypatch.setattr(results, "_commit", lambda: "0123456789")
    monkeypatch.delenv(results.WRITE, raising=False)
    row = row_of("4-moe-fp32-1")
    results.write(row, states=66, moved_bytes=5)
    assert results.read() == {}
    monkeypatch.setenv(results.WRITE, "1")
    results.write(row, states=66, moved_bytes=5)
    (line,) = (line for line in supported.render().splitlines() if "0123456789" in line)
    assert line.startswith("| `dp4` | `ep2 dp4` | moe-fp32 | gather | equal | 66 | 5 | ")
    assert "1 pairs of layouts on 4 ranks" in supported.summary_table()
    assert "0 with Megatron's own checkpoint" in supported.summary_table()
    assert dataclasses.asdict(row)["number"] == 0
