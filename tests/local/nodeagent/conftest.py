from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakenvml.inprocess import faked
from tests.local.nodeagent.nvml.polling import GPUS, Room


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    """Load the fake library into this process, where it is found by its name: see `faked`."""
    with faked(tmp_path / "nvml", GPUS) as fake:
        found = Room(fake, tmp_path)
        yield found
        fake.release()
        found.sensor.close()
