"""A stopped warm worker: a recovery that needs one does not wait for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]


def parked(run: Run) -> list[int]:
    """Return the siblings of the ranks: the warm processes and the process that forks them."""
    ranks = {each["pid"] for each in run.running()["ranks"]}
    parents = {_parent(pid) for pid in ranks}
    return [pid for pid in run._marked.alive() if _parent(pid) in parents and pid not in ranks]


def _parent(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[1])


def test_a_stopped_warm_worker_is_skipped_and_replaced(start: Start) -> None:
    run = start("--first-step-timeout 60s", "steady.py", 10_000_000)
    run.steady(30)
    stopped = parked(run)
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    found = run.broken(lambda: run.hit(0, signal.SIGKILL))
    assert found["kind"] == "crash"
    assert len(run.incidents()) == 1
    assert not set(stopped) & {each["pid"] for each in run.running()["ranks"]}
    assert run.stop().code == 130
