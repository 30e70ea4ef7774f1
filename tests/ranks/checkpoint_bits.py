"""Reads two of Megatron's `torch_dist` checkpoints in one process and compares every bit, whatever layouts saved them.

Nothing of the plugin is used: torch assembles each tensor to its global shape.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from tests.ranks.context import RankContext

# A load under other sizes of TP or PP ignores both by design of Megatron.
_NOT_CARRIED = ("rng_state", "rerun_state_machine")
# What says how the run was made, not what it holds.
_NOT_STATE = (".args",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
    """What a comparison found.

    Attributes:
        compared: Number of tensors compared, by kind: model, main, exp_avg, exp_avg_sq, other.
        values: Number of plain values compared.
        different: One line for each tensor or value that differs, with its name.
    """

    compared: dict[str, int]
    values: int
    different: list[str]


def newest(directory: Path) -> Path:
    """Return the newest iteration's directory of a `--save` directory."""
    iteration = int((directory / "latest_checkpointed_iteration.txt").read_text())
    return directory / f"iter_{iteration:07d}"


def compare(context: RankContext, left: Path, right: Path) -> CheckpointDifference:
    """Compare the newest checkpoints of two directories; a job for one rank without a process group."""
    first, second = _read(newest(left)), _read(newest(right))
    compared: Counter[str] = Counter()
    different = [f"{name}: only in one of the two" for name in sorted(first.keys() ^ second.keys())]
    values = 0
    for name in sorted(first.keys() & second.keys()):
        a, b = first[name], second[name]
        if _is_tensor(a) and _is_tensor(b):
            compared[_kind(name)] += 1
            text = _difference(a, b)
        else:
            values += 1
            text = None if a == b else f"{a!r} and {b!r}"
        if text is not None:
            different.append(f"{name}: {text}")
    return CheckpointDifference(compared=dict(compared), values=values, different=different)


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _read(directory: Path) -> dict[str, Any]:
    """Return name -> whole tensor or value of one checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    sharded: dict[str, Any] = {}
    reader = FileSystemReader(directory)
    _load_state_dict(sharded, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    found: dict[str, Any] = {}
    _flatten(sharded, "", found)
    return {name: value for name, value in found.items() if not _left_out(name)}


def _left_out(name: str) -> bool:
    if name.startswith("common_state/") and name.endswith(_NOT_STATE):
        return True
    return any(word in name for word in _NOT_CARRIED)


def _flatten(value: Any, path: str, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(item, f"{path}.{key}" if path else str(key), into)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _flatten(item, f"{path}[{index}]", into)
    else:
        into[path] = value


def _kind(name: str) -> str:
    for kind, marks in (
        ("exp_avg_sq", (".exp_avg_sq.",)),
        ("exp_avg", (".exp_avg.",)),
        ("main", (".state.fp32_param.", ".state.param.")),
    ):
        if any(mark in name for mark in marks):
            return kind
    return "other" if name.startswith(("optimizer", "chained", "common_state")) else "model"


def _difference(a: Any, b: Any) -> str | None:
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    different = a.contiguous().reshape(-1).view(torch.uint8) != b.contiguous().reshape(-1).view(torch.uint8)
    count = int(different.view(-1, a.element_size()).any(dim=1).sum()) if a.numel() else 0
    return f"{count} of {a.numel()} elements differ" if count else None
