"""Hooks of the runs of the table: gather the state at every boundary, start from a gathered state, stop early."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tests.ranks import independent_gather
from tests.ranks.independent_gather import STATES, LogicalState

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun


def gather_at(run: PretrainRun, *, boundaries: Collection[int]) -> None:
    """Gather the whole state at these iterations: when `train()` returns, and before the step that follows.

    One rank, the first of the layout, gets `extra["before"][iteration]` and `extra["after"][iteration]`. Installed
    after the plugin's hook it runs beneath the plugin, which switches between the two.
    """
    import megatron.training.training as training
    from megatron.training import get_args

    before: dict[int, LogicalState] = run.record.extra.setdefault("before", {})
    after: dict[int, LogicalState] = run.record.extra.setdefault("after", {})
    stock = training.train

    def keep(found: dict[int, LogicalState], iteration: int, model: Any, optimizer: Any) -> None:
        state = independent_gather.gather(model, optimizer) if iteration in boundaries else None
        if state is not None:
            found[iteration] = state

    def train(forward: Any, model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> Any:
        iteration, flops = stock(forward, model, optimizer, *rest, **kwargs)
        keep(before, iteration, model, optimizer)
        return iteration, flops

    training.train = train
    run.before_step.append(lambda model, optimizer, _: keep(after, get_args().curr_iteration, model, optimizer))


def stop_at(run: PretrainRun, *, iteration: int) -> None:
    """End the training there, as if it were its length; the data sets and the schedule stay those of the whole one."""
    from megatron.training import get_args

    def shorten(*_: Any) -> None:
        get_args().train_iters = iteration

    run.before_step.append(shorten)


def start_from(run: PretrainRun, *, state: LogicalState, iteration: int, samples: int) -> None:
    """Put a gathered state into the job when it is set up, as a checkpoint would; no loss scale.

    Args:
        state: The state after that many iterations.
        samples: Samples consumed by then.
    """
    from megatron.training import get_args

    def put(model: Any, optimizer: Any, scheduler: Any) -> None:
        args = get_args()
        args.iteration, args.consumed_train_samples = iteration, samples
        scheduler.step(increment=samples)
        _scatter(model, optimizer, state)

    run.after_setup.append(put)


def _scatter(chunks: Any, optimizer: Any, state: LogicalState) -> None:
    """Write a rank's part of the state into its parameters, buffers and optimizer; local."""
    import torch

    (step,) = state.steps
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    owner = {parameter: one for one in inner for parameter in one.model_param_group_index_map}
    for one in inner:
        for group in one.optimizer.param_groups:
            for main in group["params"]:
                moments = {name: torch.zeros_like(main) for name in ("exp_avg", "exp_avg_sq")}
                one.optimizer.state[main] = {"step": torch.tensor(step), **moments}
    for tensor, declared in independent_gather._declared(chunks):
        name = "param" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        runs = {name: (0, tensor.numel(), tensor)}
        one = owner.get(tensor)
        if one is not None:
            run = one._get_model_param_range_map(tensor)["param"]
            held = one._get_main_param_and_optimizer_states(tensor)
            runs["main"] = (run.start, run.end, held["param"])
            runs |= {moment: (run.start, run.end, held[moment]) for moment in STATES[2:]}
        for key, shape, region, numbers in independent_gather._regions(declared, tensor):
            for name, (start, stop, target) in runs.items():
                whole = state.bits[key, name]
                if whole.shape != shape:
                    raise AssertionError(f"{key} {name}: gathered {whole.shape}, declared {shape}")
                mine = (numbers >= start) & (numbers < stop)
                values = torch.from_numpy(whole[region].reshape(-1)[mine].copy()).view(target.dtype)
                target.data.view(-1)[torch.from_numpy(numbers[mine] - start)] = values
