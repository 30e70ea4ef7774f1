"""Witness values: a misplaced, swapped or repeated element of a live job is visible by name."""

from __future__ import annotations

from typing import Any

import torch

from tests.ranks.independent_gather import _declared, _regions

OFFSETS = {"param": 0.0, "main": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}
_NUMBERS: dict[str, int] = {}


def number_of(name: str) -> int:
    """Return the number that `fill` gave a parameter, by its name in the module."""
    return _NUMBERS[name]


def fill(job: Any) -> None:
    """Give logical element i of parameter p the value p * 4096 + i, exp_avg that + 0.25, exp_avg_sq that + 0.5.

    Parameters are numbered in module order, so the job has no pipeline stages. Local, called by every rank.
    """
    owned = job.owned()
    named = job.parameters()
    declared = {id(parameter): item for parameter, item in _declared(job.chunks)}
    for number, (name, parameter) in enumerate(named.items()):
        _NUMBERS[name] = number
        values = torch.full((parameter.numel(),), float("nan"))
        for _, shape, region, numbers in _regions(declared[id(parameter)], parameter):
            values[torch.from_numpy(numbers)] = number * 4096 + _flat_indices(shape, region, parameter.dim())
        with torch.no_grad():
            parameter.view(-1).copy_(values)
            held = owned.get(name)
            if held is None:
                continue
            part = values[held.start : held.start + held.main.numel()].view_as(held.main)
            held.main.copy_(part + OFFSETS["main"])
            for state in ("exp_avg", "exp_avg_sq"):
                held.state[state].copy_(part + OFFSETS[state])


def _flat_indices(shape: tuple[int, ...], region: tuple[slice, ...], dims: int) -> torch.Tensor:
    """Return the row-major numbers of a region's elements within the parameter, whose dims are the last ones."""
    numbers = torch.zeros((), dtype=torch.float64)
    for size, part in list(zip(shape, region, strict=True))[len(shape) - dims :]:
        numbers = numbers.unsqueeze(-1) * size + torch.arange(part.start, part.stop, dtype=torch.float64)
    return numbers.flatten().float()
