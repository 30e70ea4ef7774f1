"""Faults of a switch, each put into the running product for one attempt; importing this imports no Megatron."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

    from megatron_dynatrain.routing.windows import RankPlan
    from megatron_dynatrain.switch import Switcher

    Memory = Mapping[str, torch.Tensor]

_LAYER = "decoder.layers.1"
_NORM = f"{_LAYER}.input_layernorm.weight"
_PRODUCT = "megatron_dynatrain.attempt"


@contextmanager
def _transfer(change_plan: Callable[[RankPlan], RankPlan], spoil: Callable[[Memory], None]) -> Iterator[None]:
    """Change the plan of the transfer, and the memory that it filled; the way back of `full` stays as it is."""
    from megatron_dynatrain import attempt

    stock, calls = attempt.run_plan, []

    def run_plan(plan: RankPlan, source: Memory, target: Memory, *args: Any, **kwargs: Any) -> Any:
        calls.append(plan)
        if len(calls) > 1:
            return stock(plan, source, target, *args, **kwargs)
        for flat in target.values():
            flat.fill_(-1)  # else a place that is left out may hold the right bits of an earlier attempt
        report = stock(change_plan(plan), source, target, *args, **kwargs)
        spoil(target)
        return report

    with mock.patch(f"{_PRODUCT}.run_plan", run_plan):
        yield


def _same(plan: RankPlan) -> RankPlan:
    return plan


def _nothing(memory: Memory) -> None:
    pass


def dropped_move(switcher: Switcher) -> AbstractContextManager[None]:
    """Leave out all moves of one state of one tensor, on both sides."""

    def kept(moves: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(m for m in moves if (m.tensor, m.state) != (f"{_LAYER}.mlp.linear_fc2.weight", "exp_avg"))

    def change(plan: RankPlan) -> RankPlan:
        windows = (
            dataclasses.replace(w, sends=kept(w.sends), receives=kept(w.receives), copies=kept(w.copies))
            for w in plan.windows
        )
        return dataclasses.replace(plan, windows=tuple(windows))

    return _transfer(change, _nothing)


def swapped_gate_and_up(switcher: Switcher) -> AbstractContextManager[None]:
    """Swap the two halves of a gated projection."""

    def spoil(memory: Memory) -> None:
        gate, up = memory[f"param@0:{_LAYER}.mlp.linear_fc1.weight"].chunk(2)
        kept = gate.clone()
        gate.copy_(up)
        up.copy_(kept)

    return _transfer(_same, spoil)


def permuted_slice(switcher: Switcher) -> AbstractContextManager[None]:
    """Swap two rows of one rank's second moments: the same values in another order."""

    def spoil(memory: Memory) -> None:
        import torch

        name = f"exp_avg_sq@0:{_LAYER}.self_attention.linear_qkv.weight"
        if name not in memory:
            return
        columns = switcher.world.chunks[0].config.hidden_size
        rows = memory[name][: 2 * columns].view(2, columns)
        rows.copy_(torch.flip(rows, dims=[0]))

    return _transfer(_same, spoil)


def wrong_replica(switcher: Switcher) -> AbstractContextManager[None]:
    """Flip the lowest bit of one parameter's first element, on the second data-parallel rank only."""

    def spoil(memory: Memory) -> None:
        if switcher.rank == 1:
            _flip(memory["param@0:embedding.word_embeddings.weight"])

    return _transfer(_same, spoil)


def opposite_replicas(switcher: Switcher) -> AbstractContextManager[None]:
    """Add one to the bits of an element on rank 0 and take one off on rank 1: the sum over all replicas stays."""

    def spoil(memory: Memory) -> None:
        import torch

        memory[f"param@0:{_NORM}"][:1].view(torch.int32).add_(1 - 2 * switcher.rank)

    return _transfer(_same, spoil)


@contextmanager
def unequal_before(switcher: Switcher) -> Iterator[None]:
    """Let rank 1 have other bits than rank 0 before the switch, which keeps each rank's own; put back afterwards."""
    parameter = next(p for name, p in switcher.world.chunks[0].named_parameters() if name.endswith(_NORM))
    kept = parameter.data.clone()
    if switcher.rank == 1:
        _flip(parameter.data.view(-1))
    try:
        yield
    except Exception:  # a switch that was done has taken the memory away
        parameter.data.copy_(kept)
        raise


def wrong_tied_copy(switcher: Switcher) -> AbstractContextManager[None]:
    """Flip a bit of the tied embedding's copy on the last stage."""

    def spoil(memory: Memory) -> None:
        if "param@0:output_layer.weight" in memory:
            _flip(memory["param@0:output_layer.weight"])

    return _transfer(_same, spoil)


def _flip(flat: torch.Tensor) -> None:
    import torch

    bits = flat[:1].view(torch.int32 if flat.element_size() == 4 else torch.int16)
    bits.bitwise_xor_(1)


def main_left_out(switcher: Switcher) -> AbstractContextManager[None]:
    """Leave the main parameter of one tensor as it was built."""

    def spoil(memory: Memory) -> None:
        if f"main_param@0:{_LAYER}.self_attention.linear_proj.weight" in memory:
            memory[f"main_param@0:{_LAYER}.self_attention.linear_proj.weight"].zero_()

    return _transfer(_same, spoil)


def main_rounded(switcher: Switcher) -> AbstractContextManager[None]:
    """Make the main parameters of one tensor from the 16-bit ones, as a restart without them would."""

    def spoil(memory: Memory) -> None:
        import torch

        for name, flat in memory.items():
            if name == f"main_param@0:{_LAYER}.self_attention.linear_proj.weight":
                flat.copy_(flat.to(torch.bfloat16))

    return _transfer(_same, spoil)


@contextmanager
def _optimizer(
    switcher: Switcher, spoil: Callable[[Any], None], *, note: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """Spoil each inner optimizer of the target when all is carried, before it is verified; `note` sees it as built."""
    build, on_phase = switcher.build, switcher.on_phase
    built: list[Any] = []

    def build_and_keep(layout: Any) -> Any:
        chunks, optimizer = build(layout)
        built[:] = getattr(optimizer, "chained_optimizers", [optimizer])
        for inner in built if note is not None else ():
            note(inner)
        return chunks, optimizer

    def spoil_in_time(name: str) -> None:
        on_phase(name)
        for inner in built if name == "verify/digest" else ():
            spoil(inner)

    switcher.build, switcher.on_phase = build_and_keep, spoil_in_time
    try:
        yield
    finally:
        switcher.build, switcher.on_phase = build, on_phase
        built.clear()


def stale_step(switcher: Switcher) -> AbstractContextManager[None]:
    """Let the step count of one parameter be one behind, on one rank."""

    def spoil(inner: Any) -> None:
        if switcher.rank == 1:
            next(iter(inner.optimizer.state.values()))["step"] -= 1

    return _optimizer(switcher, spoil)


def changed_lr(switcher: Switcher) -> AbstractContextManager[None]:
    """Change the learning rate of the last parameter group by its lowest bits."""

    def spoil(inner: Any) -> None:
        inner.optimizer.param_groups[-1]["lr"] *= 1 + 2**-50

    return _optimizer(switcher, spoil)


def changed_weight_decay(switcher: Switcher) -> AbstractContextManager[None]:
    """Give the first parameter group another weight decay."""

    def spoil(inner: Any) -> None:
        inner.optimizer.param_groups[0]["weight_decay"] += 0.5

    return _optimizer(switcher, spoil)


def groups_left_out(switcher: Switcher) -> AbstractContextManager[None]:
    """Carry no value of a parameter group: the target has those of the configuration."""
    values: list[float] = []

    def note(inner: Any) -> None:
        values.extend(group["lr"] for group in inner.optimizer.param_groups)

    def spoil(inner: Any) -> None:
        for group in inner.optimizer.param_groups:
            group["lr"] = values.pop(0)

    return _optimizer(switcher, spoil, note=note)


def changed_scale(switcher: Switcher) -> AbstractContextManager[None]:
    """Halve the loss scale on one rank."""

    def spoil(inner: Any) -> None:
        if switcher.rank == 1:
            inner.grad_scaler._scale /= 2

    return _optimizer(switcher, spoil)


def scaler_left_out(switcher: Switcher) -> AbstractContextManager[None]:
    """Carry no loss scaler: the target has a new one, which has counted no good step."""
    states: list[dict[str, Any]] = []

    def note(inner: Any) -> None:
        state = inner.grad_scaler.state_dict()
        states.append({key: getattr(value, "clone", lambda value=value: value)() for key, value in state.items()})

    def spoil(inner: Any) -> None:
        inner.grad_scaler.load_state_dict(states.pop(0))

    return _optimizer(switcher, spoil, note=note)


@contextmanager
def stream_off_by_one(switcher: Switcher) -> Iterator[None]:
    """Draw one number after the streams were set, on one rank."""
    before = switcher.on_phase

    def draw_in_time(name: str) -> None:
        import torch

        before(name)
        if name == "verify/compare" and switcher.rank == 0:
            torch.rand(1)

    switcher.on_phase = draw_in_time
    try:
        yield
    finally:
        switcher.on_phase = before
