"""A closed terminal ends a run as SIGTERM does, and Ctrl-Z suspends the command and prints what continues."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.processes import Marked
from tests.local.running import ONE_THREAD, SCRIPTS
from tests.local.waiting import START_S, WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

CTRL_Z = b"\x1a"


class AtTerminal:
    """`holdfast run` in the foreground of a new terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marked = Marked()
        self.seen = ""
        environment = {**os.environ, **ONE_THREAD, **self.marked.environment, "TERM": "xterm"}
        command = [sys.executable, "-m", "holdfast", "run", "--plain", "--checkpoint-every", "0"]
        command += ["--run-dir", "run", "--", str(SCRIPTS / "steady.py"), "10000000"]
        pid, self.terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], command, environment)
        self.pid = pid

    def read(self, limit_s: float = 0.0) -> str:
        """Return everything that the terminal has shown so far."""
        while select.select([self.terminal], [], [], limit_s)[0]:
            try:
                self.seen += os.read(self.terminal, 65536).decode(errors="replace")
            except OSError:  # no process has it open any more
                break
            limit_s = 0.0
        return self.seen

    def shows(self, what: str, limit_s: float = WAIT_S) -> None:
        until(lambda: what in self.read() or None, lambda: f"{what!r} is shown\n{self.seen[-3000:]}", limit_s)

    def state(self) -> str:
        text = Path(f"/proc/{self.pid}/stat").read_text()
        return text[text.rindex(")") + 2]

    def ended(self) -> int:
        """Wait for the end and return the exit code."""

        def look() -> int | None:
            self.read()
            found, status = os.waitpid(self.pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if found else None

        code = until(look, "the end", WAIT_S)
        self.pid = 0
        return code

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.marked.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[AtTerminal]:
    made = AtTerminal(tmp_path)
    yield made
    made.kill()


def test_closing_the_terminal_costs_no_step(run: AtTerminal) -> None:
    run.shows("steps/s", START_S)
    os.close(run.terminal)

    def look() -> int | None:
        found, status = os.waitpid(run.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None

    assert until(look, "the end", WAIT_S) == 130
    run.pid = 0
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast", "status", "--run-dir", "run"],
        cwd=run.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"stopped as requested, with a checkpoint of step \d+", shown.stdout), shown.stdout
    until(lambda: None if run.marked.alive() else True, lambda: f"left: {run.marked.named()}", WAIT_S)


def test_ctrl_z_suspends_the_command_and_prints_what_continues(run: AtTerminal) -> None:
    run.shows("steps/s", START_S)
    os.write(run.terminal, CTRL_Z)
    run.shows("suspended: training continues")
    until(lambda: run.state() == "T" or None, "it is stopped", WAIT_S)
    before = len(run.read())
    os.kill(run.pid, signal.SIGCONT)
    until(lambda: "steps/s" in run.read()[before:] or None, "the display continues", WAIT_S)
    os.write(run.terminal, b"\x03")
    run.shows("press Ctrl-C again")
    assert run.ended() == 130
