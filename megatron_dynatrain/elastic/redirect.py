"""Let chosen functions answer differently in one thread while all other threads see no difference.

A target world is built by a background thread while the training thread uses the same module functions: the getters of
Megatron's `parallel_state`, `get_args`, the default group of torch.distributed. Modules import such functions by name,
so replacing the module's attribute would miss most callers. What is replaced here is the code of the function object
itself: one atomic assignment, seen by every name that refers to the function, undone at the end of the block.

Threads that the thread of the block starts, such as the pool in which Megatron opens blended data sets, belong to it.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_dynatrain.errors import StateError

_PLACE = "the function that chooses"
_TEMPLATE = f"def redirected(*args, **kwargs):\n    choose = {_PLACE!r}\n    return choose(*args, **kwargs)\n"
_guard = threading.Lock()
_redirected: set[types.FunctionType] = set()


class _Family:
    """The thread that builds another world, and the threads it starts meanwhile; one at a time in a process."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._depth = 0

    def __contains__(self, thread: int) -> bool:
        return thread in self._members

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Let this thread be the first of the family inside the block; blocks nest within it."""
        thread, start = threading.get_ident(), threading.Thread.start
        with _guard:
            if self._depth and thread not in self._members:
                raise StateError("a function is redirected already", expected="one world being built at a time")
            self._depth += 1
            first = self._depth == 1
            if first:
                self._members.add(thread)
                threading.Thread.start = self._registering(start)  # type: ignore[method-assign]
        try:
            yield
        finally:
            with _guard:
                self._depth -= 1
                if first:
                    threading.Thread.start = start  # type: ignore[method-assign]
                    self._members.clear()

    def _registering(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def registering(child: threading.Thread) -> None:
            if threading.get_ident() in self._members:
                run = child.run

                def registered() -> None:
                    self._members.add(threading.get_ident())
                    try:
                        run()
                    finally:
                        self._members.discard(threading.get_ident())
                        del child.run  # it refers to the thread that it belongs to

                child.run = registered  # type: ignore[method-assign]
            start(child)

        return registering


_family = _Family()


def in_family() -> bool:
    """Return whether this thread is inside a `redirected` block, or was started by one that is; local."""
    return threading.get_ident() in _family


@contextmanager
def redirected(replacements: Mapping[types.FunctionType, Callable[..., Any]]) -> Iterator[None]:
    """Answer this thread's calls of the given functions by their replacements inside the block; local.

    Args:
        replacements: Plain module functions (no closures) to what this thread shall call instead.

    Raises:
        StateError: A function is a closure, or another thread is inside such a block.
    """
    own: dict[types.FunctionType, types.CodeType] = {}
    with _family.of_this_thread():
        with _guard:
            _check(replacements)
            _redirected.update(replacements)
        try:
            for function, replacement in replacements.items():
                own[function] = function.__code__
                function.__code__ = _choosing_code(function, replacement)
            yield
        finally:
            for function, code in own.items():
                function.__code__ = code
            with _guard:
                _redirected.difference_update(replacements)


def _check(functions: Mapping[types.FunctionType, object]) -> None:
    for function in functions:
        if function.__code__.co_freevars:
            raise StateError("a closure can't be redirected", subject=function.__qualname__)
        if function in _redirected:
            raise StateError(
                "a function is redirected already",
                subject=function.__qualname__,
                expected="one world being built at a time",
            )


def _choosing_code(function: types.FunctionType, replacement: Callable[..., Any]) -> types.CodeType:
    """Return code for a function object: its own behaviour in all threads but those of the family."""
    stock = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    stock.__kwdefaults__ = function.__kwdefaults__

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (replacement if in_family() else stock)(*args, **kwargs)

    namespace: dict[str, Any] = {}
    exec(_TEMPLATE, namespace)
    code: types.CodeType = namespace["redirected"].__code__
    # The callable itself is the constant: the function keeps its own globals, which must not be written to.
    constants = tuple(choose if constant == _PLACE else constant for constant in code.co_consts)
    return code.replace(co_consts=constants, co_name=function.__name__, co_filename=__file__)
