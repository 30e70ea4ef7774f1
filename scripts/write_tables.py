"""Write the tables of the README that come from code: `python scripts/write_tables.py`; a test says when it is time."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the results of the table of pairs belong to the tests, which are not installed

from megatron_dynatrain.training.refusals import refusals_table  # noqa: E402
from tests.oracle.supported import summary_table  # noqa: E402

README = ROOT / "README.md"
BLOCK = "<!-- {0}: written by scripts/write_tables.py -->\n{1}<!-- end of {0} -->\n"


def with_tables(text: str) -> str:
    """Return the text of the README with its tables as the code has them.

    Raises:
        ValueError: The place of a table is missing.
    """
    for name, table in {"refused options": refusals_table(), "pairs of layouts": summary_table()}.items():
        begin, end = BLOCK.format(name, "\0").split("\0")
        if text.count(begin) != 1 or end not in text.split(begin)[1]:
            raise ValueError(f"README.md needs one place for the table of {name}: {begin}{end}")
        before, after = text.split(begin)
        text = before + begin + table + after[after.index(end) :]
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
