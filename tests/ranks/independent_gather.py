"""Gathers the whole state of a job in canonical coordinates, by code that shares nothing with the plugin.

Where an element of a local tensor belongs comes from Megatron's `sharded_state_dict`: for plain tensors its offset, for
fused ones its own build function applied to the tensor of element numbers. What a rank's optimizer holds comes from the
optimizer's accessors. Every rank sends all it holds, replicas too, so that each replica is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

STATES = ("param", "main", "exp_avg", "exp_avg_sq")  # of a parameter; a buffer has the one state "buffer"
_FROZEN = "frozen"
"""Beside the states: which elements have no optimizer states."""
_MANY = np.iinfo(np.int32).max
_MOST_SHOWN = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogicalState:
    """All states of all parameters, as if they lived on one device.

    Attributes:
        bits: (Megatron's key of the tensor, state) -> its bits as unsigned integers, in its global shape.
        copies: (key, state) -> in how many places each element was held, all of them equal.
        steps: The distinct step counts of the optimizer, over all parameters and ranks.
    """

    bits: dict[tuple[str, str], np.ndarray]
    copies: dict[tuple[str, str], int]
    steps: tuple[float, ...]

    def differences(self, other: LogicalState) -> list[str]:
        """Return one line for each state that is not the same in all bits, and for steps that differ."""
        lines = [f"{key} {state}: held by one of the two only" for key, state in self.bits.keys() ^ other.bits.keys()]
        for name in self.bits.keys() & other.bits.keys():
            a, b = self.bits[name], other.bits[name]
            if a.shape != b.shape or a.dtype != b.dtype:
                lines.append(f"{' '.join(name)}: {a.dtype} {a.shape} and {b.dtype} {b.shape}")
            elif not np.array_equal(a, b):
                lines.append(f"{' '.join(name)}: {int((a != b).sum())} of {a.size} elements differ")
        if self.steps != other.steps:
            lines.append(f"step: {self.steps} and {other.steps}")
        return sorted(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A part of one state that a rank holds: `bits` belong at those of `region` for which `held` is true."""

    key: str
    state: str
    shape: tuple[int, ...]
    region: tuple[slice, ...]
    held: np.ndarray
    bits: np.ndarray


def gather(chunks: Sequence[Any], optimizer: Any) -> LogicalState | None:
    """Return the whole state on rank 0, None elsewhere. Collective over the default group.

    Raises:
        AssertionError: On rank 0: two replicas differ, or an element is held by nobody. All names are in the message.
    """
    import torch.distributed as dist

    parts, steps = _local(chunks, optimizer)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (parts, steps))
    if dist.get_rank() != 0:
        return None
    return _assemble([part for parts, _ in everyone for part in parts], {s for _, steps in everyone for s in steps})


def _assemble(parts: Sequence[_Part], steps: set[float]) -> LogicalState:
    bits: dict[tuple[str, str], np.ndarray] = {}
    counts: dict[tuple[str, str], np.ndarray] = {}
    wrong: dict[str, int] = {}
    for part in parts:
        name = (part.key, part.state)
        whole = bits.setdefault(name, np.zeros(part.shape, part.bits.dtype))[part.region]
        count = counts.setdefault(name, np.zeros(part.shape, np.int32))[part.region]
        local, held = part.bits.reshape(whole.shape), part.held.reshape(whole.shape)
        unequal = held & (count > 0) & (local != whole)
        if unequal.any():
            wrong[f"{part.key} {part.state}"] = int(unequal.sum())
        whole[held] = local[held]
        count[held] += 1
    frozen = {key: counts.pop((key, _FROZEN)) > 0 for key, state in tuple(counts) if state == _FROZEN}
    bits = {name: whole for name, whole in bits.items() if name in counts}
    for (key, state), count in counts.items():
        if state in STATES[1:] and key in frozen:
            count[frozen[key]] = _MANY  # nobody keeps optimizer states of them
    missing = {" ".join(name): int((count == 0).sum()) for name, count in counts.items() if (count == 0).any()}
    assert not wrong, f"replicas differ (elements by state): {dict(list(wrong.items())[:_MOST_SHOWN])}"
    assert not missing, f"held by no rank (elements by state): {dict(list(missing.items())[:_MOST_SHOWN])}"
    return LogicalState(bits=bits, copies={n: int(c.min()) for n, c in counts.items()}, steps=tuple(sorted(steps)))


def _local(chunks: Sequence[Any], optimizer: Any) -> tuple[list[_Part], set[float]]:
    import torch

    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    owner = {p: one for one in inner if not one.is_stub_optimizer for p in one.model_param_group_index_map}
    parts: list[_Part] = []
    steps: set[float] = set()
    for parameter, declared in _declared(chunks):
        kind = "param" if isinstance(parameter, torch.nn.Parameter) else "buffer"
        runs = {kind: (0, parameter.numel(), _bits(parameter))}
        if isinstance(parameter, torch.nn.Parameter) and not parameter.requires_grad:
            runs[_FROZEN] = (0, parameter.numel(), np.zeros(parameter.numel(), np.uint16))
        one = owner.get(parameter)
        if one is not None:
            run = one._get_model_param_range_map(parameter)["param"]
            tensors = one._get_main_param_and_optimizer_states(parameter)
            steps |= {float(tensors["step"])} if "step" in tensors else set()
            runs["main"] = (run.start, run.end, _bits(tensors["param"]))
            for state in STATES[2:]:
                if state in tensors:
                    runs[state] = (run.start, run.end, _bits(tensors[state]))
        for key, shape, region, numbers in _regions(declared, parameter):
            for state, (start, stop, bits) in runs.items():
                held = (numbers >= start) & (numbers < stop)
                placed = np.zeros(numbers.shape, bits.dtype)
                placed[held] = bits[numbers[held] - start]
                parts.append(_Part(key, state, shape, region, held, placed))
    return parts, steps


def _declared(chunks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter, and each buffer that is saved, with what `sharded_state_dict` says of it."""
    from megatron.core.utils import unwrap_model

    for chunk in chunks:
        model = unwrap_model(chunk)
        by_pointer: dict[int, Any] = {}
        for item in _leaves(model.sharded_state_dict()):
            if hasattr(item.data, "data_ptr") and item.data.numel():
                by_pointer.setdefault(item.data.data_ptr(), item)
        for parameter in model.parameters():
            yield parameter, by_pointer[parameter.data_ptr()]
        for buffer in model.buffers():
            if buffer.numel() and buffer.data_ptr() in by_pointer:
                yield buffer, by_pointer[buffer.data_ptr()]


def _leaves(tree: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(tree, ShardedTensor | ShardedTensorFactory):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(value)


def _regions(declared: Any, parameter: Any) -> Iterator[tuple[str, tuple[int, ...], tuple[slice, ...], np.ndarray]]:
    """Yield key, global shape, region and the local element numbers there, for each part of a parameter."""
    import torch

    numbers = torch.arange(parameter.numel()).view(parameter.shape)
    if hasattr(declared, "build_fn"):
        built = declared.build_fn(declared.key, numbers, declared.replica_id, None)
        parts = [(part, part.data) for part in _leaves(built)]
    else:
        parts = [(declared, numbers)]
    for part, local in parts:
        prepended = part.prepend_axis_num
        region = [slice(offset, offset + 1) for offset in part.global_offset[:prepended]]
        region += [slice(o, o + n) for o, n in zip(part.global_offset[prepended:], local.shape, strict=True)]
        yield part.key, tuple(part.global_shape), tuple(region), local.reshape(-1).numpy()


def _bits(tensor: Any) -> np.ndarray:
    import torch

    # A clone: numpy() would pin the live storage at its size, and the plugin frees old buffers by resizing.
    flat = tensor.detach().reshape(-1).clone()
    kinds = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
    torch_kind, numpy_kind = kinds[flat.element_size()]
    return flat.view(torch_kind).numpy().view(numpy_kind)


# --- as a hook of a run -----------------------------------------------------------------------------------------------


def around_switch(run: PretrainRun, *, at: int) -> None:
    """Gather when `train()` returns at iteration `at` under the old layout, and again before the next step.

    Rank 0 gets `extra["before"]` and `extra["after"]`. Installed after the plugin's hook it runs beneath the plugin,
    which switches between the two. Not earlier: overlapped parameter gathers end when `train()` returns. With
    `functools.partial`.
    """
    import megatron.training.training as training
    from megatron.training import get_args

    stock = training.train

    def train(forward: Any, model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> Any:
        iteration, flops = stock(forward, model, optimizer, *rest, **kwargs)
        if iteration == at:
            run.record.extra["before"] = gather(model, optimizer)
        return iteration, flops

    def before_step(model: Any, optimizer: Any, scheduler: Any) -> None:
        if get_args().curr_iteration == at:
            run.record.extra["after"] = gather(model, optimizer)

    training.train = train
    run.before_step.append(before_step)
