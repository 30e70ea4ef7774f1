"""Megatron's `parallel_state` as a value: built apart for another layout, swapped in and out whole."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state as live

from megatron_dynatrain.elastic.groups import WorldGroups, destroy_groups
from megatron_dynatrain.errors import StateError
from megatron_dynatrain.layout import ParallelLayout


def _global_names(module: types.ModuleType) -> tuple[str, ...]:
    return tuple(
        name
        for name, value in vars(module).items()
        if name.startswith("_")
        and not name.startswith("__")
        and not callable(value)
        and not isinstance(value, types.ModuleType)
    )


@dataclass
class ParallelState:
    """All globals of `megatron.core.parallel_state` for one layout on one rank, and who owns its groups.

    Args:
        values: Global name to value.
        groups: Owner of the groups; None for a state that stock Megatron initialised.
        shadow: The private copy of Megatron's module in which it was built, until it is live; None otherwise.
    """

    values: dict[str, object]
    groups: WorldGroups | None = None
    shadow: types.ModuleType | None = field(default=None, repr=False)
    _alive: bool = field(default=True, repr=False)

    @classmethod
    def capture(cls) -> ParallelState:
        """Return the live state as it is; not collective."""
        return cls({name: vars(live)[name] for name in _global_names(live)})

    @classmethod
    def of_no_world(cls) -> ParallelState:
        """Return the state as it is before anything was initialised: that of a rank which takes no part; local."""
        module = _private_copy()
        return cls({name: vars(module)[name] for name in _global_names(live)})

    @classmethod
    def build(cls, layout: ParallelLayout, groups: WorldGroups, **options: object) -> ParallelState:
        """Build the state of another layout without touching the live one; collective over the layout's ranks.

        Megatron's own `initialize_model_parallel` runs in a private copy of its module, whose `torch.distributed`
        answers for the new world.

        Args:
            layout: Layout to build.
            groups: Maker of the process groups.
            options: Further keywords of `initialize_model_parallel`, e.g. `create_gloo_process_groups`.
        """
        module = _private_copy()
        vars(module)["torch"] = _TorchOfWorld(groups)
        module.initialize_model_parallel(**_sizes(layout), **options)
        state = cls({}, groups, module)
        state.take_values()
        return state

    @property
    def module(self) -> types.ModuleType:
        """The copy of Megatron's module that answers for this state while another one is live.

        Raises:
            StateError: It was live, so its values have moved on.
        """
        if self.shadow is None:
            raise StateError("a parallel state that is live, or was, has no module of its own")
        return self.shadow

    def take_values(self) -> None:
        """Read the values from the private copy of the module, where setters have written; local."""
        self.values = {name: vars(self.module)[name] for name in _global_names(live)}

    def swap_in(self) -> ParallelState:
        """Make this the live state and return the one before; takes microseconds, not collective."""
        before = ParallelState.capture()
        for name, value in self.values.items():
            setattr(live, name, value)
        self.shadow = None
        return before

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the live state inside the block."""
        before = self.swap_in()
        try:
            yield
        finally:
            self.values = ParallelState.capture().values
            before.swap_in()

    def process_groups(self) -> list[object]:
        """Return every process group that the state refers to, once each."""
        found: dict[int, object] = {}
        for value in self.values.values():
            for item in _flatten(value):
                if isinstance(item, dist.ProcessGroup):
                    found.setdefault(id(item), item)
        return list(found.values())

    def destroy(self, *, abort: bool = False) -> int:
        """Destroy the groups of this state and forget them; not collective. Returns the number destroyed."""
        if not self._alive:
            return 0
        self._alive = False
        destroyed = destroy_groups(self.process_groups(), abort=abort)
        if self.groups is not None:
            self.groups.destroy(abort=abort)
        self.values.clear()
        self.shadow = None
        return destroyed


def _private_copy() -> types.ModuleType:
    """Return a fresh, uninitialised copy of Megatron's module that nobody else knows of."""
    spec = importlib.util.spec_from_file_location("megatron.core._parallel_state_of_a_world", live.__file__)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {live.__file__}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flatten(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _flatten(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _sizes(layout: ParallelLayout) -> dict[str, object]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_distributed_optimizer_instances": layout.instances,
        "order": layout.order,
    }


class _DistOfWorld:
    """`torch.distributed` as the ranks of another world see it: rank, size and new groups are the world's."""

    def __init__(self, groups: WorldGroups) -> None:
        self._groups = groups

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: object = None) -> int:
        if group is None:
            return self._groups.ranks.index(self._groups.rank)
        return dist.get_rank(group)  # type: ignore[arg-type]

    def get_world_size(self, group: object = None) -> int:
        if group is None:
            return len(self._groups.ranks)
        return dist.get_world_size(group)  # type: ignore[arg-type]

    def new_group(
        self,
        ranks: list[int] | None = None,
        timeout: object = None,
        backend: str | None = None,
        pg_options: object = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> object:
        del timeout, use_local_synchronization, group_desc  # the world's own timeout, names and rendezvous
        # torch's new_group sorts, so a launch has them sorted too; another order would add in another order.
        members = None if ranks is None else [self._groups.ranks[index] for index in sorted(ranks)]
        return self._groups.group(members, backend=backend, options=pg_options)


class _TorchOfWorld:
    def __init__(self, groups: WorldGroups) -> None:
        self.distributed = _DistOfWorld(groups)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)
