"""Processes that take the places of a run's parts."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

from supervisor.local.keeper.processes import ManagedProcess

WAITS = "import threading; print(flush=True); threading.Event().wait()"
Make = Callable[[str, str], ManagedProcess]


def is_killed(part: ManagedProcess) -> bool:
    assert isinstance(part.process, subprocess.Popen)
    return part.process.wait(30) == -signal.SIGKILL
