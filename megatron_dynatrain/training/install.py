"""Install the plugin into `megatron.training`: flags in its parser, checks after parsing, `train()` in segments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import megatron.training.arguments as megatron_arguments
import megatron.training.global_vars as megatron_globals
import torch
from megatron.training import get_args

from megatron_dynatrain.errors import StateError
from megatron_dynatrain.schedule.resolve import PlannedSwitch
from megatron_dynatrain.schedule.schema import Schedule
from megatron_dynatrain.training.arguments import (
    DynamicOptions,
    add_dynamic_parallelism_args,
    launch_target,
    refuse_unsupported,
    validate_options,
)
from megatron_dynatrain.training.builder import ModelBuilder
from megatron_dynatrain.training.data import Provider
from megatron_dynatrain.training.job import DynamicJob, Roles
from megatron_dynatrain.training.loop import Segments
from megatron_dynatrain.training.schedule import pinned_vocabulary, planned_switches, read_schedule


class Plugin:
    """The plugin in one process: wraps Megatron's parser now, and its training functions once the flags ask for it."""

    def __init__(self) -> None:
        self.options: DynamicOptions | None = None
        self.schedule: Schedule | None = None
        self.segments = Segments(self._start, self._pending)
        self._add_arguments = megatron_arguments.add_megatron_arguments
        self._validate = megatron_arguments.validate_args
        self._build_tokenizer = megatron_globals.build_tokenizer

    def install(self) -> None:
        """Add the flags to Megatron's parser and check them when it validates its arguments."""
        megatron_arguments.add_megatron_arguments = self._with_flags
        megatron_arguments.validate_args = self._validated
        megatron_globals.build_tokenizer = self._with_pinned_vocabulary

    def uninstall(self) -> None:
        """Put Megatron's own functions back."""
        megatron_arguments.add_megatron_arguments = self._add_arguments
        megatron_arguments.validate_args = self._validate
        megatron_globals.build_tokenizer = self._build_tokenizer
        self.segments.uninstall()

    def _with_flags(self, parser: ArgumentParser) -> ArgumentParser:
        return add_dynamic_parallelism_args(self._add_arguments(parser))

    def _validated(self, args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        if validate_options(args).enabled:
            refuse_unsupported(args)  # before Megatron: it stops at a bare assertion about some of these
        result = self._validate(args, *rest, **kwargs)
        self.check(args)
        return result

    def _with_pinned_vocabulary(self, args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        """Build the tokenizer, then pad its vocabulary for the whole run; a size that the user gave stays."""
        given = args.padded_vocab_size
        tokenizer = self._build_tokenizer(args, *rest, **kwargs)
        if self.options is not None and given is None:
            args.padded_vocab_size = pinned_vocabulary(args, self.schedule, tokenizer.vocab_size)
        return tokenizer

    def check(self, args: Namespace) -> None:
        """Check flags and schedule against the model and the world, before anything is built; equal on every rank.

        Raises:
            ScheduleError, UnsupportedError: What is wrong, by flag or by file, line and key.
        """
        options = validate_options(args)
        if not options.enabled:
            return
        refuse_unsupported(args)
        self.options = options
        self.schedule = read_schedule(options)
        planned_switches(self.schedule, args, start_iteration=0, check_times=not args.load)
        self.segments.install()

    def _pending(self) -> list[PlannedSwitch]:
        """Return the switches after the iteration at which the run starts; known once a checkpoint is loaded."""
        args = get_args()
        return planned_switches(self.schedule, args, start_iteration=args.iteration)

    def _start(
        self, model: list[torch.nn.Module], roles: Roles, builder: ModelBuilder, provider: Provider
    ) -> DynamicJob:
        args = get_args()
        if self.options is None:
            raise StateError("train() was entered before the flags were checked")
        return DynamicJob(
            options=self.options,
            pending=self._pending(),
            model=model,
            roles=roles,
            builder=builder,
            provider=provider,
            launch=launch_target(args),
            schedule=self.schedule,
        )


def install() -> Plugin:
    """Install the plugin into this process; call it before the script parses its arguments."""
    plugin = Plugin()
    plugin.install()
    return plugin
