"""Megatron's arguments as one thread sees them while it builds another layout beside the training thread."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron.training import global_vars

from megatron_dynatrain.elastic.redirect import redirected


class ThreadArguments:
    """A copy of the arguments with another layout in them, until it becomes the one set of arguments.

    Args:
        values: What is different, by Megatron's names.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._args: Namespace = copy.copy(global_vars.get_args())
        vars(self._args).update(values)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Let `get_args()` return the copy in this thread, and in no other."""
        with redirected({global_vars.get_args: lambda: self._args}):
            yield

    def become(self, args: Namespace) -> None:
        """Let the copy be another name of the process's arguments: a model may have kept it when it was built."""
        self._args.__dict__ = args.__dict__
