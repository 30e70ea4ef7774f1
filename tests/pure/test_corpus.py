"""Which files the corpus takes and how a document is written as tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from build_corpus import END_OF_DOCUMENT, collect_files, decode, encode


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_files_come_in_order_of_their_path_and_skip_what_differs_between_machines(tmp_path: Path) -> None:
    names = ["b.py", "a/z.py", "a.py", "site-packages/x.py", "test/x.py", "a/tests/x.py", "empty.py", "c.txt"]
    fill(tmp_path, {name: b"" if name == "empty.py" else b"x" for name in names})
    found = [path.relative_to(tmp_path).as_posix() for path in collect_files(tmp_path, 100)]
    assert found == ["a.py", "a/z.py", "b.py"]


def test_a_folder_above_the_root_may_have_any_name(tmp_path: Path) -> None:
    fill(tmp_path / "test", {"a.py": b"x"})
    assert [path.name for path in collect_files(tmp_path / "test", 100)] == ["a.py"]


def test_the_limit_takes_whole_files(tmp_path: Path) -> None:
    fill(tmp_path, {"a.py": b"x" * 4, "b.py": b"x" * 7, "c.py": b"x" * 6})
    assert [path.name for path in collect_files(tmp_path, 10)] == ["a.py", "c.py"]


def test_no_file_that_fits_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, {"a.py": b"xx"})
    with pytest.raises(FileNotFoundError, match="at most 1 bytes"):
        collect_files(tmp_path, 1)


def test_every_byte_survives() -> None:
    data = bytes(range(256)) * 2
    tokens = encode(data)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [*data, END_OF_DOCUMENT]
    assert decode(tokens) == data


@pytest.mark.parametrize("tokens", [[], [1, 2], [END_OF_DOCUMENT, 1, END_OF_DOCUMENT]])
def test_a_document_is_closed_exactly_once(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"not closed|range\(0, 256\)"):
        decode(tokens)
