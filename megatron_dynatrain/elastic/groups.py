"""Process groups that belong to one world: made once per distinct (ordered ranks, backend, options), destroyed once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

from megatron_dynatrain.errors import TransferError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

GroupKey = tuple[tuple[int, ...], str, int]
"""(ordered global ranks, backend, identity of the backend options)."""


class WorldGroups:
    """Factory and owner of the process groups of one world.

    Groups are named from the world's own tag and rendezvous over the given store, so that neither the counter of
    `torch.distributed.new_group` nor the groups of another world can mix with them. Only members take part in making a
    group, and every member makes its groups in the same order (the caller's duty: one creator thread, one order).

    Args:
        store: Store that all ranks of the world share.
        ranks: Global ranks of the world.
        rank: This process's global rank.
        tag: Name of the world; unique per store for ever.
        backend: Default backend of a group (`gloo`, `nccl`, or a per-device string).
        timeout: Longest wait inside a group operation, in seconds.
        numbering: Global ranks in the order of the default group's ranks; ascending where None.

    A global rank here is the number a process was launched with. `torch.distributed` calls global rank the rank in the
    default group, which is another number once a world with its own order of ranks is the default.
    """

    def __init__(
        self,
        store: Store,
        *,
        ranks: Sequence[int],
        rank: int,
        tag: str,
        backend: str,
        timeout: float,
        numbering: Sequence[int] | None = None,
    ) -> None:
        self.store = store
        self.ranks = tuple(ranks)
        self.rank = rank
        self.tag = tag
        self.backend = backend
        self.timeout = timedelta(seconds=timeout)
        self._numbering = tuple(numbering) if numbering is not None else tuple(sorted(self.ranks))
        self._groups: dict[GroupKey, ProcessGroup] = {}
        self._sequence: dict[tuple[int, ...], int] = {}
        self._keys: list[str] = []

    def group(
        self, ranks: Sequence[int] | None = None, *, backend: str | None = None, options: object = None
    ) -> ProcessGroup | object:
        """Return the group of these global ranks, made on first use; `NON_GROUP_MEMBER` where this rank is outside.

        Collective over the members on first use.

        Raises:
            TransferError: The members did not meet within the world's timeout.
        """
        members = tuple(ranks) if ranks is not None else self.ranks
        chosen = backend or self.backend
        # Every rank counts every request, members or not: the name of a group must not depend on who asks.
        if self.rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        key = (members, chosen, id(options) if options is not None else 0)
        if key not in self._groups:
            self._groups[key] = self._make(members, chosen, options)
        return self._groups[key]

    def _make(self, members: tuple[int, ...], backend: str, options: object) -> ProcessGroup:
        # Members alone count their groups of the same ranks, in their common order of creation.
        number = self._sequence.get(members, 0)
        self._sequence[members] = number + 1
        name = f"{self.tag}/{'.'.join(map(str, members))}/{backend}/{number}"
        self._keys += [f"{self.tag}//{name}//{key}" for key in _rendezvous_keys(members.index(self.rank))]
        try:
            group, _ = distributed_c10d._new_process_group_helper(
                len(members),
                members.index(self.rank),
                self._numbers(members),
                backend,
                PrefixStore(f"{self.tag}/", self.store),
                group_name=name,
                backend_options=options,
                timeout=self.timeout,
                group_desc=name,
            )
        except RuntimeError as error:
            raise TransferError(
                "a process group could not be made",
                rank=self.rank,
                phase="prepare",
                subject=name,
                expected=f"all of ranks {members} within {self.timeout.total_seconds():g} s",
                got=str(error),
                hint="see the log of the ranks that did not come",
            ) from error
        # Who addresses a member by its global rank does so when this world is the default one.
        own_numbering = {rank: index for index, rank in enumerate(self.ranks)}
        distributed_c10d._world.pg_group_ranks[group] = {own_numbering[m]: index for index, m in enumerate(members)}
        return group

    def _numbers(self, members: tuple[int, ...]) -> list[int]:
        """Return the members by their rank in the default group, which torch asks for to see that this one belongs.

        Where some are not in it (they are about to join), only this rank's own number means anything.
        """
        if set(members) <= set(self._numbering):
            return [self._numbering.index(member) for member in members]
        own, others = self._numbering.index(self.rank), len(self._numbering)
        return [own if member == self.rank else others + index for index, member in enumerate(members)]

    def __len__(self) -> int:
        """Number of distinct groups that this rank is a member of."""
        return len(self._groups)

    def destroy(self, *, abort: bool = False) -> None:
        """Destroy every group of this world and what this rank wrote to meet the others; not collective.

        Safe to call twice. Every member has met the others by then, or never will: a group is destroyed after a commit
        to which all have agreed, or when the world is dropped.
        """
        groups = dict(self._groups)
        self._groups.clear()
        destroy_groups(list(groups.values()), abort=abort)
        delete_keys(self.store, self._keys)
        self._keys.clear()


def _rendezvous_keys(group_rank: int) -> list[str]:
    """Return what torch writes to the store of a group for this member: gloo one address each, NCCL one id in all."""
    return [f"cpu//0/{group_rank}", *(["cuda//0"] if group_rank == 0 else [])]


def delete_keys(store: Store, keys: Sequence[str]) -> None:
    """Delete keys where the store can (all of torch's can but a read-only one); absent ones are passed over. Local."""
    for key in keys:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store.delete_key(key)


def destroy_groups(groups: Sequence[object], *, abort: bool = False) -> int:
    """Destroy the given process groups once each, the default group excepted, and return how many were destroyed.

    Not collective. Groups that are already gone, None and `NON_GROUP_MEMBER` are passed over. gloo closes a group's
    connections when the last reference to it goes.

    Args:
        groups: The groups.
        abort: Whether operations may be in flight that will never end, as a peer has failed: NCCL would wait for them.
    """
    world = distributed_c10d._world
    destroyed = 0
    for group in groups:
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or group is dist.group.WORLD:
            continue
        if world.pg_map.get(group) is None:  # type: ignore[call-overload]
            continue
        tag = world.pg_to_tag.get(group)  # type: ignore[call-overload]
        if abort and "nccl" in str(world.pg_map[group][0]):  # type: ignore[index]
            group.abort()  # type: ignore[attr-defined]
        dist.destroy_process_group(group)  # type: ignore[arg-type]
        # torch leaves an empty list under the tag of every group that ever was.
        if tag is not None and not world.tags_to_pg.get(tag, [None]):
            del world.tags_to_pg[tag]
        destroyed += 1
    return destroyed


def make_default(group: object) -> None:
    """Make `group` the default group of torch.distributed from now on; local, on every rank at the same boundary."""
    distributed_c10d._update_default_pg(group)  # type: ignore[arg-type]


def live_groups() -> int:
    """Return how many process groups this process holds, the default group included."""
    return len(distributed_c10d._world.pg_map)


@contextmanager
def default_group(group: object) -> Iterator[None]:
    """Make `group` the default group of torch.distributed inside the block; not collective.

    Megatron's optimizer gathers over the default group while it is built. Inside the block that is the new world's own
    group, with the new world's deadline.
    """
    before = distributed_c10d._world.default_pg
    distributed_c10d._update_default_pg(group)  # type: ignore[arg-type]
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)
