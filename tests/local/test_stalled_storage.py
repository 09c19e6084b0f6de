"""The run directory's storage stops answering: training goes on, faults are recovered from, Ctrl-C works."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import WAIT_S, until
from tests.stalling.switch import Storage

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

OPTIONS = "--nproc-per-node 2 --checkpoint-every 0"
ENDLESS = 10_000_000


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    made = Storage(tmp_path / "run", tmp_path)
    yield made
    made.answer()


def stalled(start: Start, storage: Storage) -> tuple[Run, Json]:
    """Return a run that trains and whose storage has stopped answering, with its last status."""
    run = start(OPTIONS, "steady.py", ENDLESS, **storage.environment)
    status = run.steady()
    storage.stall()
    return run, status


def test_a_fault_is_recovered_from_while_storage_hangs(start: Start, storage: Storage) -> None:
    run, before = stalled(start, storage)
    os.kill(before["ranks"][1]["pid"], signal.SIGKILL)
    after = run.wait(lambda s: s["generation"] > before["generation"] and s["rate"], "a new generation")
    assert after["supervisor_pid"] == before["supervisor_pid"], "it was not taken for a dead one"
    assert "the storage has not answered" in after["journal_error"]
    run.trains(20)
    until(lambda: "does not answer" in run.output() or None, "the screen says so", WAIT_S)
    storage.answer()
    run.wait(lambda s: not s["journal_error"], "the decision is on disk")
    found = run.recovered(before["incidents"] + 1)
    assert found["lost_steps"] <= 1, str(found)
    until(lambda: "is back" in run.output() or None, "the screen says so", WAIT_S)
    again = run.broken(lambda: run.hit(0, signal.SIGKILL))
    assert again["lost_steps"] <= 1
    assert run.stop().code == 130


def test_ctrl_c_ends_a_run_whose_storage_hangs(start: Start, storage: Storage) -> None:
    run, _ = stalled(start, storage)
    run.interrupt()
    until(lambda: "saving a checkpoint" in run.output() or None, "the first is heard", WAIT_S)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130
    assert "stopped without a last checkpoint" in ended.lines[-1]
