"""Find all processes of one run by a mark in the environment that each inherits."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from pathlib import Path

_NAME = "HOLDFAST_TEST_RUN"


class Marked:
    """The processes that were started with `environment`, and all that they start."""

    def __init__(self) -> None:
        self.environment = {_NAME: uuid.uuid4().hex}
        self._mark = f"{_NAME}={self.environment[_NAME]}".encode()

    def alive(self) -> list[int]:
        return [pid for pid in _pids() if self._mark in _environment(pid)]

    def named(self) -> list[tuple[int, str]]:
        """Return the living processes with their command lines."""
        return [(pid, _words(pid)) for pid in self.alive()]

    def kill(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return ""
