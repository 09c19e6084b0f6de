"""For the unit tests, which run side by side."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests with torch together: its first optimizer imports a compiler, which takes a second."""
    for item in items:
        if isinstance(item, pytest.Function) and "torch" in vars(item.module):
            item.add_marker(pytest.mark.xdist_group("torch"))
