"""A launcher's end of its zygote, from which the warm processes are forked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass

from holdfast import channel, osproc
from holdfast.channel import Do

END_S = 2.0  # after SIGKILL; one that the kernel holds for longer is collected by a sweep


@dataclass(slots=True, eq=False)
class Zygote:
    """A child of ours. It is `ready` once it has said so; its exit status is ours to collect."""

    pid: int
    line: socket.socket
    ready: bool = False

    def fork(self, local_rank: int, control: int, log: int) -> bool:
        """Ask for a process with these descriptors; False when nobody is there to ask."""
        try:
            channel.send(self.line, Do("fork", local_rank=local_rank), (control, log))
        except channel.Closed:
            return False
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and collect it. The line is closed."""
        self.kill()
        osproc.collect_killed(self.pid, END_S)
        self.line.close()
