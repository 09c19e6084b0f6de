"""Configuration of all tests; most of it keeps the unit tests fast."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.sandbox import MEMORY, memory_directory

QUICK = tuple(Path(__file__).parent / name for name in ("unit", "torch", "docs"))
# aiohttp reads the system's certificates when it is imported, but these tests use no TLS.
CERTIFICATES = {name: os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}

settings.register_profile(
    "quick", max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=50)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    asyncio.set_event_loop(None)  # pytest-asyncio requests a loop, which Python before 3.12 would create
    gc.disable()
    for name in CERTIFICATES:
        os.environ[name] = os.devnull
    if MEMORY.is_dir() and all(any(path.is_relative_to(quick) for quick in QUICK) for path in _paths(config)):
        # This places `tmp_path` on tmpfs, where fsync costs nothing.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def _paths(config: pytest.Config) -> list[Path]:
    return [(config.invocation_params.dir / each).resolve() for each in config.args]


def pytest_collection_finish() -> None:
    """Exempt the many imported objects from garbage collection: they live until the end."""
    for name, before in CERTIFICATES.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Collect and freeze once, because pytest collects five times, and then has little to scan."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield an empty directory on tmpfs, where arenas are stored."""
    with memory_directory() as path:
        yield path
