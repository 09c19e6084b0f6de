"""A launcher's end of its zygote, from which the warm processes are forked."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from holdfast import channel, osproc
from holdfast.channel import Do

ENDING_S = 0.5  # for one that has closed its line to be gone: the kernel does both at a process's end
END_S = 2.0  # after SIGKILL; one that the kernel holds for longer is collected by a sweep


@dataclass(slots=True, eq=False)
class Zygote:
    """A child of ours. It is `ready` once it has said so; its exit status is ours to collect."""

    pid: int
    line: socket.socket
    ready: bool = False
    log: Path | None = None  # what it prints to; None where that is the launcher's own
    killed: bool = False  # by us

    def fork(self, local_rank: int, control: int, log: int) -> bool:
        """Ask for a process with these descriptors; False when nobody is there to ask."""
        try:
            channel.send(self.line, Do("fork", local_rank=local_rank), (control, log))
        except channel.Closed:
            return False
        return True

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and collect it. The line is closed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        osproc.collect_killed(self.pid, END_S)
        self.line.close()

    def lost(self) -> int | None:
        """Return how one ended that closed its line, as its wait status, and end it.

        None when nobody can tell: it was we who killed it.
        """
        status = None if self.killed else self._ended()
        self.end()
        return status

    def _ended(self) -> int | None:
        with contextlib.suppress(OSError):  # nobody's any more
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], ENDING_S)
            finally:
                os.close(pidfd)
        return osproc.collected(self.pid)
