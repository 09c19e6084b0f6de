"""Every bench runs to its end at its smallest size, because a refactoring may break a bench."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.local, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
SMALLEST = {
    "recovery": "--kills 1 --others 1 --rounds 1 --modes holdfast torchrun",
    "start": "--rounds 1 --kills 1",
    "overhead": "--blocks 2 --steps 8",
    "snapshot": "--sizes 4 --parameters 10 --repeats 2 --writes 1 --evict 1",
    "frozen": "--frozen 20M --seconds 1 --repeats 1 --evict 1",
    "transfer": "--rounds 1 --state 10M",
    "sharing": "--rounds 1 --state 256M --rate 400M",
    "nodeagent": "--events 5 --rest 1 --days 0.1",
    "quarantine": "--nodes 50 --days 20",
    "scale": "--jobs 2 --members 4 --seconds 4",
    "soak": "--minutes 0.2 --gap 2",
}


@pytest.mark.parametrize("name", SMALLEST)
def test_a_bench_runs_to_its_end_and_stores_its_figures(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench", name, *SMALLEST[name].split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    figures = ended.stdout.rpartition("all figures: ")[2].split()
    assert figures, ended.stdout[-2000:]
    assert (ROOT / figures[0]).is_file()
