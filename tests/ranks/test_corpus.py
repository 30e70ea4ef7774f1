"""The corpus as files: read back by this test's own reader of Megatron's format and by Megatron."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool

FILES = {"b.py": b"second\n", "a.py": bytes(range(256)), "deep/c.py": "žluťoučký kůň\n".encode()}
ORDER = ["a.py", "b.py", "deep/c.py"]


def build_twice(context: RankContext, root: str, prefix: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from rich.console import Console

    from build_corpus import build

    description = build(Path(root), Path(prefix), 1000, Console(quiet=True))
    written = Path(prefix + ".bin").stat().st_mtime_ns
    assert build(Path(root), Path(prefix), 1000, Console(quiet=True)) == description
    assert Path(prefix + ".bin").stat().st_mtime_ns == written, "an unchanged corpus was written again"
    dataset = IndexedDataset(prefix)
    return [dataset[index].tolist() for index in range(len(dataset))]


def read_index(path: Path) -> tuple[int, list[int], list[int], list[int]]:
    """Return dtype code, lengths in tokens, offsets in bytes, and document boundaries of an .idx file."""
    data = path.read_bytes()
    magic, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", data)
    assert (magic, version) == (b"MMIDIDX\x00\x00", 1)
    offset = struct.calcsize("<9sQBQQ")
    lengths = np.frombuffer(data, np.int32, sequences, offset)
    offsets = np.frombuffer(data, np.int64, sequences, offset + lengths.nbytes)
    boundaries = np.frombuffer(data, np.int64, documents, offset + lengths.nbytes + offsets.nbytes)
    return code, lengths.tolist(), offsets.tolist(), boundaries.tolist()


@pytest.mark.ranks
def test_the_files_hold_every_byte_of_every_document(ranks: RankPool, tmp_path: Path) -> None:
    from build_corpus import decode

    root, prefix = tmp_path / "source", tmp_path / "made" / "corpus"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (read_by_megatron,) = ranks.run(1, build_twice, str(root), str(prefix), init_group=False)

    code, lengths, offsets, boundaries = read_index(Path(f"{prefix}.idx"))
    assert code == 8  # uint16
    assert lengths == [len(FILES[name]) + 1 for name in ORDER]
    assert boundaries == [0, 1, 2, 3]
    tokens = np.fromfile(f"{prefix}.bin", np.uint16)
    assert len(tokens) == sum(lengths)
    for name, length, offset, megatron in zip(ORDER, lengths, offsets, read_by_megatron, strict=True):
        document = tokens[offset // 2 : offset // 2 + length]
        assert decode(document) == FILES[name]
        assert megatron == document.tolist()
    note = json.loads(Path(f"{prefix}.json").read_text())
    assert (note["files"], note["tokens"]) == (3, len(tokens))
