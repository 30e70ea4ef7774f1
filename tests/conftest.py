"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of forked ranks; its server starts with the first case."""
    pool = RankPool()
    yield pool
    pool.close()
