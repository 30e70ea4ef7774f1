"""Proof that the state after a transfer is the state before it, without gathering any of it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_dynatrain.errors import StateError, VerificationError
from megatron_dynatrain.mcore.optimizers import SharedValues
from megatron_dynatrain.mcore.states import LiveState
from megatron_dynatrain.vps.digest import digest_box, digest_key
from megatron_dynatrain.vps.placement import WHOLE, Piece, Placement
from megatron_dynatrain.vps.region import Box
from megatron_dynatrain.vps.tensor import ITEMSIZE, ModelDescription, StateKind

Key = tuple[str, StateKind]
_SHOWN = 4
_CTYPES = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


def piece_digest(piece: Piece, flat: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Return the digest of one piece's bits at its canonical coordinates, modulo 2**64."""
    size = ITEMSIZE[piece.dtype]
    part = flat[piece.offset : piece.offset + piece.box.numel].contiguous().cpu()
    bits = _bits(part, size).reshape(piece.box.shape)
    return digest_box(bits, piece.box, shape, digest_key(piece.tensor, piece.state))


def _bits(part: torch.Tensor, size: int) -> np.ndarray:
    """Return the bits of a dense CPU tensor as unsigned integers, without a copy.

    `Tensor.numpy()` would do, but marks the storage as one that can't be resized, and old buffers are freed so.
    """
    kind = _CTYPES[size] * part.numel()
    return np.ctypeslib.as_array(kind.from_address(part.data_ptr()))


@dataclass
class DigestTable:
    """One rank's share of the digest of every (tensor, state), and how often a layout holds each element.

    Args:
        sums: Sum of the digests of this rank's pieces, per (tensor, state), modulo 2**64.
        copies: In how many places the layout holds each element, over all ranks.
        holders: Ranks that hold each tensor, for messages.
    """

    sums: dict[Key, int]
    copies: dict[Key, int]
    holders: dict[Key, tuple[int, ...]]

    @classmethod
    def compute(
        cls,
        placement: Placement,
        memory: Mapping[str, torch.Tensor],
        rank: int,
        *,
        skip: Iterable[StateKind] = (),
        once: bool = False,
    ) -> DigestTable:
        """Digest this rank's state; local, reads every byte of it once.

        Args:
            placement: What each rank holds.
            memory: This rank's memory, by slab name.
            rank: Global rank.
            skip: States that are left out.
            once: Count each box on the first rank that holds it only: where ranks are lost, some replicas are missing.
        """
        skipped = frozenset(skip)
        shapes = placement.shapes()
        counted: dict[Key, set[Box]] = {}
        sums: dict[Key, int] = {}
        volumes: dict[Key, int] = {}
        holders: dict[Key, list[int]] = {}
        for other in sorted(placement.ranks):
            for piece in placement.pieces(other):
                key = (piece.tensor, piece.state)
                if piece.state in skipped or (once and piece.box in counted.setdefault(key, set())):
                    continue
                if once:
                    counted[key].add(piece.box)
                volumes[key] = volumes.get(key, 0) + piece.box.numel
                if other not in holders.setdefault(key, []):
                    holders[key].append(other)
                if other == rank:
                    value = piece_digest(piece, memory[piece.slab], shapes[piece.tensor])
                    sums[key] = (sums.get(key, 0) + value) % 2**64
        copies = {key: _whole_copies(key, volume, shapes[key[0]]) for key, volume in volumes.items()}
        return cls(sums, copies, {key: tuple(ranks) for key, ranks in holders.items()})

    def compare(self, after: DigestTable, group: dist.ProcessGroup) -> None:
        """Compare the whole state before (self) and after; collective over `group`, two integers per (tensor, state).

        Each element is counted as often as its layout holds it, so the sums are compared as
        `copies_after * sum_before == copies_before * sum_after` modulo 2**64: one wrong replica fails.

        Raises:
            VerificationError: The first tensors and states that differ, on every rank.
        """
        keys = sorted(self.copies, key=lambda key: (key[0], key[1].value))
        if keys != sorted(after.copies, key=lambda key: (key[0], key[1].value)):
            changed = sorted({f"{t} {s}" for t, s in self.copies.keys() ^ after.copies.keys()})
            raise VerificationError("states appeared or vanished in the switch", phase="verify", subject=str(changed))
        local = [self.sums.get(key, 0) for key in keys] + [after.sums.get(key, 0) for key in keys]
        total = torch.from_numpy(np.array(local, dtype=np.uint64).view(np.int64).copy())
        dist.all_reduce(total, group=group)
        sums = [int(value) % 2**64 for value in total.tolist()]
        wrong = []
        for key, before, now in zip(keys, sums[: len(keys)], sums[len(keys) :], strict=True):
            if (after.copies[key] * before - self.copies[key] * now) % 2**64:
                wrong.append(key)
        if wrong:
            names = ", ".join(
                f"{tensor} {state.value} (ranks {list(after.holders[tensor, state])})"
                for tensor, state in wrong[:_SHOWN]
            )
            raise VerificationError(
                f"{len(wrong)} of {len(keys)} states are not what they were before the switch",
                phase="verify",
                subject=names + (" ..." if len(wrong) > _SHOWN else ""),
                expected="equal digests of every tensor and state, in every replica",
                hint="the old layout trains on; please report the layouts and this line",
            )


def _whole_copies(key: Key, volume: int, shape: tuple[int, ...]) -> int:
    """Return how often a layout holds a tensor whole.

    Raises:
        VerificationError: Some elements more often than others, which sums can't be compared for.
    """
    copies, rest = divmod(volume, math.prod(shape))
    if rest:
        raise VerificationError(
            "a layout holds some elements of a tensor more often than others",
            phase="verify",
            subject=f"{key[0]} {key[1].value}",
            expected=f"a multiple of {math.prod(shape)} elements over all ranks",
            got=volume,
        )
    return copies


def check_replicas(table: DigestTable, tensors: Collection[str], group: dist.ProcessGroup, *, rank: int) -> None:
    """Check that data-parallel replicas hold equal parameters and buffers; collective over `group`.

    Args:
        table: The digests of this rank.
        tensors: Logical tensors to look at; of these the ranks of the group hold the same.
        group: Ranks that hold the same shards of the same stage.
        rank: Global rank, for the message.

    Raises:
        VerificationError: Names the first tensors that differ between replicas.
    """
    keys = sorted(key for key in table.sums if key[1] in WHOLE and key[0] in tensors)
    own = torch.from_numpy(np.array([table.sums[key] for key in keys], dtype=np.uint64).view(np.int64).copy())
    least, most = own.clone(), own.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    wrong = [f"{tensor} {state.value}" for (tensor, state), a, b in zip(keys, least, most, strict=True) if a != b]
    if wrong:
        raise VerificationError(
            f"{len(wrong)} of {len(keys)} tensors differ between data-parallel replicas",
            rank=rank,
            phase="verify",
            subject=", ".join(wrong[:_SHOWN]),
            expected="equal bits on every replica",
            hint="if they differed before the switch, the job was already training on unequal replicas",
        )


def check_casts(live: LiveState, *, rank: int) -> None:
    """Check that each 16-bit parameter is the cast of its main parameter, bit for bit, where this rank owns it; local.

    Raises:
        VerificationError: Names the first parameter that is stale.
    """
    for item in live.named:
        run = live.runs.get(item.tensor)
        if run is None:
            continue
        copy = run.copy_of_main()
        if copy is not None and not torch.equal(copy.view(torch.int32), run.main.detach().to(copy).view(torch.int32)):
            raise VerificationError(
                "the optimizer's copy is not the main parameter",
                rank=rank,
                phase="verify",
                subject=f"{item.name} main_param",
                expected="equal bits",
            )
        if item.tensor.dtype == torch.float32:
            continue
        held = item.tensor.detach().view(-1)[run.start : run.stop]
        main = run.main_param()
        if main is None or main.dtype == torch.int16:
            continue  # remainders: the parameter is itself the upper half of the main parameter
        cast = main.detach().view(-1).to(held.device, held.dtype)
        if not torch.equal(held.view(torch.int16), cast.view(torch.int16)):
            count = int((held.view(torch.int16) != cast.view(torch.int16)).sum())
            raise VerificationError(
                "a model parameter is not the cast of its main parameter",
                rank=rank,
                phase="verify",
                subject=f"{item.name} param and main_param, elements [{run.start}, {run.stop})",
                expected="equal bits after the cast",
                got=f"{count} elements differ",
            )


def check_scalars(before: LiveState, after: LiveState, shared: SharedValues, *, rank: int) -> None:
    """Check step count, learning rates, weight decay and loss scale of the target's optimizer; local.

    Args:
        before: The source.
        after: The target.
        shared: What the ranks together had of groups and scaler before.
        rank: Global rank, for the message.

    Raises:
        VerificationError: Names the value that changed.
    """
    expected = shared.scalars() | {"step": sorted(before.steps())}
    got = SharedValues.of(after.optimizer).scalars() | {"step": sorted(after.steps())}
    for key in sorted(got):
        if key == "step" and not (before.runs and after.runs):
            continue  # a rank that owns nothing on one side counts nothing there
        if got[key] != expected.get(key):
            raise VerificationError(
                "a value of the optimizer changed in the switch",
                rank=rank,
                phase="verify",
                subject=key,
                expected=expected.get(key),
                got=got[key],
            )


def dense_and_experts(description: ModelDescription) -> tuple[set[str], set[str]]:
    """Return the keys of the dense logical tensors and those of the experts, which have replicas of their own; pure."""
    keys: tuple[set[str], set[str]] = set(), set()
    for spec in description.parameters:
        keys[spec.expert is not None].update(segment.key for segment in spec.segments)
    return keys


def check_same_bits(
    placement: Placement,
    sent: Mapping[str, torch.Tensor],
    back: Mapping[str, torch.Tensor],
    rank: int,
    *,
    skip: Collection[StateKind] = (),
) -> None:
    """Check that what a rank sent came back from the target as it was; local.

    Raises:
        StateError: Names the first local memory with other bits.
    """
    for piece in placement.pieces(rank):
        if piece.state in skip:
            continue
        ours, theirs = (of[piece.slab][piece.offset :][: piece.box.numel] for of in (sent, back))
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            raise StateError(
                "state came back from the target with other bits", rank=rank, phase="verify", subject=piece.slab
            )
