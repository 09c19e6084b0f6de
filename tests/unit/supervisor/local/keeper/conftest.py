from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from supervisor.local.keeper.processes import ManagedProcess
from tests.unit.supervisor.local.keeper.parts import Make


@pytest.fixture
def make() -> Iterator[Make]:
    """Create parts that were started long ago."""
    made: list[subprocess.Popen[bytes]] = []

    def part(name: str, program: str) -> ManagedProcess:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        made.append(process)
        return ManagedProcess(name, process, -1, 0.0)

    yield part
    for each in made:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()
