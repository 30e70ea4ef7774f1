"""The pool of forked ranks: records, errors, deaths and deadlines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import pool as pool_module
from tests.ranks.context import RankContext
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import ROOT, RankFailure, RankPool
from tests.ranks.records import losses, steps_with_loss


def sum_of_ranks(context: RankContext, offset: int) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(context.rank + offset), device="cuda")
    dist.all_reduce(value)
    return context.rank, float(value), os.getpid()


def raise_on(context: RankContext, bad: int) -> None:
    import torch
    import torch.distributed as dist

    print("about to fail")
    if context.rank == bad:
        raise ValueError("bad plan")
    dist.all_reduce(torch.zeros(1))


def die_on(context: RankContext, bad: int) -> str:
    if context.rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang(context: RankContext, pids: str) -> None:
    helper = subprocess.Popen(["sleep", "600"])
    Path(pids, str(context.rank)).write_text(f"{os.getpid()} {helper.pid}")
    time.sleep(600)


def check_memory(context: RankContext, name: str, value: int) -> int:
    before = len(_seen)
    _seen[name] = value
    return before


_seen: dict[str, int] = {}


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """A pool without torch, ready in an instant."""
    pool = RankPool(preload=None)
    yield pool
    pool.close()


def test_every_case_gets_fresh_ranks_and_its_records(ranks: RankPool) -> None:
    first, second = ranks.run(3, sum_of_ranks, 1), ranks.run(3, sum_of_ranks, 1)
    assert [record[:2] for record in first] == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert not {record[2] for record in first} & {record[2] for record in second}


def test_nothing_of_a_case_is_left_for_the_next(bare: RankPool) -> None:
    assert [bare.run(2, check_memory, "a", 1, init_group=False) for _ in range(2)] == [[0, 0], [0, 0]]


def test_the_first_real_error_is_raised_with_the_output(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 2 of 3: ValueError: bad plan") as caught:
        ranks.run(3, raise_on, 2)
    assert caught.value.rank == 2
    assert "about to fail" in str(caught.value)
    assert 'raise ValueError("bad plan")' in str(caught.value)


def test_a_death_by_signal_is_said(bare: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2: the process died by SIGKILL"):
        bare.run(2, die_on, 1, init_group=False)
    assert bare.run(2, die_on, 1, init_group=False, may_die={1}) == ["alive", None]


def test_a_hang_ends_at_the_timeout_with_stacks_and_leaves_no_process(bare: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"no answer in 1.5 s") as caught:
        bare.run(2, hang, str(tmp_path), timeout=1.5, init_group=False)
    assert caught.value.timed_out
    assert "in hang" in str(caught.value)  # the stack of the stuck rank
    assert _alive(tmp_path, 4) == []


def test_closing_the_pool_in_the_middle_of_a_case_leaves_no_rank(tmp_path: Path) -> None:
    pool = RankPool(preload=None)
    case = threading.Thread(target=_swallow, args=(pool, tmp_path))
    case.start()
    _wait(lambda: len([file for file in tmp_path.glob("*") if file.read_text()]) == 2)
    assert pool._server is not None
    pool._server.kill()  # the hardest end: no code of the server runs
    case.join(20)
    assert not case.is_alive()
    pids = [int(file.read_text().split()[0]) for file in tmp_path.iterdir()]
    _wait(lambda: not any(map(_is_alive, pids)))
    assert [pid for pid in pids if _is_alive(pid)] == []
    pool.close()
    for file in tmp_path.iterdir():  # what a rank started outlives a killed server; its pool doesn't promise that
        os.kill(int(file.read_text().split()[1]), signal.SIGKILL)


def test_a_killed_test_process_leaves_no_rank_and_no_directory(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.ranks.pool import RankPool; from tests.ranks.test_pool import hang\n"
        "pool = RankPool(preload=None); pool.scratch('mine')\n"
        f"Path({str(tmp_path / 'root')!r}).write_text(str(pool._directory))\n"
        f"pool.run(2, hang, {str(tmp_path)!r}, timeout=60, init_group=False)"
    )
    test = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    _wait(lambda: len(list(tmp_path.glob("[01]"))) == 2 and all(f.read_text() for f in tmp_path.glob("[01]")))
    test.kill()
    test.wait()
    pids = [int(pid) for file in tmp_path.glob("[01]") for pid in file.read_text().split()]
    assert len(pids) == 4
    _wait(lambda: not any(map(_is_alive, pids)) and not Path((tmp_path / "root").read_text()).exists())
    assert [pid for pid in pids if _is_alive(pid)] == []
    assert not Path((tmp_path / "root").read_text()).exists()


def test_after_an_interrupted_case_the_pool_goes_on_and_keeps_its_directories() -> None:
    pool = RankPool(preload=None)
    kept = pool.scratch("kept")
    receive, pool_module.receive = pool_module.receive, _interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(1, die_on, -1, init_group=False)
    finally:
        pool_module.receive = receive
    assert pool._server is None
    assert pool.run(1, die_on, -1, init_group=False) == ["alive"]
    assert kept.is_dir()
    pool.close()
    assert not kept.parent.exists()


def test_pretrain_records_every_step_exactly(ranks: RankPool) -> None:
    records = ranks.pretrain(2, gpt_args(pp=2, train_iters=3))
    steps = steps_with_loss(records)
    assert [step.iteration for step in steps] == [0, 1, 2]
    assert [step.consumed_samples for step in steps] == [0, 8, 16]
    assert [step.lr for step in steps] == [0.0, 5e-4, 1e-3]
    assert [step.adam_steps for step in steps] == [(1,), (2,), (3,)]
    assert losses(records)[2] < losses(records)[0]
    assert losses(ranks.pretrain(2, gpt_args(pp=2, train_iters=3))) == losses(records)
    assert [step.grad_norm for step in records[0].steps] == [step.grad_norm for step in records[1].steps]


def _interrupt(connection: object) -> None:
    raise KeyboardInterrupt


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _swallow(pool: RankPool, directory: Path) -> None:
    with contextlib.suppress(RuntimeError):
        pool.run(2, hang, str(directory), timeout=60, init_group=False)


def _alive(directory: Path, expected: int) -> list[int]:
    pids = [int(pid) for file in directory.iterdir() for pid in file.read_text().split()]
    assert len(pids) == expected
    return [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
