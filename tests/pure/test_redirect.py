"""Functions that answer differently in one thread, however they were imported, and as before afterwards."""

from __future__ import annotations

import inspect
import threading

import pytest

from megatron_dynatrain.elastic.redirect import redirected
from megatron_dynatrain.errors import StateError

_VALUE = 1


def current(scale: int = 2, *, offset: int = 0) -> int:
    return _VALUE * scale + offset


bound_elsewhere = current


def in_another_thread(function, *args, **kwargs):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(function(*args, **kwargs)))
    thread.start()
    thread.join()
    return answers[0]


def test_only_the_thread_of_the_block_sees_the_replacement_through_every_name() -> None:
    with redirected({current: lambda scale=0, *, offset=7: (scale, offset)}):
        assert current() == bound_elsewhere() == (0, 7)
        assert bound_elsewhere(3, offset=1) == (3, 1)
        assert in_another_thread(bound_elsewhere) == 2
        assert in_another_thread(bound_elsewhere, 5, offset=1) == 6
    assert current() == 2
    assert bound_elsewhere(5, offset=1) == 6


def test_the_stock_code_returns_after_an_error_and_defaults_stay() -> None:
    code = current.__code__
    with pytest.raises(RuntimeError, match="inside"), redirected({current: lambda: 0}):
        raise RuntimeError("inside")
    assert current.__code__ is code
    assert str(inspect.signature(current)) == "(scale: 'int' = 2, *, offset: 'int' = 0) -> 'int'"


def test_the_globals_of_the_function_are_not_written_to() -> None:
    before = set(globals())
    with redirected({current: lambda: 0}):
        assert set(globals()) == before


def test_two_redirections_of_one_function_and_closures_are_refused() -> None:
    with (
        redirected({current: lambda: 0}),
        pytest.raises(StateError, match="redirected already"),
        redirected({current: lambda: 1}),
    ):
        pass
    assert current() == 2

    def closure() -> int:
        return len(before)

    before = [1]
    with pytest.raises(StateError, match="closure"), redirected({closure: lambda: 1}):
        pass
