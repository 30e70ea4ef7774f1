"""Global names of a model's parameters and buffers: layer and expert numbers of the whole model, and the pipeline part.

Numbers come from the modules (`layer_number`, the experts' group), never from counting local ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dynatrain.errors import UnsupportedError
from megatron_dynatrain.vps.tensor import Home, Where

TIED_OUTPUT = "output_layer.weight"
MTP_COPY = "@mtp"
"""Suffix of the name of an embedding that a multi-token-prediction stage keeps beside the first stage's."""


@dataclass(frozen=True)
class GlobalName:
    """A name that is the same on every rank and in every layout.

    Args:
        name: Module path with global numbers.
        home: The part of the pipeline that holds it.
        expert: Global expert number; None for a dense parameter.
    """

    name: str
    home: Home
    expert: int | None = None


@dataclass(frozen=True)
class _Numbered:
    """A module path whose last component is a local number, and the path that replaces it."""

    prefix: str
    replacement: str
    number: int


class Names:
    """Gives the global name of every parameter and buffer of one chunk.

    Args:
        model: The unwrapped chunk.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = _layers(model)
        self._experts = _experts(model)
        self._grouped = _grouped_experts(model)
        self._embedding = {id(p) for p in _parameters_of(getattr(model, "embedding", None))}
        self._first = bool(getattr(model, "pre_process", True))

    @property
    def grouped_experts(self) -> bool:
        """Whether one linear holds the weights of all local experts."""
        return bool(self._grouped)

    def of(self, local_name: str, tensor: torch.Tensor) -> GlobalName:
        """Return the global name of a parameter or buffer."""
        name, expert = self._with_expert(local_name)
        for layer in self._layers:
            if name.startswith(layer.prefix):
                return GlobalName(
                    layer.replacement + name[len(layer.prefix) :], Home(Where.LAYER, layer.number), expert
                )
        if id(tensor) in self._embedding:
            if self._first:
                return GlobalName(name, Home(Where.FIRST), expert)
            return GlobalName(name + MTP_COPY, Home(Where.LAST_IF_SPLIT), expert)
        return GlobalName(name, Home(Where.LAST), expert)

    def _with_expert(self, local_name: str) -> tuple[str, int | None]:
        for item in self._experts:
            if local_name.startswith(item.prefix):
                return item.replacement + local_name[len(item.prefix) :], item.number
        for prefix, (parent, first) in self._grouped.items():
            if local_name.startswith(prefix):
                leaf = local_name[len(prefix) :]
                stem = leaf.rstrip("0123456789")
                if stem == leaf:
                    raise UnsupportedError(
                        "a parameter of grouped experts has no expert's number, so it holds all of them",
                        subject=local_name,
                        expected="a weight and a bias of each expert",
                        hint="train without --moe-single-grouped-weight and --moe-single-grouped-bias",
                    )
                number = first + int(leaf[len(stem) :])
                return f"{parent}experts.{number}.{prefix[len(parent) :]}{stem}", number
        return local_name, None


def _layers(model: torch.nn.Module) -> list[_Numbered]:
    """Return the transformer layers of the decoder (or encoder), by Megatron's one-based `layer_number`."""
    found = []
    for block_name in ("decoder", "encoder"):
        block = getattr(model, block_name, None)
        for local, layer in enumerate(getattr(block, "layers", None) or ()):
            number = layer.layer_number - 1
            path = f"{block_name}.layers."
            found.append(_Numbered(f"{path}{local}.", f"{path}{number}.", number))
    return found


def _experts(model: torch.nn.Module) -> list[_Numbered]:
    """Return the modules of single experts (`SequentialMLP.local_experts`)."""
    found = []
    for path, module in model.named_modules():
        experts = getattr(module, "local_experts", None)
        if isinstance(experts, torch.nn.ModuleList):
            first = module.ep_group.rank() * module.num_local_experts
            for local in range(len(experts)):
                prefix = f"{path}.local_experts.{local}."
                found.append(_Numbered(prefix, f"{path}.experts.{first + local}.", first + local))
    return found


def _grouped_experts(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    """Return the linears that hold one numbered weight per local expert (Transformer Engine's grouped linears).

    Maps the linear's prefix to (prefix of the module around it, first global expert).
    """
    found = {}
    for path, module in model.named_modules():
        count = getattr(module, "num_local_experts", None)
        group = getattr(module, "ep_group", None)
        if count is None or group is None or hasattr(module, "local_experts"):
            continue
        for child_name, child in module.named_children():
            if getattr(child, "num_gemms", None) == count:
                found[f"{path}.{child_name}."] = (f"{path}.", group.rank() * count)
    return found


def _parameters_of(module: torch.nn.Module | None) -> list[torch.nn.Parameter]:
    return [] if module is None else list(module.parameters())
