"""Write the tables of the README that come from code: `python scripts/write_tables.py`; a test says when it is time."""

from __future__ import annotations

from pathlib import Path

from megatron_dynatrain.training.refusals import refusals_table

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = "<!-- {0}: written by scripts/write_tables.py -->\n{1}<!-- end of {0} -->\n"


def with_tables(text: str) -> str:
    """Return the text of the README with its tables as the code has them.

    Raises:
        ValueError: The place of a table is missing.
    """
    for name, table in {"refused options": refusals_table()}.items():
        begin, end = BLOCK.format(name, "\0").split("\0")
        if text.count(begin) != 1 or end not in text.split(begin)[1]:
            raise ValueError(f"README.md needs one place for the table of {name}: {begin}{end}")
        before, after = text.split(begin)
        text = before + begin + table + after[after.index(end) :]
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
