"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks.pool import RankPool

# The first of them waits for the server to import torch and Megatron; every case has a deadline of its own besides.
_RANKS_TIMEOUT = 240


# `--hypothesis-profile soak`: more of everything that is drawn, and other examples every time.
settings.register_profile("soak", max_examples=2000, deadline=None)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of forked ranks; its server starts with the first case."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the pool."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_RANKS_TIMEOUT))
