"""Habits of healthy scripts in the first step after a restart: none causes another restart.

Each takes longer than the time after which such a step is inspected. See `test_habits` for their duration.
"""

from __future__ import annotations

import signal
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.healthy.test_habits import LIMIT_S, SCRIPT, SECONDS, Slowly
from tests.local.running import Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(1200)]

HABITS = (
    "sleeps", "terminal", "compile_workers", "new_workers", "downloads", "downloads_in_a_thread",
    "slow_import", "new_group", "recompiles", "backs_off", "waits_for_a_timer", "waits_for_a_native_thread",
    "waits_for_a_signal",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("first_steps")
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Slowly)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script, port = SCRIPT.with_name("first_steps.py"), str(server.server_address[1])
    made = Run(
        folder,
        "--members 2 --checkpoint-every 0 --max-restarts 50",
        [script, folder, *HABITS],
        HABIT_S=str(SECONDS),
        HABIT_PORT=port,
    )
    yield made
    made.kill()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_in_the_first_step_after_a_restart_causes_no_other(run: Run, name: str) -> None:
    before = run.steady(40)
    found = run.broken(lambda: run.hit(1, signal.SIGKILL), LIMIT_S)
    assert found["kind"] == "crash", found["why"]
    after = run.trains()
    assert (run.folder / name).exists(), "the habits of this run are done in order"
    assert float(Path(run.folder / name).read_text()) >= SECONDS / 2
    assert after["incidents"] == before["incidents"] + 1, run.report()
