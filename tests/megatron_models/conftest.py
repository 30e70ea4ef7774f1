"""Limits of time for the hunts, which follow the profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

_CI, _SOAK = 1600, 6 * 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A failing pair is shrunk before it is reported, which takes as long as the hunt itself."""
    here = Path(__file__).parent
    limit = _SOAK if settings.get_current_profile_name() == "soak" else _CI
    for item in items:
        if here in item.path.parents and "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(limit), append=False)
