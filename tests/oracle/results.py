"""The results of the table, as the tests that ran left them: `results.json`, with date and commit of each row."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.oracle.chain import Row

FILE = Path(__file__).with_name("results.json")
WRITE = "ORACLE_RESULTS"
"""Environment variable: 1 lets the tests write the results of the rows that they ran."""


def identity(row: Row) -> dict[str, Any]:
    """Return what a result is a result of: it is void when one of these changes."""
    return {
        "world": row.chain.world,
        "from": row.source.describe(),
        "to": row.target.describe(),
        "model": row.chain.model_name,
        "dtype": row.chain.model.dtype,
        "oracle": row.oracle,
    }


def read() -> dict[str, dict[str, Any]]:
    """Return the result of each row, by its id."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def write(row: Row, *, states: int, moved_bytes: int) -> None:
    """Keep that a row's oracle held, where `ORACLE_RESULTS` is 1.

    Args:
        states: Number of states of tensors that were compared.
        moved_bytes: Bytes that crossed between ranks, all together.
    """
    if os.environ.get(WRITE) != "1":
        return
    found = read()
    now = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    measured = {"result": "equal", "states": states, "moved_bytes": moved_bytes, "date": now, "commit": _commit()}
    found[row.id] = {**identity(row), **measured}
    lines = [f" {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    temporary = FILE.with_suffix(".tmp")
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    temporary.replace(FILE)


def _commit() -> str:
    """Return the commit of the work tree, with `+` where the product is changed on top of it."""
    git = ["git", "-C", str(FILE.parent)]
    commit = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    product = ["status", "--porcelain", "--", ":/megatron_dynatrain", ":/patches"]
    changed = subprocess.run([*git, *product], capture_output=True, text=True, check=True)
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
