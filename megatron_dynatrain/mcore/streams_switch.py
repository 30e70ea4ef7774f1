"""Give a rank the random streams of its new coordinate, and prove that it has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.random_streams import (
    Coordinate,
    RandomStreams,
    coordinate_of,
    derive,
    derived_base,
    sizes_of,
)

Gather = Callable[[str, object], Mapping[int, tuple]]
"""Gathers a small value of every rank, by rank; collective."""


def streams_after(
    source: ParallelLayout,
    target: ParallelLayout,
    rank: int,
    *,
    own: RandomStreams,
    gather: Gather,
    seed: int,
    number: int,
) -> RandomStreams:
    """Return the streams that a rank has after a switch; collective. One that leaves keeps its own.

    Args:
        source: Layout before.
        target: Layout after.
        rank: Global rank.
        own: The rank's streams before.
        gather: Gathers over all ranks.
        seed: The job's seed.
        number: Number of this switch, from 1.
    """
    stays = rank in target.ranks
    if sizes_of(source) != sizes_of(target):
        return own if not stays else derive(target, rank, seed=seed, switch_number=number)
    owner: Coordinate | None = coordinate_of(source, rank) if rank in source.ranks else None
    offered = gather("streams", (owner, own))
    if not stays:
        return own
    wanted = coordinate_of(target, rank)
    for _, (coordinate, streams) in sorted(offered.items()):
        if coordinate == wanted:
            return streams  # type: ignore[no-any-return]
    raise StateError(
        "no rank is left that has the random streams of a coordinate",
        rank=rank,
        phase="verify",
        subject=" ".join(f"{axis}={index}" for axis, index, _ in wanted),
    )


def rule_of(source: ParallelLayout, target: ParallelLayout, *, seed: int, number: int) -> str:
    """Return in words where the random streams after a switch come from, for its record; pure."""
    if sizes_of(source) == sizes_of(target):
        return "kept by coordinate"
    return f"new: base seed {derived_base(seed, number)} of seed {seed} and switch {number}"


def check_streams(target: ParallelLayout, rank: int, expected: RandomStreams, *, gather: Gather) -> None:
    """Check the process's streams against the expected ones, and that replicas have equal ones; collective.

    Raises:
        StateError: Names rank and stream, the same on every rank that sees it.
    """
    live = RandomStreams.capture().digests()
    wanted = expected.digests()
    # Before the first check: a rank that fails must not let the others wait for its part.
    stays = rank in target.ranks
    everyone = gather("stream digests", (coordinate_of(target, rank) if stays else None, live))
    for name in sorted(wanted.keys() | live.keys()):
        if live.get(name) != wanted.get(name):
            raise StateError(
                "a random stream is not where it should be after the switch",
                rank=rank,
                phase="verify",
                subject=f"random stream {name}",
                expected=wanted.get(name),
                got=live.get(name),
            )
    first: dict[Coordinate, tuple[int, dict[str, str]]] = {}
    for other, (coordinate, digests) in sorted(everyone.items()):
        if coordinate is None:
            continue
        known_rank, known = first.setdefault(coordinate, (other, digests))
        for name, digest in digests.items():
            if known.get(name) != digest:
                raise StateError(
                    "replicas have different random streams",
                    rank=other,
                    phase="verify",
                    subject=f"random stream {name} of {' '.join(f'{axis}={index}' for axis, index, _ in coordinate)}",
                    expected=f"{known.get(name)} as on rank {known_rank}",
                    got=digest,
                )
