"""Habits of healthy scripts, with default options: none causes a restart, and each script finishes.

Each habit takes 8 s, more than ten times the time after which a step is late. HOLDFAST_HEALTHY_S=40 sets
a realistic duration.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.running import Json, Run
from tests.local.waiting import until

pytestmark = [pytest.mark.local, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("scripts") / "habits.py"
SECONDS = float(os.environ.get("HOLDFAST_HEALTHY_S", "8"))
LIMIT_S = 120 + 20 * SECONDS
RUNS = {
    "--members 2": (
        "sleeps", "stalled_file", "downloads", "downloads_in_a_thread", "saves_slowly", "evaluates_declared",
        "logs", "backs_off", "waits_for_a_timer", "waits_for_a_native_thread",
        "waits_for_a_signal",
    ),
    "--nproc-per-node 2": (
        "late_first_batch", "evaluates", "recompiles", "new_workers", "collects_garbage", "accumulates",
        "torch_saves", "varies", "evaluates_last",
    ),
    "--members 2 --checkpoint-every 0": ("waits",),
}  # fmt: skip
HABITS = [(options, name) for options, names in RUNS.items() for name in names if name != "waits"]
LEAST_S = {"logs": 1.0, "varies": 0.0, "collects_garbage": 2.0, "new_workers": SECONDS / 2}
_ATTACH, _DETACH = 16, 17  # PTRACE_*: sys/ptrace.h


class Slowly(socketserver.BaseRequestHandler):
    """A server that sends two bytes a second, for as long as a client is connected."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Event().wait(0.5)
                self.request.sendall(b"x")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Start all runs together, because most of them wait most of the time."""
    made: dict[str, Run] = {}
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Slowly)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = str(server.server_address[1])
    for options, names in RUNS.items():
        folder = tmp_path_factory.mktemp("healthy")
        made[options] = Run(folder, options, [SCRIPT, folder, *names], HABIT_S=str(SECONDS), HABIT_PORT=port)
    yield made
    for run in made.values():
        run.kill()
    server.shutdown()
    server.server_close()


def healthy(run: Run) -> Json:
    found = run.running()
    assert run.incidents() == [], run.report()
    assert (found["generation"], found["incidents"]) == (1, 0)
    return found


@pytest.mark.parametrize(("options", "name"), HABITS, ids=[name for _, name in HABITS])
def test_each_habit_completes_without_a_restart(runs: dict[str, Run], options: str, name: str) -> None:
    run = runs[options]
    done = run.folder / name

    def over() -> bool | None:
        assert run.incidents() == [], run.report()
        return done.exists() or None

    until(over, f"{name} is done", LIMIT_S, run._pidfd)
    assert float(done.read_text()) >= LEAST_S.get(name, SECONDS)


@pytest.mark.parametrize("options", [options for options, names in RUNS.items() if names != ("waits",)])
def test_each_run_finishes_without_an_incident(runs: dict[str, Run], options: str) -> None:
    ended = runs[options].finish(LIMIT_S)
    assert ended.code == 0, ended.output
    assert runs[options].incidents() == []
    assert "incident" not in ended.output


def test_a_rank_that_a_debugger_stops_is_not_declared_hung(runs: dict[str, Run]) -> None:
    run = runs["--members 2 --checkpoint-every 0"]
    before = run.steady(40)
    libc, pid = ctypes.CDLL(None, use_errno=True), run.pid(1)
    assert libc.ptrace(_ATTACH, pid, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        os.waitpid(pid, getattr(os, "__WALL", 0x40000000))
        held = run.wait(
            lambda status: (status["no_step_s"] or 0) > SECONDS and "debugger" in status["waiting_for"],
            "nothing moves",
            LIMIT_S,
        )
        assert held["hang_limit_s"] is None
        assert held["rate"] is None
    finally:
        libc.ptrace(_DETACH, pid, 0, 0)
    run.wait(
        lambda status: status["step"] > before["step"] + 20 and not status["no_step_s"], "training continues"
    )
    healthy(run)


def test_a_suspended_machine_loses_no_process(runs: dict[str, Run]) -> None:
    run = runs["--members 2 --checkpoint-every 0"]
    run.steady(40)
    everyone = [pid for pid in run._marked.alive() if pid != os.getpid()]
    assert len(everyone) >= 8
    for signum, away_s in ((signal.SIGSTOP, SECONDS), (signal.SIGCONT, 0.0)):
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):  # the process has ended since it was listed
                os.kill(pid, signum)
        threading.Event().wait(away_s)  # how long the machine is suspended
    step = run.running()["step"]
    run.wait(lambda status: status["step"] > step + 60, "training continues")
    healthy(run)
    assert run.stop().code == 130
