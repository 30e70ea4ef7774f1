"""A whole layout in one process: every rank built, described and checked, with the values that its memory must have."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.mcore.describe import ModelFacts, describe_local, facts_of, merge
from megatron_dynatrain.mcore.states import LiveState
from megatron_dynatrain.transport.messages import Memory
from megatron_dynatrain.verify import DigestTable, piece_digest
from megatron_dynatrain.vps.flat_buffer import BufferPolicy
from megatron_dynatrain.vps.placement import Piece, Placement
from megatron_dynatrain.vps.tensor import ITEMSIZE, ModelDescription, ParameterSpec
from tests.megatron_models.build import SimulatedRank
from tests.megatron_models.choice import ModelChoice
from tests.megatron_models.coordinates import Ids, bits_of, ids_by_memory

POISON = 0xA5
UNDIVIDED = ParallelLayout(dp=1)
_STEP = torch.tensor(3.0)


class World:
    """All ranks of a model under a layout.

    Args:
        model: The model.
        layout: The layout.
        bucket_size: Elements of a DDP bucket; None for one bucket.

    Attributes:
        description: The model, as the ranks' real objects describe it.
        placement: What the plugin predicts for the layout; checked against the real objects of every rank.
        memory: Rank -> slab name -> live flat tensor.
        ids: Rank -> slab name -> numbers of its elements.
    """

    def __init__(self, model: ModelChoice, layout: ParallelLayout, bucket_size: int | None) -> None:
        self.layout = layout
        self.memory: dict[int, Memory] = {}
        self.ids: dict[int, dict[str, Ids]] = {}
        self._live: dict[int, LiveState] = {}
        self._policy = BufferPolicy(bucket_size=bucket_size)
        predicted = None
        if layout != UNDIVIDED:
            predicted = Placement(world_of(model, UNDIVIDED, bucket_size).description, layout, self._policy)
        specs: dict[int, list[ParameterSpec]] = {}
        facts = set()
        for rank in layout.ranks:
            specs[rank], of_model = self._build(model, rank, predicted)
            facts.add(of_model)
        (the_facts,) = facts  # all ranks say the same of the whole model
        self.description = merge([specs[rank] for rank in sorted(specs)], the_facts)
        self.placement = Placement(self.description, layout, self._policy)
        if predicted is None:
            self._live[0].check(self.placement, moments=True)
        else:
            assert self.description == predicted.description, _first_difference(predicted.description, self.description)
        self._shapes = {part.key: part.shape for spec in self.description.parameters for part in spec.segments}
        self._digest: DigestTable | None = None

    def _build(
        self, model: ModelChoice, rank: int, predicted: Placement | None
    ) -> tuple[list[ParameterSpec], ModelFacts]:
        """Build a rank in the order of a switch: hollow, checked against the prediction, then with memory."""
        built = SimulatedRank(model, self.layout, rank, bucket_size=self._policy.bucket_size)
        with built.live():
            live = LiveState(built.chunks, built.optimizer, rank=rank)
            assert live.buffer_policy() == self._policy
            live.create_moments()
            live.set_step(_STEP)
            if predicted is not None:
                live.check(predicted, moments=True)
            live.realize()
            specs, facts = describe_local(built.chunks, self.layout), facts_of(built.chunks)
            found = ids_by_memory(built.chunks, built.optimizer)
        built.close()
        self._live[rank] = live
        self.memory[rank] = live.memory(moments=True)
        self.ids[rank] = {}
        for name, flat in self.memory[rank].items():
            ids = found.pop(flat.data_ptr())
            assert len(ids) == flat.numel(), (rank, name)
            self.ids[rank][name] = ids
        assert not found, f"rank {rank} holds {len(found)} tensors of state that are in no slab"
        return specs, facts

    def fill(self) -> None:
        """Give every element of every rank the value it must have."""
        for rank, memory in self.memory.items():
            for name, flat in memory.items():
                flat.view(torch.uint8).copy_(self._expected(rank, name, flat))

    def poison(self) -> None:
        """Give every byte of every rank a value that means nothing."""
        for memory in self.memory.values():
            for flat in memory.values():
                flat.view(torch.uint8).fill_(POISON)

    def wrong(self) -> list[str]:
        """Return a line for each slab of each rank that holds an element with another value than it must have."""
        lines = []
        for rank, memory in self.memory.items():
            for name, flat in memory.items():
                unequal = flat.view(torch.uint8) != self._expected(rank, name, flat)
                if bool(unequal.any()):
                    elements = unequal.view(-1, flat.element_size()).any(dim=1).nonzero().flatten().tolist()
                    lines.append(
                        f"rank {rank} {name}: {len(elements)} of {flat.numel()} elements, first {elements[:3]}"
                    )
        return lines

    def digest(self) -> DigestTable:
        """Return the digest of all ranks together; of memory that is as it must be, so it is computed once."""
        if self._digest is None:
            self._digest = DigestTable.compute(self.placement, self.memory[self.layout.ranks[0]], self.layout.ranks[0])
            for rank in self.layout.ranks[1:]:
                for piece in self.placement.pieces(rank):
                    self._add(self._digest, piece, self._digest_of(rank, piece))
        return self._digest

    def spoiled_digests(self) -> Iterator[tuple[str, DigestTable]]:
        """Yield what the digest is with one rank's memory spoiled, each time in another way; it is put right again."""
        draw = random.Random(len(self.ids))
        rank = draw.choice([rank for rank in self.layout.ranks if self.placement.pieces(rank)])
        pieces = self.placement.pieces(rank)
        piece = draw.choice(pieces)
        part = self.memory[rank][piece.slab][piece.offset : piece.offset + piece.box.numel].view(torch.uint8)
        at, bit = draw.randrange(part.numel()), 1 << draw.randrange(8)
        part[at] ^= bit
        yield "one bit turned", self._digest_now(rank, piece)
        part[at] ^= bit
        piece = draw.choice([piece for piece in pieces if piece.box.numel > 1] or [piece])
        part = self.memory[rank][piece.slab][piece.offset : piece.offset + piece.box.numel].view(torch.uint8)
        elements = part.view(piece.box.numel, -1)
        if not torch.equal(elements[0], elements[-1]):
            elements[[0, -1]] = elements[[-1, 0]]
            yield "two elements swapped", self._digest_now(rank, piece)
            elements[[0, -1]] = elements[[-1, 0]]

    def _digest_now(self, rank: int, piece: Piece) -> DigestTable:
        """Return the digest of all ranks, if nothing but one piece isn't as it must be."""
        expected = torch.from_numpy(bits_of(self.ids[rank][piece.slab], ITEMSIZE[piece.dtype]).view(np.uint8))
        clean = piece_digest(piece, expected.view(getattr(torch, piece.dtype)), self._shapes[piece.tensor])
        table = copy.copy(self.digest())
        table.sums = dict(table.sums)
        self._add(table, piece, self._digest_of(rank, piece) - clean)
        return table

    def _digest_of(self, rank: int, piece: Piece) -> int:
        return piece_digest(piece, self.memory[rank][piece.slab], self._shapes[piece.tensor])

    @staticmethod
    def _add(table: DigestTable, piece: Piece, value: int) -> None:
        key = (piece.tensor, piece.state)
        table.sums[key] = (table.sums.get(key, 0) + value) % 2**64

    def _expected(self, rank: int, name: str, flat: torch.Tensor) -> torch.Tensor:
        bits = bits_of(self.ids[rank][name], flat.element_size())
        return torch.from_numpy(bits.view(np.uint8))


@lru_cache(maxsize=64)
def world_of(model: ModelChoice, layout: ParallelLayout, bucket_size: int | None = None) -> World:
    """Return the world of a model under a layout; the last ones are kept."""
    return World(model, layout, bucket_size)


def _first_difference(expected: ModelDescription, found: ModelDescription) -> str:
    lines = ["a layout describes the model in another way than one rank that holds all of it:"]
    for one, other in zip(expected.parameters, found.parameters, strict=False):
        if one != other:
            return "\n".join([*lines, str(one), str(other)])
    return "\n".join([*lines, f"{len(expected.parameters)} parameters", f"{len(found.parameters)} parameters"])
