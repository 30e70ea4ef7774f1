"""Switches that are made to fail: what is done to each attempt and what it left; importing this imports no Megatron."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dynatrain.layout import ParallelLayout
    from megatron_dynatrain.switch import Switcher
    from tests.ranks.pretrain import PretrainRun

Act = Callable[["Switcher"], AbstractContextManager[Any]]
"""Done around one attempt, in each rank; what the manager gives, if anything, is the layout to ask for instead."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """One attempt as one rank saw it.

    Attributes:
        kind: Type of what was raised; None where the switch was committed.
        error: Its text.
        changed: What of the job is not what it was before the attempt, by name; only for failed attempts.
        began: When the attempt began and ended, by the clock that all ranks share, in seconds.
    """

    kind: str | None
    error: str | None
    changed: tuple[str, ...]
    began: float
    ended: float


def attempted(run: PretrainRun, *, acts: Sequence[Act | None]) -> None:
    """Do `acts` around the switches, one each in order, and record every attempt in `extra["attempts"]`."""
    from megatron_dynatrain.errors import SwitchFailure
    from megatron_dynatrain.switch import Switcher
    from megatron_dynatrain.training.job import DynamicJob

    found: list[Attempted] = run.record.extra.setdefault("attempts", [])
    failures: list[SwitchFailure | None] = []
    switch, change_layout = Switcher.switch, DynamicJob.change_layout

    def acted(self: Switcher, layout: ParallelLayout) -> Any:
        act = acts[len(failures)] or nothing
        failures.append(None)
        try:
            with act(self) as other:
                return switch(self, other or layout)
        except SwitchFailure as failure:
            failures[-1] = failure
            raise

    def recorded(self: DynamicJob, *args: Any) -> bool:
        before, began = fingerprint(self.switcher), time.monotonic()
        done = change_layout(self, *args)
        ended, failure = time.monotonic(), failures[-1]
        changed = differences(before, fingerprint(self.switcher)) if failure is not None else ()
        kind, text = (type(failure).__name__, str(failure)) if failure is not None else (None, None)
        found.append(Attempted(kind=kind, error=text, changed=changed, began=began, ended=ended))
        return done

    Switcher.switch = acted  # type: ignore[method-assign]
    DynamicJob.change_layout = recorded  # type: ignore[method-assign]


@contextmanager
def nothing(switcher: Switcher) -> Iterator[None]:
    """Let the attempt be."""
    yield


@contextmanager
def fail_in(switcher: Switcher, *, phase: str, rank: int, budget: int | None = None) -> Iterator[None]:
    """Raise on one rank as a phase begins; `budget` are the bytes of a window."""
    stock, options = switcher.on_phase, switcher.options

    def on_phase(name: str) -> None:
        if name == phase and switcher.rank == rank:
            raise ValueError(f"bad plan in {phase}")

    switcher.on_phase = on_phase
    if budget is not None:
        switcher.options = dataclasses.replace(options, budget=dataclasses.replace(options.budget, bytes=budget))
    try:
        yield
    finally:
        switcher.on_phase, switcher.options = stock, options


@contextmanager
def late_in(switcher: Switcher, *, phase: str, rank: int, meeting: Path) -> Iterator[None]:
    """Let one rank come to a phase only when all others have been told that it is missing.

    It comes anyway `timeout` + 10 seconds later, which must not happen: `meeting` then has a file `in vain`.
    """
    stock = switcher.on_phase
    others = [other for other in switcher.world.layout.ranks if other != rank]
    meeting.mkdir(exist_ok=True)

    def on_phase(name: str) -> None:
        if name != phase or switcher.rank != rank:
            return
        end = time.monotonic() + switcher.options.timeout + 10
        while not all((meeting / str(other)).exists() for other in others):
            if time.monotonic() > end:
                (meeting / "in vain").touch()
                return
            time.sleep(0.05)

    switcher.on_phase = on_phase
    try:
        yield
    finally:
        switcher.on_phase = stock
        (meeting / str(switcher.rank)).touch()


def fingerprint(switcher: Switcher) -> dict[str, object]:
    """Return everything of a running job that an attempt must not change, by name."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    from megatron_dynatrain.elastic.groups import live_groups
    from megatron_dynatrain.mcore import optimizers
    from megatron_dynatrain.mcore.random_streams import RandomStreams
    from megatron_dynatrain.mcore.states import LiveState

    live = LiveState(switcher.world.chunks, switcher.world.optimizer, rank=switcher.rank)
    found: dict[str, object] = {
        name: hashlib.sha256(flat.clone().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, flat in live.memory(moments=bool(live.steps())).items()
    }
    found |= {f"scalar {name}": value for name, value in optimizers.scalars(switcher.world.optimizer).items()}
    found |= {f"random stream {name}": value for name, value in RandomStreams.capture().digests().items()}
    found |= {f"argument {name}": repr(value) for name, value in vars(get_args()).items()}
    names = [name for name, value in vars(parallel_state).items() if isinstance(value, dist.ProcessGroup)]
    found |= {f"group {name}": id(getattr(parallel_state, name)) for name in names}
    found |= {"default group": id(dist.group.WORLD), "groups": live_groups(), "micro-batches": get_num_microbatches()}
    buffers = [buffer for chunk in switcher.world.chunks for buffer in chunk.buffers]
    found |= {f"gradient buffer {i}": b.grad_data.untyped_storage().nbytes() for i, b in enumerate(buffers)}
    return found


def differences(before: dict[str, object], after: dict[str, object]) -> tuple[str, ...]:
    """Return the names of what is not the same."""
    return tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
