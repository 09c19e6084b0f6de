"""Fixtures: the file of a progress page, and a clock for its writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.holdfast.fake_page import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.page"
