"""Control plane: decisions that all ranks take together, over a store, each within a deadline.

No collective of the training groups is involved, so a rank that is slow, stopped or dead can't hang the others.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore

from megatron_dynatrain.elastic.groups import delete_keys
from megatron_dynatrain.errors import AgreementError, DeadlineError, DynaTrainError, TransferError

if TYPE_CHECKING:
    from torch.distributed import Store

_YES = "yes"
_NO = "no"
_GRACE_S = 2.0
"""Seconds that a rank which waited in vain gives the others to say why."""
_SLICE_S = 1.0
"""Seconds between two looks at whether a value that is waited for will never come."""
_NO_ANSWER = re.compile(r"time[d ]*out|closed by peer|reset by peer|broken pipe|connection refused", re.IGNORECASE)
"""How torch.distributed says that a peer is gone or late."""


class ControlPlane:
    """Votes and small gathers among fixed ranks.

    Every call with the same name must be made by every rank once, in the same order; names are unique for ever (the
    caller numbers its attempts). All methods are collective over `ranks` unless said otherwise. Keys don't pile up: a
    vote in which all ranks said yes proves that all are done with everything before it, which is then deleted.

    Args:
        store: Store that the ranks share; keys live under the `tag`.
        ranks: Global ranks that decide together.
        rank: This process's global rank.
        tag: Prefix of the keys.
    """

    def __init__(self, store: Store, *, ranks: Sequence[int], rank: int, tag: str) -> None:
        self.store = PrefixStore(f"{tag}/", store)
        self.ranks = tuple(ranks)
        self.rank = rank
        self._written: list[str] = []

    def decide(self, name: str, error: BaseException | None, *, phase: str, seconds: float) -> None:
        """Return on every rank, or raise the same error on every rank.

        The first rank that fails, the last rank that succeeds, or the first rank whose deadline passes settles the
        vote by one compare-and-set, so that no two ranks can end up with different answers.

        Args:
            name: Name of the vote.
            error: What went wrong on this rank; None where it succeeded.
            phase: Phase named in the errors.
            seconds: Longest wait for the other ranks, in seconds.

        Raises:
            DynaTrainError: The error of the rank that failed, its rank and phase in it.
            DeadlineError: Some ranks did not vote in time; names them.
        """
        key = f"vote/{name}"
        earlier, self._written = self._written, []
        self._set(f"{key}/seen/{self.rank}", "1")
        if self.rank == self.ranks[0]:  # what all ranks write is one rank's to delete
            self._written += [f"{key}/count", f"{key}/settled"]
        if error is not None:
            self._settle(key, _NO, self._explained(error, key, name, phase))
        elif self.store.add(f"{key}/count", 1) == len(self.ranks):
            self._settle(key, _YES, None)
        if not self._wait(f"{key}/settled", seconds):
            self._settle(key, _NO, self._late(key, name, phase, seconds))
        verdict = self.store.get(f"{key}/settled").decode()
        if verdict == _YES:
            delete_keys(self.store, earlier)
            return
        self._written += earlier  # a rank that is late may still read them
        settled_by = verdict.split(":", 1)[1]
        problem: BaseException = pickle.loads(self.store.get(f"{key}/why/{settled_by}"))
        raise problem

    def refuse(self, name: str, error: DynaTrainError) -> None:
        """Settle a vote that nobody may come to any more, unless it is settled; local, without a wait.

        For another thread of this process: `self` is then a control plane of its own, on a client of its own.
        """
        self._settle(f"vote/{name}", _NO, error)

    def _settle(self, key: str, verdict: str, why: DynaTrainError | None) -> None:
        value = verdict if why is None else f"{verdict}:{self.rank}"
        if why is not None:
            self._set(f"{key}/why/{self.rank}", pickle.dumps(why))
        self.store.compare_set(f"{key}/settled", "", value)

    def _explained(self, error: BaseException, key: str, name: str, phase: str) -> DynaTrainError:
        """Return the error in a form that can be sent; where this rank waited in vain, it also says for whom.

        A rank that waits sees only that its own wait ran out or that a connection broke. The cause is another rank: it
        either says so itself within the grace, or is the one that has not come when all who wait have.
        """
        problem = _portable(error, self.rank, phase)
        if not _waited(error) or self._wait(f"{key}/settled", _GRACE_S):
            return problem
        missing = self._missing(key)
        if missing:
            problem.hint = f"ranks {missing} have not come to the end of '{name}': look at their logs"
        return problem

    def _missing(self, key: str) -> list[int]:
        return [rank for rank in self.ranks if not self.store.check([f"{key}/seen/{rank}"])]

    def _late(self, key: str, name: str, phase: str, seconds: float) -> DynaTrainError:
        missing = self._missing(key)
        return DeadlineError(
            f"not every rank came to '{name}' in time",
            rank=self.rank,
            phase=phase,
            subject=f"missing ranks {missing}",
            expected=f"all of ranks {list(self.ranks)} within {seconds:g} s",
            got=f"{len(self.ranks) - len(missing)} of {len(self.ranks)}",
            hint="look at the log of the missing ranks; raise --dynamic-parallelism-timeout if they are only slow",
        )

    def gather(
        self, name: str, value: object, *, phase: str, seconds: float, vote: str | None = None
    ) -> dict[int, object]:
        """Return the value of every rank, by rank; values are small and picklable.

        Args:
            name: Name of the gather.
            value: This rank's value.
            phase: Phase named in the errors.
            seconds: Longest wait for the other ranks, in seconds.
            vote: The vote that follows; where a rank has already failed it, nobody waits for that rank's value.

        Raises:
            DeadlineError: A rank did not give its value in time.
        """
        self._set(f"gather/{name}/{self.rank}", pickle.dumps(value))
        end = time.monotonic() + seconds
        values: dict[int, object] = {}
        for rank in self.ranks:
            key = f"gather/{name}/{rank}"
            while not self._wait(key, max(0.05, min(_SLICE_S, end - time.monotonic()))):
                failed = vote is not None and self.store.check([f"vote/{vote}/settled"])
                if time.monotonic() < end and not failed:
                    continue
                raise DeadlineError(
                    f"rank {rank} did not give its part of '{name}'" + ("" if failed else " in time"),
                    rank=self.rank,
                    phase=phase,
                    expected="its part, but a rank has failed" if failed else f"within {seconds:g} s",
                    hint=f"look at the log of rank {rank}",
                )
            values[rank] = pickle.loads(self.store.get(key))
        return values

    def same(self, name: str, value: object, *, phase: str, seconds: float, vote: str | None = None) -> None:
        """Return where every rank gave an equal value; arguments as those of `gather`.

        Raises:
            AgreementError: Values differ; names the first rank that differs from the first rank of the world.
        """
        values = self.gather(name, value, phase=phase, seconds=seconds, vote=vote)
        first = values[self.ranks[0]]
        for rank in self.ranks:
            if values[rank] != first:
                raise AgreementError(
                    f"the ranks don't agree on '{name}'",
                    rank=rank,
                    phase=phase,
                    expected=f"{first!r} (rank {self.ranks[0]})",
                    got=f"{values[rank]!r} (rank {rank})",
                    hint="start every rank with the same flags and files",
                )

    def _set(self, key: str, value: str | bytes) -> None:
        self._written.append(key)
        self.store.set(key, value)

    def _wait(self, key: str, seconds: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # every store raises a RuntimeError of its own kind when the time is up
            return self.store.check([key])
        return True


def _waited(error: BaseException) -> bool:
    """Return whether an error says no more than that another rank did not answer."""
    return isinstance(error, DeadlineError | TransferError) or (
        isinstance(error, RuntimeError) and bool(_NO_ANSWER.search(str(error)))
    )


def _portable(error: BaseException, rank: int, phase: str) -> DynaTrainError:
    """Return the error as one that can be pickled and names its rank and phase."""
    if isinstance(error, DynaTrainError):
        error.rank = rank if error.rank is None else error.rank
        error.phase = error.phase or phase
        fields = error._fields()
        for name in ("expected", "got"):  # any object; a message needs its text
            fields[name] = None if fields[name] is None else str(fields[name])
        return type(error)(error.message, **fields)  # type: ignore[arg-type]
    return AgreementError(
        f"{type(error).__name__}: {error}", rank=rank, phase=phase, hint=f"see the log of rank {rank}"
    )
