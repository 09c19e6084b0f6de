"""For all tests."""

from __future__ import annotations

import asyncio


def pytest_configure() -> None:
    """Say that there is no event loop: pytest-asyncio asks, and Python before 3.12 would make one then."""
    asyncio.set_event_loop(None)
