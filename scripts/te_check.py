"""`make te-check`: switch models of Transformer Engine's layers between gloo ranks, compare every bit, report.

Runs in .venv-te, see te_venv.sh. Exit code 0 only where every switch kept every bit and every fault was seen.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.ranks.pool import RankFailure, RankPool  # noqa: E402
from tests.te import entry  # noqa: E402
from tests.te.cases import CASES, Case  # noqa: E402
from tests.te.faults import Fault, faults  # noqa: E402
from tests.te.report import Result, layout_text, render  # noqa: E402
from tests.te.runs import RUNS, Run, compared  # noqa: E402

DOCUMENT = ROOT / "docs" / "te_check.md"
_PACKAGES = ("transformer-engine", "torch", "megatron-core", "mamba-ssm", "flash-linear-attention")
_LIMIT = 120
"""Seconds for one switch."""


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run what has this text in it, and write no report")
    only = parser.parse_args().only
    pool = RankPool("tests.te.warm")
    try:
        results = [switched(pool, case) for case in CASES if only in repr(case)]
        trained = [in_pretrain(pool, run) for run in RUNS if only in repr(run)]
        found = [seen(pool, fault) for fault in faults() if only in repr(fault)]
        extra = extra_state(pool) if not only else ("", "", "", "")
    finally:
        pool.close()
    bad = sum(bool(result.wrong) for result in results) + sum(row[-1] != "equal" for row in trained)
    bad += sum("not seen" in row for row in (*found, extra))
    if not only:
        DOCUMENT.write_text(render(results, [*found, extra], trained, stamp()), encoding="utf-8")
    print(f"{len(results)} switches, {len(trained)} runs, {len(found)} faults: {bad} not as they must be")
    return min(bad, 1)


def switched(pool: RankPool, case: Case) -> Result:
    """Run one switch and print its row."""
    try:
        outcomes = pool.run(case.world, entry.check, case, timeout=_LIMIT)
    except RankFailure as failure:
        result = Result(case, 0, (), str(failure).splitlines()[0])
    else:
        wrong = sorted({name for one in outcomes for name in (*one.wrong, *one.notes)})
        moved, least = outcomes[0].moved
        if moved != least or (case.started and not moved):
            wrong.append(f"{moved} bytes moved, {least} needed")
        states = sorted({state for one in outcomes for state in one.states})
        result = Result(case, sum(one.elements for one in outcomes), tuple(states), "; ".join(wrong))
    print(f"{_text(case)}: {result.wrong or 'equal'}", flush=True)
    return result


def in_pretrain(pool: RankPool, run: Run) -> tuple[str, str, str]:
    """Run `pretrain()` with switches and print its row."""
    try:
        wrong = compared(pool, run)
    except RankFailure as failure:
        wrong = [str(failure).splitlines()[0]]
    layouts = " -> ".join(f"`{layout_text(sizes)}`" for sizes in run.layouts)
    words = run.words + (f", `{run.pattern}`" if run.pattern else "")
    print(f"pretrain(), {words}: {'; '.join(wrong) or 'equal'}", flush=True)
    return words, f"{run.world} ranks: {layouts}", "; ".join(wrong) or "equal"


def seen(pool: RankPool, fault: Fault) -> tuple[str, str, str, str]:
    """Run one switch with a fault in it and print whether it was seen."""
    outcomes = pool.run(fault.case.world, entry.check_fault, fault.case, fault.spoil, timeout=_LIMIT)
    witnessed = [name for one in outcomes for name in (*one.wrong, *one.notes) if fault.seen in name]
    aborted = next((one.aborted for one in outcomes if one.aborted), "")
    subject = aborted.partition("subject: ")[2].partition(";")[0]
    row = (fault.words, _text(fault.case), f"`{subject}`" if subject else "not seen")
    row = (*row, f"`{witnessed[0]}`" if witnessed else "not seen")
    print(f"fault: {row}", flush=True)
    return row


def extra_state(pool: RankPool) -> tuple[str, str, str, str]:
    """See an extra state that is not empty refused by name."""
    case = Case("gpt", "plain", 1)
    (error,) = pool.run(1, entry.refused_extra_state, case, timeout=_LIMIT)
    subject = error.partition("subject: ")[2].partition(";")[0]
    found = f"refused: `{subject}`" if "_extra_state" in subject else "not seen"
    print(f"extra state: {error}")
    return "a module has an extra state", "none: at the start", found, "-"


def stamp() -> dict[str, str]:
    """Return date, commit and versions."""
    commit = _git("rev-parse", "--short", "HEAD")
    dirty = " with changes" if _git("status", "--porcelain", "--", "megatron_dynatrain", "tests", "scripts") else ""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _installed())
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "commit": commit, "dirty": dirty, "versions": versions}


def _installed() -> Iterator[str]:
    known = {dist.metadata["Name"].lower().replace("_", "-") for dist in importlib.metadata.distributions()}
    yield from (name for name in _PACKAGES if name in known)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _text(case: Case) -> str:
    ends = " -> ".join(layout_text(sizes) for sizes in (case.source, case.target))
    return f"{case.model}, {case.optimizer}, {case.world} ranks, {ends}{'' if case.started else ', not started'}"


if __name__ == "__main__":
    sys.exit(main())
