"""Where each element of a rank's memory belongs, from what Megatron itself says: nothing comes from the plugin's vps.

An element is known by one number: a hash of Megatron's key of the tensor and of the state, plus the element's index in
the global tensor. The value it must have is a function of that number, so an element that is in another place has
another value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model
from numpy.typing import NDArray

from tests.ranks.independent_gather import _leaves, _regions

Ids = NDArray[np.uint64]
NOT_STATE = ("local_tokens_per_expert", "inv_freq", "cos_cached", "sin_cached")
"""Buffers that a step empties or that follow from the configuration."""
_BITS = {2: np.uint16, 4: np.uint32}


def ids_by_memory(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[int, Ids]:
    """Return address -> numbers of the elements, for every tensor of state; the rank's parallel state is live."""
    owner = {
        parameter: one
        for one in getattr(optimizer, "chained_optimizers", [optimizer])
        for parameter in getattr(one, "model_param_group_index_map", {})
    }
    found: dict[int, Ids] = {}
    for tensor, elements in _elements(chunks):
        found[tensor.data_ptr()] = elements + _hash("param")
        one = owner.get(tensor)
        if one is None:
            continue
        run = one._get_model_param_range_map(tensor)["param"]
        states = one._get_main_param_and_optimizer_states(tensor)
        for name, state in states.items():
            if name != "step" and not _inside(state, tensor):
                found[state.data_ptr()] = elements[run.start : run.end] + _hash(f"optimizer's {name}")
    return found


def bits_of(ids: Ids, itemsize: int) -> NDArray[np.unsignedinteger]:
    """Return the bits that elements with these numbers must have."""
    z = (ids ^ (ids >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(64 - 8 * itemsize)).astype(_BITS[itemsize])


def _elements(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.Tensor, Ids]]:
    """Yield every parameter and buffer that is state, with the numbers of its elements without a state's part."""
    for wrapped in chunks:
        model = unwrap_model(wrapped)
        declared: dict[int, Any] = {}
        for item in _leaves(model.sharded_state_dict()):
            if isinstance(item.data, torch.Tensor) and item.data.numel():
                declared.setdefault(item.data.data_ptr(), item)
        for parameter in model.parameters():
            yield parameter, _declared_elements(parameter, declared[parameter.data_ptr()])
        for name, buffer in model.named_buffers():
            if buffer is None or name.endswith(NOT_STATE):
                continue
            if buffer.data_ptr() in declared:
                yield buffer, _declared_elements(buffer, declared[buffer.data_ptr()])
            else:  # in no state dict: one per layer, the same on every rank of the stage
                key = f"{_layer_of(model, name)} {name.rpartition('.')[2]}"
                yield buffer, np.arange(buffer.numel(), dtype=np.uint64) + _hash(key)


def _declared_elements(tensor: torch.Tensor, declared: Any) -> Ids:
    elements = np.zeros(tensor.numel(), dtype=np.uint64)
    seen = np.zeros(tensor.numel(), dtype=bool)
    for key, shape, region, numbers in _regions(declared, tensor):
        flat = np.zeros((), dtype=np.uint64)
        for size, part in zip(shape, region, strict=True):
            flat = flat[..., None] * np.uint64(size) + np.arange(part.start, part.stop, dtype=np.uint64)
        elements[numbers] = flat.reshape(-1) + _hash(key)
        seen[numbers] = True
    assert seen.all(), f"{declared.key}: Megatron declares only {int(seen.sum())} of {seen.size} local elements"
    return elements


def _layer_of(model: torch.nn.Module, name: str) -> int:
    path = name.split(".")
    layer = model.get_submodule(".".join(path[: path.index("layers") + 2]))
    return int(layer.layer_number)


def _inside(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a main parameter is a part of the model parameter's own memory."""
    start, size = parameter.data_ptr(), parameter.numel() * parameter.element_size()
    return start <= state.data_ptr() < start + size


def _hash(text: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
