"""For the unit tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests with torch first: one worker alone imports what an optimizer needs, for a second."""
    items.sort(key=lambda item: isinstance(item, pytest.Function) and "torch" not in vars(item.module))
