"""Every exception of the project: typed, and written for the person who reads it at 3 a.m."""

from __future__ import annotations

from typing import Any


class DynaTrainError(Exception):
    """Base of all errors of the project; renders where, what was expected, what was got and what to do.

    Args:
        message: One sentence that says what is wrong.
        rank: Global rank on which it was found; None where every rank finds the same.
        phase: Phase of the switch (`prepare`, `transfer`, `verify`, `commit`, `abort`) or of the start (`check`).
        subject: Tensor, state, flag or YAML key that it is about.
        expected: What would have been right.
        got: What was found.
        hint: What the reader can do.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        subject: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.rank = rank
        self.phase = phase
        self.subject = subject
        self.expected = expected
        self.got = got
        self.hint = hint
        super().__init__(self.render())

    def render(self) -> str:
        """Return the whole message as one line."""
        where = ", ".join(
            part
            for part in (
                f"rank {self.rank}" if self.rank is not None else "",
                f"phase {self.phase}" if self.phase else "",
            )
            if part
        )
        text = f"[{where}] {self.message}" if where else self.message
        if self.subject is not None:
            text += f"; subject: {self.subject}"
        if self.expected is not None:
            text += f"; expected: {self.expected}"
        if self.got is not None:
            text += f"; got: {self.got}"
        if self.hint is not None:
            text += f"; hint: {self.hint}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by fields, so that an error can be carried to the other ranks whole."""
        return (_rebuild, (type(self), self.message, self._fields()))

    def _fields(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "phase": self.phase,
            "subject": self.subject,
            "expected": self.expected,
            "got": self.got,
            "hint": self.hint,
        }


def _rebuild(kind: type[DynaTrainError], message: str, fields: dict[str, object]) -> DynaTrainError:
    return kind(message, **fields)  # type: ignore[arg-type]


class LayoutError(DynaTrainError):
    """A parallel layout that can't exist, or doesn't fit the world or the model."""


class ScheduleError(DynaTrainError):
    """A schedule file or flag that is wrong; `subject` is `file:line key`."""


class UnsupportedError(DynaTrainError):
    """A Megatron feature, optimizer or tensor that can't be moved, named by its flag or key."""


class PlacementError(DynaTrainError):
    """The predicted placement and the real Megatron objects disagree."""


class PlanError(DynaTrainError):
    """No plan exists: an element without a source, or a budget too small to move one row."""


class MissingSourceError(PlanError):
    """Some elements of a state are on no rank that could send them."""


class AgreementError(DynaTrainError):
    """The ranks don't agree on what they are about to do."""


class TransferError(DynaTrainError):
    """Bytes could not be exchanged."""


class DeadlineError(DynaTrainError):
    """A wait ran past its deadline."""


class VerificationError(DynaTrainError):
    """The state after a switch is not the state before it."""


class StateError(DynaTrainError):
    """A state that nobody listed, or a state that is not what it must be."""


class SwitchCancelled(DynaTrainError):  # noqa: N818 (nothing is wrong)
    """A switch that is no longer wanted, given up while it was prepared."""


class SwitchFailure(DynaTrainError):  # noqa: N818 (it is an outcome: refused or aborted)
    """A switch that did not happen; `report` is what is known of it (a `SwitchReport`)."""

    report: Any = None


class SwitchRefused(SwitchFailure):
    """A switch that was refused before anything moved."""


class SwitchAborted(SwitchFailure):
    """A switch that failed and was rolled back; the old world trains on."""
