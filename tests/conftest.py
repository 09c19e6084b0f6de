"""For all tests."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.expendable import memory_directory

UNIT = Path(__file__).parent / "unit"
MAX_WORKERS = 4  # each of them imports torch and collects all tests

settings.register_profile(
    "quick", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=300)
settings.load_profile("quick")


def pytest_configure() -> None:
    """Say that there is no event loop: pytest-asyncio asks, and Python before 3.12 would make one then."""
    asyncio.set_event_loop(None)
    gc.disable()


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: it stays until the end, and there is much of it."""
    gc.enable()
    gc.freeze()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the unit tests on all cores, all others one after another: they are about processes and times."""
    if {Path(each).resolve() for each in config.args} == {UNIT}:
        return min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    return 0


@pytest.fixture
def memory() -> Iterator[Path]:
    """Give an empty directory where arenas live."""
    with memory_directory() as path:
        yield path
