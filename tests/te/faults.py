"""Faults that te-check puts into a target's memory, one for each kind of state: each must be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.te.cases import Case


@dataclass(frozen=True)
class Fault:
    """A fault: what it does, in which switch, the state whose witness bits must be seen to be wrong."""

    words: str
    case: Case
    spoil: Any
    seen: str


def _parameter(chunks: Any, ending: str) -> Any:
    return next(p for name, p in chunks[0].named_parameters() if name.endswith(ending))


def _owned(optimizer: Any, chunks: Any, ending: str) -> Any:
    """Return the first run that the rank owns of parameters whose names end so: (state dict, group)."""
    names = {p: name for name, p in chunks[0].named_parameters()}
    for inner in optimizer.chained_optimizers:
        for parameter, (group, order) in getattr(inner, "model_param_group_index_map", {}).items():
            if names[parameter].endswith(ending):
                settings = inner.optimizer.param_groups[group]
                return inner.optimizer.state[settings["params"][order]], settings
    raise LookupError(ending)


def _swap(first: Any, second: Any) -> None:
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def gate_and_up_swapped(chunks: Any, optimizer: Any) -> None:
    _swap(*_parameter(chunks, "layers.0.mlp.linear_fc1.weight").data.chunk(2))


def norm_left_out(chunks: Any, optimizer: Any) -> None:
    _parameter(chunks, "linear_qkv.layer_norm_weight").data.fill_(1)


def experts_swapped(chunks: Any, optimizer: Any) -> None:
    _swap(*(_parameter(chunks, f"layers.1.mlp.experts.linear_fc2.weight{n}").data for n in (0, 1)))


def bias_of_router_left_out(chunks: Any, optimizer: Any) -> None:
    next(b for name, b in chunks[0].named_buffers() if name.endswith("expert_bias")).zero_()


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def moment_lost(chunks: Any, optimizer: Any) -> None:
    _bits(_owned(optimizer, chunks, "linear_fc2.weight")[0]["exp_avg"])[5:6].zero_()


def moments_swapped(chunks: Any, optimizer: Any) -> None:
    state, _ = _owned(optimizer, chunks, "linear_fc2.weight")
    _swap(_bits(state["exp_avg"]), _bits(state["exp_avg_sq"]))


def remainders_left_out(chunks: Any, optimizer: Any) -> None:
    _owned(optimizer, chunks, "linear_proj.weight")[0]["master_param"].zero_()


def main_rounded(chunks: Any, optimizer: Any) -> None:
    main = _owned(optimizer, chunks, "linear_proj.weight")[0]["master_param"]
    main.copy_(main.bfloat16())


def copy_left_out(chunks: Any, optimizer: Any) -> None:
    _owned(optimizer, chunks, "linear_proj.weight")[0]["master_param"].zero_()


def main_on_host_lost(chunks: Any, optimizer: Any) -> None:
    hybrid = optimizer.chained_optimizers[0].optimizer
    next(iter(hybrid.gpu_params_map_cpu_copy.values())).data.zero_()


def step_lost(chunks: Any, optimizer: Any) -> None:
    _owned(optimizer, chunks, "linear_proj.weight")[1]["step"] = 0


def _parts(chunks: Any, ending: str, sizes: Any) -> Any:
    return _parameter(chunks, ending).data.split(sizes)


def packed_parts_swapped(chunks: Any, optimizer: Any) -> None:
    """Swap z and x of Mamba's packed projection, at tp 2: 32 rows each."""
    _swap(*_parts(chunks, "layers.0.mixer.in_proj.weight", [32, 32, 32, 32, 4])[:2])


def convolution_swapped(chunks: Any, optimizer: Any) -> None:
    """Swap B and C of Mamba's convolution, at tp 2."""
    _swap(*_parts(chunks, "layers.0.mixer.conv1d_weight", [32, 32, 32])[1:])


def delta_parts_swapped(chunks: Any, optimizer: Any) -> None:
    """Swap query and key of the gated delta net's convolution, at tp 2."""
    _swap(*_parts(chunks, "layers.0.self_attention.conv1d.weight", [16, 16, 32])[:2])


def _case(model: str, optimizer: str, target: Any) -> Case:
    return Case(model, optimizer, 2, {}, target)


def faults() -> Iterator[Fault]:
    """Yield every fault."""
    tp, ep = {"tp": 2}, {"ep": 2}
    yield Fault("gate and up swapped", _case("gpt", "plain", tp), gate_and_up_swapped, "linear_fc1.weight param")
    yield Fault(
        "norm weight of linear_qkv left at 1", _case("gpt", "plain", tp), norm_left_out, "layer_norm_weight param"
    )
    yield Fault("two grouped experts swapped", _case("gpt-moe", "plain", ep), experts_swapped, "weight0 param")
    yield Fault("router's bias left at 0", _case("gpt-moe", "plain", ep), bias_of_router_left_out, "expert_bias param")
    yield Fault("one element of a fp32 moment lost", _case("gpt", "plain", tp), moment_lost, "exp_avg")
    yield Fault("bf16 moments swapped", _case("gpt", "remainders-bf16", tp), moments_swapped, "exp_avg")
    yield Fault("remainders not written", _case("gpt", "remainders", tp), remainders_left_out, "master_param")
    yield Fault("main parameter rounded to bf16", _case("gpt", "aware", tp), main_rounded, "master_param")
    yield Fault("copy of fp32 parameters not made", _case("gpt-fp32", "aware", tp), copy_left_out, "master_param")
    yield Fault("main parameter on the host lost", _case("gpt", "offloaded", tp), main_on_host_lost, "master_param")
    yield Fault("step lost", _case("gpt", "remainders", tp), step_lost, "step")
    yield Fault(
        "z and x of in_proj swapped", _case("hybrid-mamba", "plain", tp), packed_parts_swapped, "in_proj.weight param"
    )
    yield Fault(
        "B and C of the convolution swapped",
        _case("hybrid-mamba", "plain", tp),
        convolution_swapped,
        "conv1d_weight param",
    )
    yield Fault(
        "query and key of the convolution swapped",
        _case("hybrid-gdn", "plain", tp),
        delta_parts_swapped,
        "conv1d.weight param",
    )
