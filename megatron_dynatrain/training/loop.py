"""Stock `train()` in segments: it returns at the boundary of a switch and is entered again with the new world.

Nothing inside `train()` is edited. Module functions of `megatron.training.training` that it (and `pretrain()`) call
by name are wrapped; a boundary is made by setting `args.train_iters` to the current iteration at the last call of the
loop's body, so that the loop leaves on its normal path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import megatron.training.training as megatron_training
import torch
from megatron.training import get_args, get_timers, print_rank_0

from megatron_dynatrain.errors import UnsupportedError
from megatron_dynatrain.schedule.resolve import PlannedSwitch
from megatron_dynatrain.training.builder import ModelBuilder
from megatron_dynatrain.training.data import DataIterators, Provider, provider_of
from megatron_dynatrain.training.job import DynamicJob, Roles
from megatron_dynatrain.training.schedule import planned_length

_WRAPPED = (
    "setup_model_and_optimizer",
    "build_train_valid_test_data_iterators",
    "get_train_valid_test_num_samples",
    "train",
    "train_step",
    "checkpoint_and_decide_exit",
    "training_log",
    "save_checkpoint_and_time",
    "evaluate_and_print_results",
)

StartJob = Callable[[list[torch.nn.Module], Roles, ModelBuilder, Provider], DynamicJob]
"""Makes the job at the first entry of `train()`: checks the schedule from there on, and the real model."""

PendingSwitches = Callable[[], list[PlannedSwitch]]
"""Returns the checked switches after the iteration that the run starts with."""


class Segments:
    """The wrapped functions of `megatron.training.training`, and the job they drive.

    Args:
        start: Makes the job once model, optimizer and data are there.
        pending: The switches that are to come, for the length of the training.
    """

    def __init__(self, start: StartJob, pending: PendingSwitches) -> None:
        self._start = start
        self._pending = pending
        self._samples: int | None = None
        self._stock: dict[str, Callable[..., Any]] = {}
        self._builder: ModelBuilder | None = None
        self._provider: Provider | None = None
        self._test: list[Any] = []
        self._job: DynamicJob | None = None
        self._train_iters: int | None = None
        self._losses: dict[str, Any] = {}
        self._logged = False

    def install(self) -> None:
        """Wrap the functions; once per process and before the script calls `pretrain()`."""
        for name in _WRAPPED:
            self._stock[name] = getattr(megatron_training, name)
            setattr(megatron_training, name, getattr(self, name))

    def uninstall(self) -> None:
        """Put the stock functions back."""
        for name, function in self._stock.items():
            setattr(megatron_training, name, function)
        self._stock.clear()

    @property
    def job(self) -> DynamicJob | None:
        """The job; None before the first entry of `train()`."""
        return self._job

    # --- what the job is made of --------------------------------------------------------------------------------------

    def setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Keep what the script asked for, then set up as usual; a checkpoint is loaded now, so the length is known."""
        self._builder = ModelBuilder(self._stock["setup_model_and_optimizer"], args, kwargs)
        result = self._stock["setup_model_and_optimizer"](*args, **kwargs)
        length = planned_length(get_args(), self._pending())
        get_args().train_iters, self._samples = length.iterations, length.samples
        return result

    def get_train_valid_test_num_samples(self) -> tuple[int, int | None, int]:
        """Ask for the same number of training samples whatever the batch size is now: the shuffle depends on it."""
        train, valid, test = self._stock["get_train_valid_test_num_samples"]()
        return (train if self._samples is None else self._samples, valid, test)

    def build_train_valid_test_data_iterators(self, provider: Provider) -> Any:
        """Keep the job's dataset provider, then build as usual."""
        iterators = self._stock["build_train_valid_test_data_iterators"](provider)
        if self._job is None:
            self._provider = provider_of(provider)
            self._test.append(iterators[2])  # train() is not given it
        return iterators

    # --- segments -----------------------------------------------------------------------------------------------------

    def train(
        self,
        forward_step_func: Any,
        model: list[torch.nn.Module],
        optimizer: Any,
        opt_param_scheduler: Any,
        train_data_iterator: Any,
        valid_data_iterator: Any,
        process_non_loss_data_func: Any,
        config: Any,
        checkpointing_context: dict[str, Any],
        *rest: Any,
        **kwargs: Any,
    ) -> tuple[int, float]:
        """Run stock `train()` until the training ends, changing the layout at each boundary between two segments."""
        _refuse_own_groups(kwargs)
        data = DataIterators(train_data_iterator, valid_data_iterator, self._test)
        roles = Roles(optimizer, opt_param_scheduler, data, config)
        job = self._job = self._make_job(model, roles)
        try:
            return self._run(
                job, forward_step_func, model, process_non_loss_data_func, checkpointing_context, *rest, **kwargs
            )
        finally:
            job.end(sys.exception())

    def _run(
        self,
        job: DynamicJob,
        forward_step_func: Any,
        model: list[torch.nn.Module],
        process_non_loss_data_func: Any,
        checkpointing_context: dict[str, Any],
        *rest: Any,
        **kwargs: Any,
    ) -> tuple[int, float]:
        while True:
            roles = job.roles
            iteration, flops = self._stock["train"](
                forward_step_func,
                model,
                roles.optimizer,
                roles.scheduler,
                roles.data.train,
                roles.data.valid,
                process_non_loss_data_func,
                roles.config,
                checkpointing_context,
                *rest,
                **kwargs,
            )
            if self._train_iters is None:
                return iteration, flops
            self._change(job, iteration, flops, model, checkpointing_context)

    def _make_job(self, model: list[torch.nn.Module], roles: Roles) -> DynamicJob:
        if self._builder is None or self._provider is None:
            raise RuntimeError("train() was entered before Megatron set up a model and data iterators")
        return self._start(model, roles, self._builder, self._provider)

    def _change(
        self, job: DynamicJob, iteration: int, flops: float, model: list[torch.nn.Module], context: dict[str, Any]
    ) -> None:
        """Between two segments: hand over what `train()` returned, change the layout, make ready to enter again."""
        args = get_args()
        args.train_iters, self._train_iters = self._train_iters, None
        get_timers()("interval-time").stop()  # train() starts it again
        args.iteration, args.num_floating_point_operations_so_far = iteration, flops
        self._losses = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self._losses.items()}
        job.switcher.share = self._share_losses
        if not job.change_layout(iteration, context):
            self._reenter_same(job.roles.config, model)
        elif job.switcher.parked:
            self._losses = {}
            if not job.wait_outside(context):
                print(f"[dynatrain] rank {job.switcher.rank} was outside when the training ended", flush=True)
                raise SystemExit(0)
        self._take_losses(job)
        self._keep_length(job)

    def _share_losses(self) -> dict[str, Any]:
        """Return this rank's sums since the last line of the log: all ranks have counts, the last stage losses too."""
        return {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in self._losses.items()}

    def _take_losses(self, job: DynamicJob) -> None:
        """Go on with the sums of a rank that had the losses: the one that logs may be another one now."""
        sums = max(job.shared, key=len, default=None)
        if sums:
            device = job.switcher.device
            self._losses = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in sums.items()}

    def _keep_length(self, job: DynamicJob) -> None:
        """Let the training end where its samples do, also where a switch to another batch size did not happen."""
        args = get_args()
        end = planned_length(args, job.pending, self._samples).iterations
        if not args.train_samples:
            end = min(end, args.train_iters)
        if end != args.train_iters:
            print_rank_0(f"[dynatrain] the training ends with iteration {end}, not {args.train_iters}")
        args.train_iters = job.train_iters = end

    def _reenter_same(self, config: Any, model: list[torch.nn.Module]) -> None:
        """Undo what `train()` leaves on objects that it is about to be given again (a refused or aborted switch)."""
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
        if megatron_training.should_disable_forward_pre_hook(get_args()):
            megatron_training.enable_forward_pre_hook(model)

    # --- called from inside train() and pretrain() --------------------------------------------------------------------

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Close the record of a switch that just happened, then step as usual."""
        if self._job is not None:
            self._job.step_begins()
        return self._stock["train_step"](*args, **kwargs)

    def checkpoint_and_decide_exit(
        self, model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any
    ) -> bool:
        """End the segment where a switch is due and the job doesn't exit anyway."""
        if self._job is not None:
            self._job.completed = iteration
        if self._stock["checkpoint_and_decide_exit"](model, optimizer, scheduler, iteration, *rest):
            return True
        args = get_args()
        job = self._job
        if job is not None and iteration < args.train_iters and job.at_boundary(iteration, args):
            self._train_iters, args.train_iters = args.train_iters, iteration
        return False

    def training_log(self, loss_dict: Any, total_loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Log with the running averages of the whole run: stock `train()` starts them anew at each entry."""
        del total_loss_dict
        if self._logged and "is_first_iteration" in kwargs:
            kwargs["is_first_iteration"] = False
        self._logged = True
        return self._stock["training_log"](loss_dict, self._losses, *args, **kwargs)

    def save_checkpoint_and_time(
        self, iteration: int, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Save the current world: `pretrain()` may still hold the optimizer and iterators of an earlier one."""
        if self._job is not None:
            roles = self._job.roles
            optimizer, scheduler = roles.optimizer, roles.scheduler
            if "train_data_iterator" in kwargs:
                kwargs["train_data_iterator"] = roles.data.train
        return self._stock["save_checkpoint_and_time"](iteration, model, optimizer, scheduler, *args, **kwargs)

    def evaluate_and_print_results(
        self,
        prefix: str,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        iteration: int,
        process_non_loss_data_func: Any,
        config: Any,
        **kwargs: Any,
    ) -> Any:
        """Evaluate the current world on its own iterators, chosen by role: on most ranks all of them are None."""
        if self._job is not None and self._job.switcher.committed:
            roles = self._job.roles
            data_iterator = roles.data.test if prefix.endswith("on test set") else roles.data.valid
            config = roles.config
        return self._stock["evaluate_and_print_results"](
            prefix, forward_step_func, data_iterator, model, iteration, process_non_loss_data_func, config, **kwargs
        )


def _refuse_own_groups(keywords: dict[str, Any]) -> None:
    """Refuse groups that the script made: a switch makes those of the new layout by Megatron's own rules.

    Raises:
        UnsupportedError: Names the keyword.
    """
    for name in ("pg_collection", "p2p_communicator"):
        if keywords.get(name) is not None:
            raise UnsupportedError(
                "the script gives pretrain() process groups of its own, which can't follow a switch",
                phase="check",
                subject=name,
                expected="None: Megatron's own groups",
                got=type(keywords[name]).__name__,
            )
