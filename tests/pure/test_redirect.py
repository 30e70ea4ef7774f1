"""Functions that answer differently in one thread, however they were imported, and as before afterwards."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_dynatrain.elastic.redirect import redirected
from megatron_dynatrain.errors import StateError

_VALUE = 1


def current(scale: int = 2, *, offset: int = 0) -> int:
    return _VALUE * scale + offset


bound_elsewhere = current


class Stranger:
    """A thread that was there before any block."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()  # the thread starts with the first task

    def ask(self, function, *args, **kwargs):
        return self.pool.submit(function, *args, **kwargs).result()


@pytest.fixture
def stranger():
    other = Stranger()
    yield other
    other.pool.shutdown()


def test_only_the_thread_of_the_block_sees_the_replacement_through_every_name(stranger) -> None:
    with redirected({current: lambda scale=0, *, offset=7: (scale, offset)}):
        assert current() == bound_elsewhere() == (0, 7)
        assert bound_elsewhere(3, offset=1) == (3, 1)
        assert stranger.ask(bound_elsewhere) == 2
        assert stranger.ask(bound_elsewhere, 5, offset=1) == 6
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


def test_threads_that_the_thread_of_the_block_starts_see_what_it_sees(stranger) -> None:
    with redirected({current: lambda: "apart"}):
        with ThreadPoolExecutor(2) as pool:
            assert pool.submit(current).result() == "apart"
            assert pool.submit(lambda: ThreadPoolExecutor(1).submit(current).result()).result() == "apart"
        assert stranger.ask(lambda: ThreadPoolExecutor(1).submit(current).result()) == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(current).result() == 2


def test_another_thread_can_not_redirect_meanwhile(stranger) -> None:
    def redirect_too() -> None:
        with redirected({other_function: lambda: 3}):
            pass

    with redirected({current: lambda: 0}), pytest.raises(StateError, match="redirected already"):
        stranger.ask(redirect_too)
    stranger.ask(redirect_too)


def other_function() -> int:
    return 1
