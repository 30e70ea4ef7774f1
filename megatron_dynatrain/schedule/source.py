"""YAML with the line of every key and value, so that an error can name its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import yaml

from megatron_dynatrain.schedule.problems import Problem, ScheduleProblemsError, say

Path = tuple[str | int, ...]
"""Keys and list indices from the root of the document."""

MAX_DEPTH = 16
"""Nesting that no schedule needs; it also stops an alias that contains itself."""


def show_path(path: Path) -> str:
    """Return a path as the reader writes it, e.g. `switches[1].to.tp`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Source:
    """A YAML document as plain values, with positions.

    Args:
        file: The file as the caller named it.
        data: The document as dicts, lists and scalars.
        key_lines: Line of each mapping key, from 1, by path.
        value_lines: Line of each value, from 1, by path.
        problems: Duplicate keys and values YAML itself refuses, in file order.
        prefix: Where the document stands in its file, for one that is a part of another.
    """

    file: str
    data: object
    key_lines: Mapping[Path, int] = field(default_factory=dict)
    value_lines: Mapping[Path, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    prefix: Path = ()

    def part(self, path: Path, data: object) -> Source:
        """Return the document at a path as one of its own, with the places it has in the whole file."""

        def below(lines: Mapping[Path, int]) -> dict[Path, int]:
            return {key[len(path) :]: line for key, line in lines.items() if key[: len(path)] == path}

        return Source(self.file, data, below(self.key_lines), below(self.value_lines), prefix=(*self.prefix, *path))

    def line(self, path: Path) -> int:
        """Return the line of a key, of a list item, or of the nearest parent that is in the file."""
        while path:
            if path in self.key_lines:
                return self.key_lines[path]
            if path in self.value_lines:
                return self.value_lines[path]
            path = path[:-1]
        return self.value_lines.get((), 1)

    def problem(
        self,
        path: Path,
        message: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        hint: str | None = None,
    ) -> Problem:
        """Return a problem placed at a path."""
        return Problem(
            message=message,
            file=self.file,
            line=self.line(path),
            key=show_path((*self.prefix, *path)),
            expected=expected,
            got=got,
            hint=hint,
        )


def read_source(path: str | FilePath) -> Source:
    """Read a YAML file with the positions of its keys and values.

    Raises:
        ScheduleError: The file can't be read, is no YAML, or is empty.
    """
    file = str(path)
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ScheduleProblemsError(
            [Problem(message="the schedule can't be read", file=file, expected="a YAML file in UTF-8", got=reason)]
        ) from error
    return parse_source(text, file)


def parse_source(text: str, file: str) -> Source:
    """Parse YAML text with the positions of its keys and values; see read_source."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ScheduleProblemsError([_syntax_problem(error, file)]) from error
    if root is None:
        raise ScheduleProblemsError(
            [Problem(message="the schedule is empty", file=file, line=1, expected="a mapping with version: 1")]
        )
    reader = _Reader(file)
    data = reader.value(root, ())
    return Source(file, data, reader.key_lines, reader.value_lines, tuple(reader.problems))


def _syntax_problem(error: yaml.YAMLError, file: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return Problem(
        message="the file is not YAML",
        file=file,
        line=mark.line + 1 if mark is not None else None,
        expected="YAML",
        got=str(reason),
    )


class _Reader:
    """Turns nodes into plain values and notes where they stand."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.key_lines: dict[Path, int] = {}
        self.value_lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self._loader = yaml.SafeLoader("")

    def value(self, node: yaml.Node, path: Path) -> object:
        line = node.start_mark.line + 1
        self.value_lines[path] = line
        if len(path) > MAX_DEPTH:
            self._add(line, path, "the schedule is nested too deep", expected=f"at most {MAX_DEPTH} levels")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        try:
            value: object = self._loader.construct_object(node)
            return value
        except (yaml.YAMLError, ValueError) as error:
            reason = getattr(error, "problem", None) or str(error)
            self._add(line, path, "a value that can't be read", expected="a plain YAML value", got=str(reason))
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                self._add(
                    line,
                    path,
                    "a key that is not a string",
                    expected="a string",
                    got=say(self.value(key_node, (*path, ""))),
                    hint="quote the key",
                )
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in found:
                what = "layout name" if path == ("layouts",) else "key"
                first = self.key_lines[here]
                self._add(line, here, f"duplicate {what} {key!r}", expected="each once", got=f"also on line {first}")
                continue
            self.key_lines[here] = line
            found[key] = self.value(value_node, here)
        return found

    def _add(
        self,
        line: int,
        path: Path,
        message: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problems.append(
            Problem(
                message=message,
                file=self.file,
                line=line,
                key=show_path(path),
                expected=expected,
                got=got,
                hint=hint,
            )
        )
