"""Write `docs/supported.md` from the results of the table: `python -m tests.oracle.supported`.

The README's summary of it is written by `python scripts/write_tables.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.oracle import results
from tests.oracle.chain import Row, axes_of
from tests.oracle.models import MODELS
from tests.oracle.table import ROWS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "supported.md"

_HEAD = """\
# Pairs of layouts

Written by `python -m tests.oracle.supported` from the results that the tests in `tests/oracle` left; not by hand.
{count} pairs. `make test` switches {ci} of them and compares the state; `make soak` and `make supported` do the others
and the starts anew.

Each row is one switch inside a run, from the first layout to the second. What was checked, each in all bits:

- The whole state (parameters, main parameters, both moments, router biases, step), gathered right before and right
  after the switch by code that shares nothing with the plugin; every replica of it is the same.
- Fresh processes, launched without the plugin under the second layout, start from the state before the switch and train
  on. What they loaded, their losses, gradient norms, learning rates and steps, and their whole state two iterations
  later are those of the run that switched.

The column "start" says what they start from: Megatron's own `fully_reshardable` checkpoint, saved under the first
layout right before the switch, or the gathered state where Megatron 0.19 can't load that checkpoint under the second
layout: experts that get an optimizer of their own (ep 1 to ep > 1, or an etp that becomes another than tp).

`dp` is what the other sizes leave of the ranks. Nothing is written where an axis is at its default.
"""
_AXES = """
## By axis

In fp32 every loss of the run is, too, that of a training that never leaves its first layout, within 1e-6.

"""


def summary_table() -> str:
    """Return how many pairs change each axis, for the README, from the rows that have a result."""
    found = results.read()
    rows = [row for row in ROWS if row.id in found]
    loaded = sum(row.oracle == "checkpoint" for row in rows)
    last = max((found[row.id]["date"] for row in rows), default="never")
    worlds = _listed(sorted({row.chain.world for row in rows}))
    text = (
        f"{len(rows)} pairs of layouts on {worlds} ranks were switched and compared in all bits, the last on {last}:\n"
        f"{loaded} with Megatron's own checkpoint, saved under the first layout and loaded under the second, and\n"
        f"{len(rows) - loaded} with the gathered state, where Megatron can't load that. [docs/supported.md]"
        "(docs/supported.md) has every pair.\n\n"
    )
    return f"{text}{_axes_table(rows)}\n{_models_table(rows)}"


def render() -> str:
    """Return the document."""
    found = results.read()
    rows = [row for row in ROWS if row.id in found]
    parts = [
        _HEAD.format(count=len(rows), ci=sum(not row.chain.soak for row in rows)),
        _AXES,
        _axes_table(rows),
        "\n## Models\n\n",
        _models_table(rows),
    ]
    for world in sorted({row.chain.world for row in rows}):
        parts += [f"\n## {world} ranks\n\n", _rows_table([row for row in rows if row.chain.world == world], found)]
    return "".join(parts)


def _axes_table(rows: Sequence[Row]) -> str:
    def line(axis: str) -> tuple[object, ...]:
        changed = [row for row in rows if axis in row.changed]
        alone = sum(row.changed == (axis,) for row in changed)
        models = sorted({row.chain.model_name for row in changed})
        return axis, alone, len(changed) - alone, _worlds(changed), ", ".join(models)

    axes = axes_of(ROWS[0].source, moe=True)
    return _table(("changed", "alone", "with others", "ranks", "models"), map(line, axes))


def _models_table(rows: Sequence[Row]) -> str:
    pairs = Counter(row.chain.model_name for row in rows)
    lines = ((name, model.dtype, model.words, pairs[name]) for name, model in MODELS.items() if pairs[name])
    return _table(("model", "parameters", "what", "pairs"), lines)


def _rows_table(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> str:
    head = ("from", "to", "model", "start", "result", "states", "bytes moved", "date", "commit")
    names = ("from", "to", "model", "oracle", "result", "states", "moved_bytes", "date", "commit")
    lines = [[found[row.id][name] for name in names] for row in rows]
    return _table(head, [(f"`{source}`", f"`{target}`", *rest) for source, target, *rest in lines])


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = [f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in (head, *lines)]
    rows.insert(1, "|" + "---|" * len(head))
    return "\n".join(rows) + "\n"


def _worlds(rows: Sequence[Row]) -> str:
    return ", ".join(map(str, sorted({row.chain.world for row in rows})))


def _listed(values: Sequence[object]) -> str:
    words = [str(value) for value in values]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "no"


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
