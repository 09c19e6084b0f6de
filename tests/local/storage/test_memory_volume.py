"""The memory volume lacks room for a recovery, or loses the run's folder: no state is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]


def blocked(run: Run, member: str) -> Path:
    """Make the member's volume refuse private states, because nothing can be created below a file."""
    assert run.runtime is not None
    path = run.runtime / member / "restore"
    shutil.rmtree(path, ignore_errors=True)
    path.write_bytes(b"")
    return path


def test_a_volume_that_refuses_for_a_while_costs_no_steps_and_one_that_keeps_refusing_is_named(
    start: Start,
) -> None:
    run = start("--members 2 --checkpoint-every 0", "steady.py", 10_000_000)
    run.steady(20)
    path = blocked(run, "m1")
    run.hit(1, signal.SIGKILL)

    def refused() -> Json | None:
        return next((each for each in run.incidents() if each["kind"] == "restore"), None)

    first = until(refused, lambda: f"an attempt is refused\n{run.report()}", WAIT_S)
    assert "the memory volume /" in first["faults"][0]["detail"]
    path.unlink()
    run.trains()
    last = run.incidents()[-1]
    assert (last["resume"]["source"], last["lost_steps"]) == ("slot", 0), run.report()
    known = len(run.incidents())
    blocked(run, "m1")
    run.hit(1, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 1
    assert "the memory volume /" in ended.output
    assert "tried 3 times. The state itself is intact" in ended.output
    assert len(run.incidents()) - known <= 4, "one incident for the fault and one for each attempt"


def test_a_run_whose_memory_folder_is_removed_still_recovers_from_memory(start: Start) -> None:
    """systemd removes it at the last logout (RemoveIPC=yes), as does a user with `rm -rf`."""
    run = start("--members 2 --checkpoint-every 0", "steady.py", 10_000_000)
    run.steady(20)
    assert run.runtime is not None
    shutil.rmtree(run.runtime, ignore_errors=True)  # files are restored while others are still being removed
    assert "`loginctl enable-linger`" in until(lambda: _said(run), "a warning", WAIT_S)
    old = _sidecars(run)
    for pid in old:  # new sidecars have only the restored files
        os.kill(pid, signal.SIGKILL)
    run.wait(lambda _: len(_sidecars(run) - old) == len(old), "other sidecars report")
    run.trains()
    run.kill_ranks(0, 1)
    run.trains()
    [fault] = run.incidents()
    assert fault["resume"]["source"] == "slot", run.report()
    run.stop()


def _said(run: Run) -> str | None:
    return next((line for line in run.output().splitlines() if str(run.runtime) in line), None)


def _sidecars(run: Run) -> set[int]:
    status = run.status() or {"members": []}
    return {each["sidecar_pid"] for each in status["members"] if each["sidecar_pid"]}
