"""Random streams across a switch: kept where the coordinate still exists, derived anew where it doesn't.

The rule, the same for Python, NumPy, torch CPU, CUDA and Megatron's tracker: a stream belongs to a model-parallel
coordinate (index of pp, tp, ep, etp, and the sizes of these axes). If the sizes stay, each coordinate keeps its streams
wherever it moves to. If any of the sizes changes, every coordinate of the new layout gets new streams, seeded by
Megatron's own formula from a base that is a function of (seed, number of the switch).
"""

from __future__ import annotations

import hashlib
import pickle
import random
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_dynatrain.layout import ParallelLayout

_TRACKER = "tracker/"
_HEADROOM = 2**24
"""Room above the base seed for Megatron's offsets (100 * pp, 2718 + tp, 1024 + 100 * ep + etp)."""

Coordinate = tuple[tuple[str, int, int], ...]


def coordinate_of(layout: ParallelLayout, rank: int) -> Coordinate:
    """Return the owner of a rank's random streams as (axis, index, size) triples; equal on data-parallel replicas."""
    dense, expert = layout.coordinate(rank), layout.coordinate(rank, expert=True)
    return (
        ("pp", dense["pp"], layout.pp),
        ("tp", dense["tp"], layout.tp),
        ("ep", expert["ep"], layout.ep),
        ("etp", expert["tp"], layout.etp),
    )


def sizes_of(layout: ParallelLayout) -> tuple[int, int, int, int]:
    """Return the sizes that decide whether streams are kept."""
    return layout.pp, layout.tp, layout.ep, layout.etp


@dataclass(frozen=True)
class RandomStreams:
    """The state of every random stream of one process, by name."""

    states: dict[str, bytes]

    @classmethod
    def capture(cls) -> RandomStreams:
        """Return the streams of this process as they are."""
        states = {
            "python": pickle.dumps(random.getstate()),
            "numpy": pickle.dumps(np.random.get_state()),
            "torch": _raw(torch.get_rng_state()),
        }
        if torch.cuda.is_available():
            states["cuda"] = _raw(torch.cuda.get_rng_state())
        if megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED:
            for name, state in megatron_random.get_cuda_rng_tracker().get_states().items():
                states[_TRACKER + name] = _raw(state)
        return cls(states)

    def restore(self) -> None:
        """Set the streams of this process to these states."""
        random.setstate(pickle.loads(self.states["python"]))
        np.random.set_state(pickle.loads(self.states["numpy"]))
        torch.set_rng_state(_tensor(self.states["torch"]))
        if "cuda" in self.states:
            torch.cuda.set_rng_state(_tensor(self.states["cuda"]))
        tracked = {k.removeprefix(_TRACKER): _tensor(v) for k, v in self.states.items() if k.startswith(_TRACKER)}
        if tracked:
            megatron_random.get_cuda_rng_tracker().set_states(tracked)

    def digests(self) -> dict[str, str]:
        """Return a digest of each stream, by name."""
        return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in self.states.items()}


def derived_base(seed: int, switch_number: int) -> int:
    """Return the base seed after the given switch: positive, below 2**31 with room for Megatron's offsets."""
    text = f"dynatrain:{seed}:{switch_number}".encode()
    return 1 + int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % (2**31 - _HEADROOM)


def derive(layout: ParallelLayout, rank: int, *, seed: int, switch_number: int) -> RandomStreams:
    """Return the streams of a rank's coordinate after the given switch; leaves the process's own streams alone."""
    dense, expert = layout.coordinate(rank), layout.coordinate(rank, expert=True)
    stage_seed = derived_base(seed, switch_number) + 100 * dense["pp"]
    before = RandomStreams.capture()
    try:
        random.seed(stage_seed)
        np.random.seed(stage_seed)
        torch.manual_seed(stage_seed)
        if megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED:
            megatron_random.model_parallel_cuda_manual_seed(
                stage_seed, tp_rank=dense["tp"], ep_rank=expert["ep"], etp_rank=expert["tp"]
            )
        return RandomStreams.capture()
    finally:
        before.restore()


def _raw(state: torch.Tensor) -> bytes:
    return bytes(state.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
