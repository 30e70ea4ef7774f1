"""switches.jsonl: its keys, how it is written and read, and the words and values made of it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.records import (
    RECORD_KEYS,
    SwitchRecord,
    append_record,
    format_bytes,
    format_line,
    read_records,
    tensorboard_scalars,
    tensorboard_text,
)

COMMITTED = SwitchRecord(
    iteration=100,
    source="tp2 dp2",
    target="pp2 dp2",
    trigger="at_iteration: 100",
    outcome="committed",
    ahead_s=1.5,
    prepare_s=0.5,
    stall_s=0.25,
    transfer_s=0.125,
    moved_bytes=3 * 2**19,
    minimum_bytes=3 * 2**19,
    local_bytes=100,
    max_send_bytes=10,
    max_recv_bytes=11,
    windows=2,
    peak_bytes=2**30,
    peak_step_bytes=2**31,
    memory_mode="safe",
    verify="digest",
    number=1,
    streams="kept by coordinate",
)
REFUSED = SwitchRecord(
    iteration=7, source="dp4", target="tp3", trigger="request", outcome="refused", error="tp 3 doesn't\n divide 4"
)


def test_the_keys_are_those_of_the_documentation_in_their_order() -> None:
    assert RECORD_KEYS == (
        "iteration",
        "from",
        "to",
        "trigger",
        "outcome",
        "error",
        "ahead_s",
        "prepare_s",
        "stall_s",
        "transfer_s",
        "moved_bytes",
        "minimum_bytes",
        "local_bytes",
        "max_send_bytes",
        "max_recv_bytes",
        "windows",
        "peak_bytes",
        "peak_step_bytes",
        "memory_mode",
        "verify",
        "number",
        "streams",
    )
    assert tuple(REFUSED.as_json()) == RECORD_KEYS


def test_what_is_appended_is_read_back_from_the_file_and_from_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "yet"
    path = append_record(directory, COMMITTED)
    assert append_record(directory, REFUSED) == path == directory / "switches.jsonl"
    assert read_records(path) == read_records(directory) == (COMMITTED, REFUSED)
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["from"] == "tp2 dp2"
    assert len(lines) == 2


def test_a_record_goes_out_in_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = os.write

    def counting(descriptor: int, data: bytes) -> int:
        sizes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counting)
    path = append_record(tmp_path, COMMITTED)
    assert sizes == [path.stat().st_size]


@pytest.mark.parametrize("cut", [1, 2, 40, 200])
def test_a_line_cut_short_by_a_kill_is_passed_over_and_spoils_no_later_one(tmp_path: Path, cut: int) -> None:
    path = append_record(tmp_path, COMMITTED)
    append_record(tmp_path, dataclasses.replace(REFUSED, error="über}"))
    os.truncate(path, path.stat().st_size - cut)
    assert read_records(path) == ((COMMITTED,) if cut > 1 else read_records(path))
    append_record(tmp_path, REFUSED)
    assert read_records(path)[0] == COMMITTED
    assert read_records(path)[-1] == REFUSED
    assert len(read_records(path)) == (3 if cut == 1 else 2)


@pytest.mark.parametrize("line", ["hello", "[1]", "3"])
def test_a_line_that_is_no_record_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = append_record(tmp_path, COMMITTED)
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(StateError) as caught:
        read_records(path)
    assert caught.value.subject == f"{path}:2"


def test_a_record_without_a_required_key_is_refused_and_an_unknown_key_is_passed_over() -> None:
    data: dict[str, Any] = COMMITTED.as_json()
    assert SwitchRecord.from_json(data | {"later": 1}) == COMMITTED
    del data["to"]
    with pytest.raises(StateError, match="lacks keys"):
        SwitchRecord.from_json(data)


def test_the_line_says_what_happened() -> None:
    assert format_line(COMMITTED) == (
        "switch at iteration 100: tp2 dp2 -> pp2 dp2 committed, stall 0.250 s, moved 1.5 MiB (minimum 1.5 MiB),"
        " 2 windows, peak 1.0 GiB, safe, verify digest"
    )
    assert format_line(REFUSED) == "switch at iteration 7: dp4 -> tp3 refused: tp 3 doesn't divide 4"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**40, "3.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_bytes_are_written_with_a_binary_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_tensorboard_gets_what_is_known_and_the_layout_trained_under_afterwards() -> None:
    assert tensorboard_scalars(COMMITTED) == {
        "dynamic-parallelism/stall-seconds": 0.25,
        "dynamic-parallelism/ahead-seconds": 1.5,
        "dynamic-parallelism/prepare-seconds": 0.5,
        "dynamic-parallelism/transfer-seconds": 0.125,
        "dynamic-parallelism/moved-bytes": 1572864.0,
        "dynamic-parallelism/minimum-bytes": 1572864.0,
        "dynamic-parallelism/peak-bytes": 1073741824.0,
        "dynamic-parallelism/committed": 1.0,
    }
    assert tensorboard_scalars(REFUSED) == {"dynamic-parallelism/committed": 0.0}
    assert tensorboard_text(COMMITTED)["dynamic-parallelism/layout"] == "pp2 dp2"
    assert tensorboard_text(REFUSED)["dynamic-parallelism/layout"] == "dp4"
