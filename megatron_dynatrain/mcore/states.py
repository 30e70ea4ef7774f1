"""The memory behind every state of one world on this rank, checked against the predicted placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dynatrain.errors import PlacementError, StateError, UnsupportedError
from megatron_dynatrain.mcore.build import is_hollow
from megatron_dynatrain.mcore.describe import NamedTensor, dtype_name, named_tensors
from megatron_dynatrain.mcore.inner_optimizers import (
    MOMENTS,
    OwnedRun,
    Step,
    check_known,
    keeps_main,
    set_group_steps,
    state_dtypes,
)
from megatron_dynatrain.mcore.realize import buffers_of, realize_gradients, realize_state
from megatron_dynatrain.vps.flat_buffer import BufferPolicy
from megatron_dynatrain.vps.placement import Placement, slab_name
from megatron_dynatrain.vps.tensor import StateKind

__all__ = ["MOMENTS", "LiveState", "OwnedRun", "distributed_optimizers"]


def distributed_optimizers(optimizer: object) -> list[DistributedOptimizer]:
    """Return the distributed optimizers inside a (chained) Megatron optimizer, stubs left out.

    Raises:
        UnsupportedError: Another kind of optimizer, by name.
    """
    found: list[DistributedOptimizer] = []
    if optimizer is None:  # a rank outside of the layout
        return found
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(inner, DistributedOptimizer):
            raise UnsupportedError(
                "only the distributed optimizer can be switched",
                subject=type(inner).__name__,
                hint="train with --use-distributed-optimizer",
            )
        if inner.is_stub_optimizer:
            continue
        check_known(inner)
        found.append(inner)
    return found


def owned_runs(optimizer: object) -> dict[torch.nn.Parameter, OwnedRun]:
    """Return, per model parameter, the run of it that this rank's optimizer owns; local."""
    runs = {}
    for inner in distributed_optimizers(optimizer):
        for parameter, (group, order) in inner.model_param_group_index_map.items():
            span = inner._get_model_param_range_map(parameter)["param"]
            settings = inner.optimizer.param_groups[group]
            runs[parameter] = OwnedRun(inner, settings, settings["params"][order], span.start, span.end)
    return runs


class LiveState:
    """All state of one world on this rank: named parameters, owned runs and the memory by slab name.

    Args:
        chunks: Model chunks, wrapped in Megatron's DDP; none on a rank outside of the layout.
        optimizer: Megatron's (chained) distributed optimizer; None on a rank outside of the layout.
        rank: Global rank, for messages.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: object, *, rank: int) -> None:
        self.rank = rank
        self.chunks = list(chunks)
        for chunk in self.chunks:
            if not isinstance(chunk, DistributedDataParallel):
                raise UnsupportedError(
                    "only Megatron's DistributedDataParallel can be switched",
                    subject=type(chunk).__name__,
                    hint="train without FSDP",
                )
        self.optimizer = optimizer
        self.named: list[NamedTensor] = named_tensors(chunks)
        self.runs = owned_runs(optimizer)

    def buffer_policy(self) -> BufferPolicy | None:
        """Return the buffer policy that the real DDP chunks were built with; None on a rank outside of the layout."""
        if not self.chunks:
            return None
        config = self.chunks[0].ddp_config
        return BufferPolicy(
            bucket_size=config.bucket_size, pad_for_high_nccl_busbw=config.pad_buckets_for_high_nccl_busbw
        )

    def steps(self) -> set[float]:
        """Return the distinct optimizer step counts on this rank (one in a healthy job, none before the first step).

        Raises:
            StateError: A parameter has moments and nobody counted its steps; names it.
        """
        counted = set()
        names = {item.tensor: item.name for item in self.named}
        for parameter, run in self.runs.items():
            if run.step is not None:
                counted.add(float(run.step))
            elif any(kind.value in run.state for kind in MOMENTS):
                raise self._unlisted(names[parameter], ["step"], run)
        return counted

    def step_template(self) -> Step | None:
        """Return one step count, whose type and dtype the target must keep; None where there is none."""
        return next((run.step for run in self.runs.values() if run.step is not None), None)

    def create_moments(self) -> None:
        """Make the optimizer's state entries without values: the transfer fills them, `set_step` the step. Local."""
        for run in self.runs.values():
            run.create()

    def set_step(self, step: Step) -> None:
        """Set the step count of every run; local."""
        for run in self.runs.values():
            run.set_step(step)
        for inner in distributed_optimizers(self.optimizer):
            set_group_steps(inner, step)

    def state_dtypes(self) -> tuple[dict[str, str], str, bool] | None:
        """Return how states are stored, None without runs.

        That is the dtypes of the moments by name, the dtype of a separate main parameter, and whether the optimizer
        makes main parameters in its first step.
        """
        # An fp32 parameter has no separate main parameter, so it can't tell the dtype of one.
        for run in sorted(self.runs.values(), key=lambda run: run.main.dtype == torch.float32):
            dtypes = {name: dtype_name(dtype) for name, dtype in state_dtypes(run.optimizer, run.main.dtype).items()}
            return dtypes, dtypes.pop("master_param", "float32"), keeps_main(run.optimizer)
        return None

    def copy_main(self) -> None:
        """Set the copies that optimizers have of fp32 main parameters; local, after the transfer."""
        for run in self.runs.values():
            copy = run.copy_of_main()
            if copy is not None:
                copy.data.copy_(run.main.detach())

    def check_device(self, device: torch.device | None) -> None:
        """Check that parameters and buffers are where those of the running job are; local.

        Raises:
            StateError: Names the first one that is elsewhere.
        """
        for item in self.named:
            if device is not None and item.tensor.device != device:
                raise StateError(
                    "a tensor of the target is on another device than the job's",
                    rank=self.rank,
                    phase="prepare",
                    subject=item.name,
                    expected=device,
                    got=item.tensor.device,
                    hint="the model must be built on the current device",
                )

    def realize(self) -> None:
        """Give storage to parameters, main parameters and moments of a world that was built hollow; local."""
        realize_state(self.chunks, distributed_optimizers(self.optimizer))

    def memory(self, *, moments: bool) -> dict[str, torch.Tensor]:
        """Return slab name -> flat tensor over the live memory.

        Raises:
            StateError: An optimizer state that nobody listed, or one that is missing; names it.
        """
        slabs: dict[str, torch.Tensor] = {}
        for item in self.named:
            flat = item.tensor.detach().view(-1)
            kind = StateKind.BUFFER if item.is_buffer else StateKind.PARAM
            slabs[slab_name(kind, item.chunk, item.name)] = flat
            run = self.runs.get(item.tensor)
            if run is not None:
                slabs.update(self._owned(item, run, flat, moments))
        return slabs

    def _owned(
        self, item: NamedTensor, run: OwnedRun, flat: torch.Tensor, moments: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        main = run.main_param()
        if main is not None and not _is_view(main.detach().view(-1), flat, run.start):
            if flat.dtype == torch.float32:
                raise StateError(
                    "a float32 parameter has a main parameter of its own, which is not understood",
                    rank=self.rank,
                    subject=item.name,
                )
            yield slab_name(StateKind.MAIN, item.chunk, item.name), main.detach().view(-1)
        state = run.state
        if not moments and not state:
            return
        unknown, missing = sorted(set(state) - run.known), sorted(run.known - set(state))
        if unknown or missing:
            raise self._unlisted(item.name, [*missing, *unknown], run)
        for kind in MOMENTS:
            yield slab_name(kind, item.chunk, item.name), state[kind.value].detach().view(-1)

    def _unlisted(self, name: str, states: Sequence[str], run: OwnedRun) -> StateError:
        return StateError(
            "the optimizer's states are not the ones in the list",
            rank=self.rank,
            subject=f"{name}: {', '.join(states)}",
            expected=sorted(run.known | {"step"}),
            got=sorted(run.state),
            hint="an unlisted state would be lost by a switch, a missing one would be made of zeros",
        )

    def check(self, placement: Placement, *, moments: bool) -> None:
        """Check the real objects against the predicted placement: names, shapes, dtypes, runs and buffer index maps.

        Raises:
            PlacementError: The first difference, named.
        """
        memory = self.memory(moments=moments)
        predicted = {
            slab.name: (slab.numel, slab.dtype)
            for slab in placement.slabs(self.rank)
            if moments or slab.state not in placement.description.made_by_first_step
        }
        actual = {name: (flat.numel(), dtype_name(flat.dtype)) for name, flat in memory.items()}
        for name in sorted(predicted.keys() | actual.keys()):
            if predicted.get(name) != actual.get(name):
                raise PlacementError(
                    "the predicted placement and the real model disagree",
                    rank=self.rank,
                    subject=name,
                    expected=f"{predicted.get(name, 'nothing')} (predicted elements, dtype)",
                    got=f"{actual.get(name, 'nothing')} (real)",
                    hint="nothing was moved; this Megatron builds its model in a way the plugin doesn't know",
                )
        self._check_runs(placement, moments)
        self._check_buffers(placement)

    def _check_runs(self, placement: Placement, moments: bool) -> None:
        by_name = {(item.chunk, item.name): item for item in self.named}
        for slab in placement.slabs(self.rank):
            item = by_name[slab.chunk, slab.parameter]
            run = self.runs.get(item.tensor)
            later = () if moments else placement.description.made_by_first_step
            if slab.state in (StateKind.PARAM, StateKind.BUFFER, *later):
                continue
            actual = (run.start, run.stop) if run is not None else None
            if actual != tuple(slab.run):
                raise PlacementError(
                    "the predicted optimizer shard and the real one disagree",
                    rank=self.rank,
                    subject=slab.name,
                    expected=f"elements {slab.run} of the local parameter",
                    got=f"elements {actual}",
                )

    def _check_buffers(self, placement: Placement) -> None:
        names = {item.tensor: item.name for item in self.named}
        predicted = {}
        for buffer in placement.buffers(self.rank):
            for name, start, end, bucket in buffer.index:
                predicted[buffer.chunk, name] = (start, end, bucket)
        actual = {}
        for chunk, wrapped in enumerate(self.chunks):
            for buffer in [*wrapped.buffers, *wrapped.expert_parallel_buffers]:
                for parameter, (start, end, bucket) in buffer.param_index_map.items():
                    actual[chunk, names[parameter]] = (start, end, bucket)
        for key in sorted(predicted.keys() | actual.keys()):
            if predicted.get(key) != actual.get(key):
                raise PlacementError(
                    "the predicted DDP buffer and the real one disagree",
                    rank=self.rank,
                    subject=f"chunk {key[0]}, {key[1]}",
                    expected=f"(start, end, bucket) {predicted.get(key)}",
                    got=f"{actual.get(key)}",
                )


def _is_view(main: torch.Tensor, flat: torch.Tensor, start: int) -> bool:
    """Return whether the optimizer's shard shares the model parameter's memory at its place."""
    offset = 0 if is_hollow(flat) else start * flat.element_size()
    return main.dtype == flat.dtype and main.data_ptr() == flat.data_ptr() + offset


def gradient_bytes(chunks: Sequence[torch.nn.Module]) -> int:
    """Return the bytes of the gradient buffers of the chunks, held or released."""
    return sum(
        buffer.numel * buffer.grad_data.element_size()
        for chunk in chunks
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
    )


def gradient_itemsize(chunks: Sequence[torch.nn.Module]) -> int:
    """Return the bytes per element of the gradient buffers, of the largest dtype among them; 4 where there are none."""
    return max((buffer.grad_data.element_size() for _, buffer in buffers_of(chunks)), default=4)


def release_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Free the gradient buffers; gradients are dead at an iteration boundary."""
    for _, buffer in buffers_of(chunks):
        if not is_hollow(buffer.grad_data):
            buffer.offload_to_cpu(move_params=False, move_grads=True)


def restore_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Make the gradient buffers (again), zeroed; a no-op where they are there."""
    realize_gradients(chunks)
    for _, buffer in buffers_of(chunks):
        buffer.reload_from_cpu(move_params=False, move_grads=True)
