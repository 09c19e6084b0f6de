"""The cost of one write to a rank's progress page."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from bench.figures import Summary, summary
from holdfast.page import Page, Phase

ROUNDS = 40
WRITES = 2500
PAUSE_S = 0.1  # between rounds: a moment in which a shared core is slow is not its pace


def measure() -> Summary:
    """Return the seconds of a commit, summed up over rounds of many: the clock itself costs 50 ns."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="bench-page-", dir=shared if os.access(shared, os.W_OK) else None
    ) as folder:
        page = Page.create(Path(folder) / "page.bin")
        page.begin(1, 0, 0, os.getpid(), 0)
        page.phase(Phase.DATA)
        took_s = [_round(page, at * WRITES) for at in range(ROUNDS)]
        page.close()
    return summary(took_s)


def _round(page: Page, first: int) -> float:
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    for step in range(first, first + WRITES):
        page.commit(step, 2.5, 1.0, 8, 1024, 1e9, 0, step)
    return (time.perf_counter() - began) / WRITES
