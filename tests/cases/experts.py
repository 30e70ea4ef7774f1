"""Which layer and which expert a parameter belongs to, on whatever rank it is."""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """Global numbers of a parameter.

    Attributes:
        layer: Zero-based layer; None outside of the layers.
        expert: Global expert; None for what every expert-parallel rank holds.
        shared: Whether it is of the shared expert.
    """

    layer: int | None
    expert: int | None
    shared: bool


def places(job: Any) -> dict[str, Place]:
    """Return the place of each parameter on this rank, by its local name; numbers are worked out from the layout."""
    layout, rank = job.layout, job.rank
    dense, expert = layout.coordinate(rank), layout.coordinate(rank, expert=True)
    layers, experts = 4 // layout.pp, 4 // layout.ep
    found = {}
    for name in job.parameters():
        parts = name.split(".")
        layer = dense["pp"] * layers + int(parts[2]) if name.startswith("decoder.layers.") else None
        number = expert["ep"] * experts + int(parts[6]) if ".local_experts." in name else None
        found[name] = Place(layer, number, ".shared_experts." in name)
    return found


def value(place: Place) -> float:
    """Return what a parameter is filled with: expert e of layer l with 100 l + 10 e, a shared one with 1000 l."""
    if place.layer is None:
        return 7.0
    if place.shared:
        return 1000.0 * place.layer
    return 100.0 * place.layer + (3.0 if place.expert is None else 10.0 * place.expert)
