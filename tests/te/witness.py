"""Witness bits: a function of (Megatron's key, coordinate, state), by nothing of the plugin's.

The coordinate of an element comes from `sharded_state_dict`: the offset of a plain tensor, and of a fused one where its
own build function puts the tensor of element numbers. Moments and remainders get any 32 or 16 bits, NaNs among them;
main parameters are numbers, because a 16-bit parameter must be their cast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.ranks.independent_gather import _declared, _regions

_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Regions = list[tuple[str, tuple[int, ...], tuple[slice, ...], np.ndarray]]


@dataclass(frozen=True)
class Held:
    """One state of one parameter or buffer on this rank: its memory as integers, and the bits that belong there."""

    name: str
    state: str
    bits: torch.Tensor
    expected: torch.Tensor


def held_states(chunks: list[Any], optimizer: Any, *, cast: bool) -> Iterator[Held]:
    """Yield every state of every parameter and saved buffer of this rank; local.

    Args:
        chunks: Model chunks.
        optimizer: Megatron's optimizer.
        cast: Whether parameters are casts of main parameters that are kept apart.
    """
    owners = {p: one for one in optimizer.chained_optimizers for p in getattr(one, "model_param_group_index_map", {})}
    names = {id(t): name for c in chunks for name, t in [*c.named_parameters(), *c.named_buffers()]}
    for tensor, declared in _declared(chunks):
        where = list(_regions(declared, tensor))
        name = names[id(tensor)].replace("module.", "")
        param = _numbers(where, "main").to(tensor.dtype) if cast else _any_bits(where, "param", tensor.dtype)
        yield Held(name, "param", _integers(tensor), _integers(param))
        if tensor in owners:
            yield from _optimizer_states(name, tensor, where, owners[tensor])


def _optimizer_states(name: str, tensor: torch.Tensor, where: Regions, owner: Any) -> Iterator[Held]:
    group, order = owner.model_param_group_index_map[tensor]
    shard = owner.optimizer.param_groups[group]["params"][order]
    run = owner._get_model_param_range_map(tensor)["param"]
    stored = dict(owner.optimizer.state[shard])
    if shard.data_ptr() != tensor.data_ptr() + run.start * tensor.element_size():
        stored["master_param"] = shard  # Megatron keeps it, and the optimizer calls it the parameter
    for state, memory in stored.items():
        if state == "step":
            continue  # torch's Adam has one here
        if state != "master_param":
            whole = _any_bits(where, state, memory.dtype)
        elif memory.dtype == torch.int16:
            whole = _any_bits(where, "remainder", memory.dtype)
        elif tensor.dtype == torch.float32:
            whole = _any_bits(where, "param", tensor.dtype)  # a copy
        else:
            whole = _numbers(where, "main")
        yield Held(name, state, _integers(memory), _integers(whole)[run.start : run.end])


def fill(chunks: list[Any], optimizer: Any, *, cast: bool) -> int:
    """Give every state its witness bits; local. Returns how many elements were written."""
    count = 0
    for item in held_states(chunks, optimizer, cast=cast):
        item.bits.copy_(item.expected)
        count += item.bits.numel()
    return count


def wrong_states(chunks: list[Any], optimizer: Any, *, cast: bool) -> dict[str, int]:
    """Return (name and state) -> elements that are not the witness bits, where there are any; local."""
    found = {}
    for item in held_states(chunks, optimizer, cast=cast):
        if item.bits.shape != item.expected.shape:
            found[f"{item.name} {item.state}"] = item.bits.numel()
        elif not torch.equal(item.bits, item.expected):
            found[f"{item.name} {item.state}"] = int((item.bits != item.expected).sum())
    return found


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(_SIGNED[tensor.element_size()])


def _any_bits(where: Regions, state: str, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    bits = _hash(where, state).astype(_UNSIGNED[size])
    return torch.from_numpy(bits.view(f"i{size}").copy()).view(dtype)


def _numbers(where: Regions, state: str) -> torch.Tensor:
    """Return fp32 numbers from 2**-8 to 2**8 of either sign, with any mantissa."""
    bits = _hash(where, state).astype(np.uint32)
    exponent = (119 + ((bits >> np.uint32(23)) & np.uint32(15))) << np.uint32(23)
    return torch.from_numpy((bits & np.uint32(0x807FFFFF) | exponent).view(np.float32).copy())


def _hash(where: Regions, state: str) -> np.ndarray:
    """Return 64 mixed bits per local element, by its key, its row-major number in the global tensor and the state."""
    result = np.zeros(sum(numbers.size for *_, numbers in where), np.uint64)
    for key, shape, region, numbers in where:
        flat = np.zeros((), np.uint64)
        for size, part in zip(shape, region, strict=True):
            flat = flat[..., None] * np.uint64(size) + np.arange(part.start, part.stop, dtype=np.uint64)
        salt = int.from_bytes(hashlib.sha256(f"{key}\0{state}".encode()).digest()[:8], "little")
        result[numbers] = _mixed(flat.reshape(-1) + np.uint64(salt))
    return result


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix 64 bits (the finaliser of SplitMix64, Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
