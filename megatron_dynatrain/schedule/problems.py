"""What is wrong with a schedule: one problem per place in the file, raised together as one error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from megatron_dynatrain.errors import ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong at one place of a schedule.

    Args:
        message: One sentence that says what is wrong.
        file: The schedule file as the caller named it.
        line: Line of the key or value, counted from 1; None where the whole file is meant.
        key: Path of the key, e.g. `layouts.wide.tp` or `switches[1].to`; empty for the whole file.
        expected: What would have been right.
        got: What was found.
        hint: What the reader can do.
    """

    message: str
    file: str
    line: int | None = None
    key: str = ""
    expected: str | None = None
    got: str | None = None
    hint: str | None = None

    @property
    def subject(self) -> str:
        """The place, as `file:line key`."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place} {self.key}".rstrip()

    def render(self) -> str:
        """Return the problem as one line that begins with its place."""
        text = f"{self.subject}: {self.message}"
        for name in ("expected", "got", "hint"):
            value = getattr(self, name)
            if value is not None:
                text += f"; {name}: {value}"
        return text

    def as_json(self) -> dict[str, object]:
        """Return the fields as plain JSON values."""
        return asdict(self)


class ScheduleProblemsError(ScheduleError):
    """Everything that is wrong with a schedule.

    One problem fills the error's own fields; several are listed in the message, one a line.

    Args:
        problems: At least one problem.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise ValueError("an error without a problem")
        first = self.problems[0]
        if len(self.problems) == 1:
            super().__init__(
                first.message,
                phase="check",
                subject=first.subject,
                expected=first.expected,
                got=first.got,
                hint=first.hint,
            )
        else:
            lines = "".join(f"\n  {problem.render()}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} errors in the schedule {first.file}:{lines}", phase="check")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the problems, so that the error can be carried to the other ranks whole."""
        return (type(self), (self.problems,))


def nearest(word: str, words: Sequence[str]) -> str | None:
    """Return the valid word most like `word`, or None where none is near."""
    begins = [valid for valid in words if valid.startswith(word.lower())]
    found = difflib.get_close_matches(word.lower(), begins or words, n=1, cutoff=0.0 if begins else 0.5)
    return found[0] if found else None


_KINDS: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}


def say(value: object) -> str:
    """Return a value found in YAML as the reader should see it, with its type where the type is the point."""
    if value is None:
        return "nothing (null)"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return f"{shown} ({_KINDS.get(type(value), type(value).__name__)})"
