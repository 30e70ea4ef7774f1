"""Build a corpus of real text without a download: the source files of the running Python's standard library.

One document per file, one token per byte (0-255), each document closed by the end-of-document token 256. Written as
`PREFIX.bin` and `PREFIX.idx`, Megatron's IndexedDataset; train on it with
`--data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 257`. The same Python gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
TOKEN_DTYPE = np.uint16
DEFAULT_LIMIT_BYTES = 8_000_000
# Installed packages differ from machine to machine; the test suite is large tables more often than text.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def collect_files(root: Path, limit_bytes: int) -> list[Path]:
    """Return the `.py` files under `root` in order of their relative path, each that still fits into the limit.

    Empty files are left out: a document needs a token besides its end.

    Raises:
        FileNotFoundError: No file fits.
    """
    files: list[Path] = []
    total = 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]) or not path.is_file():
            continue
        size = path.stat().st_size
        if size == 0 or total + size > limit_bytes:
            continue
        files.append(path)
        total += size
    if not files:
        raise FileNotFoundError(f"no .py file of at most {limit_bytes} bytes under {root}")
    return files


def encode(data: bytes) -> np.ndarray:
    """Return the tokens of one document, shape [len(data) + 1]."""
    return np.append(np.frombuffer(data, dtype=np.uint8).astype(TOKEN_DTYPE), TOKEN_DTYPE(END_OF_DOCUMENT))


def decode(tokens: Iterable[int]) -> bytes:
    """Return the bytes of one document, without its end-of-document token.

    Raises:
        ValueError: The document isn't closed by the token, or the token stands inside it.
    """
    values = [int(token) for token in tokens]
    if not values or values[-1] != END_OF_DOCUMENT:
        raise ValueError(f"document not closed by token {END_OF_DOCUMENT}: ends with {values[-1:]}")
    return bytes(values[:-1])


def write_dataset(documents: Iterable[bytes], prefix: Path) -> None:
    """Write `PREFIX.bin` and `PREFIX.idx`, one sequence and one document per item."""
    with warnings.catch_warnings():
        # Megatron warns about fused GPU kernels, which have no part in writing a file.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=TOKEN_DTYPE)
    for data in documents:
        tokens = encode(data)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(get_idx_path(str(prefix)))


def build(root: Path, prefix: Path, limit_bytes: int, console: Console) -> dict[str, object]:
    """Build the corpus, or keep the one that is there when it was built from the same files.

    Returns:
        Its description, which is also written to `PREFIX.json`: python, files, bytes, tokens, sha256 of all bytes.
    """
    files = collect_files(root, limit_bytes)
    digest = hashlib.sha256()
    documents = []
    quiet = not console.is_terminal
    for path in track(files, description="reading", console=console, transient=True, disable=quiet):
        documents.append(path.read_bytes())
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(documents[-1])}\0".encode())
        digest.update(documents[-1])
    total = sum(map(len, documents))
    description: dict[str, object] = {
        "python": platform.python_version(),
        "files": len(files),
        "bytes": total,
        "tokens": total + len(files),
        "sha256": digest.hexdigest(),
    }
    note = prefix.with_name(prefix.name + ".json")
    if not _is_built(prefix, note, description):
        note.unlink(missing_ok=True)
        write_dataset(track(documents, description="writing", console=console, transient=True, disable=quiet), prefix)
        # Last, so that an interrupted build is built again.
        note.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return description


def _is_built(prefix: Path, note: Path, description: dict[str, object]) -> bool:
    parts = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    if not note.is_file() or not all(part.is_file() for part in parts):
        return False
    return bool(json.loads(note.read_text(encoding="utf-8")) == description)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("demo-out/corpus/stdlib"), help="prefix of .bin and .idx")
    parser.add_argument("--root", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of .py files")
    parser.add_argument("--limit-bytes", type=int, default=DEFAULT_LIMIT_BYTES, help="most bytes of text to take")
    options = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    made = build(options.root, options.output, options.limit_bytes, console)
    console.print(
        f"corpus {options.output}: {made['files']} files of Python {made['python']}, {made['tokens']:,} tokens",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
