"""What a rank holds, counted after every switch; importing this imports no Megatron."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_OF_A_WORLD = ("megatron.", "megatron_dynatrain.", "torch.nn.", "torch.optim.", "torch.distributed.", "torch.utils.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What one rank holds after `switches` switches.

    Attributes:
        groups: Process groups that torch.distributed lists.
        registries: Entries in all tables of torch.distributed that are keyed by group, name or tag.
        names: Names of groups, of all there ever were, that the registry in C++ still resolves.
        threads: Threads of the process, as the kernel counts them.
        own: Threads that Python started: the training thread, and those that listen for requests.
        descriptors: Open file descriptors, without the reports that are just being written or listed.
        children: Child processes: workers of data loaders.
        modules: Live torch modules.
        tensors: Live tensors that Python knows.
        objects: Class -> live objects, of classes that a world or a switch is made of.
        store_keys: Keys in the store that all ranks share.
        resident: Resident memory, in bytes.
    """

    switches: int
    groups: int
    registries: int
    names: int
    threads: int
    own: int
    descriptors: int
    children: int
    modules: int
    tensors: int
    objects: dict[str, int]
    store_keys: int
    resident: int


def count_after_switches(run: PretrainRun) -> None:
    """Take a census before the first step and before the first step after each switch, in `extra["census"]`."""
    # Arrays of some megabytes, like the index of the mock data set that every switch makes anew, go back to the system
    # when they are freed. glibc would raise this threshold with each of them, and the heap would fill with holes.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    found: list[Census] = run.record.extra.setdefault("census", [])
    names: set[str] = set()

    def before_step(model: Any, optimizer: Any, scheduler: Any) -> None:
        job = run.plugin.segments.job
        committed = job.switcher.committed if job is not None else 0
        if not found or found[-1].switches != committed:
            found.append(_census(committed, names))

    run.before_step.append(before_step)


def _census(switches: int, names: set[str]) -> Census:
    import torch
    from torch.distributed import distributed_c10d as c10d

    from megatron_dynatrain.elastic.groups import live_groups
    from megatron_dynatrain.mcore.teardown import live_modules

    gc.collect()
    world = c10d._world
    names.update(world.pg_names.values())
    tables = (world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag, world.pg_coalesce_state)
    tagged = len(world.tags_to_pg) + sum(map(len, world.tags_to_pg.values()))
    kinds = [type(item) for item in gc.get_objects()]
    classes = Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    return Census(
        switches=switches,
        groups=live_groups(),
        registries=sum(map(len, tables)) + tagged,
        names=sum(map(_resolves, names)),
        threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
        own=threading.active_count(),
        descriptors=sum(map(_stays_open, Path("/proc/self/fd").iterdir())),
        children=len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        modules=live_modules(),
        tensors=sum(issubclass(kind, torch.Tensor) for kind in kinds),
        objects={name: count for name, count in classes.items() if name.startswith(_OF_A_WORLD)},
        store_keys=c10d._get_default_store().num_keys(),
        resident=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def _stays_open(descriptor: Path) -> bool:
    try:
        return "/reports" not in str(descriptor.readlink())
    except OSError:  # closed meanwhile
        return False


def _resolves(name: str) -> bool:
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        _resolve_process_group(name)
    except (RuntimeError, LookupError):
        return False
    return True
