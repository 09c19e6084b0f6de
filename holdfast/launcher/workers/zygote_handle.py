"""The launcher's handle to its zygote: forks the zygote, requests warm processes from it, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from holdfast.process import linux, title
from holdfast.protocol import rank_channel
from holdfast.protocol.rank_channel import WorkerOrder
from holdfast.worker import zygote
from holdfast.worker.script_source import ProgramSources

# A zygote's connection closes when its process exits. This is how long the process may remain after that.
ENDING_S = 0.5
END_S = 2.0  # how long a zygote may take to exit after SIGKILL; if it takes longer, a sweep reaps it later


@dataclass(slots=True, eq=False)
class Zygote:
    """A zygote, a child of this process. `ready` is set once the zygote reports that it is ready."""

    pid: int
    line: socket.socket
    ready: bool = False
    log: Path | None = None  # its log file; None if it writes to the log of the launcher
    killed: bool = False  # whether this process has killed it

    def fork(self, local_rank: int, control: int, log: int) -> bool:
        """Request a process with these descriptors; return False if the zygote has exited."""
        try:
            rank_channel.send(self.line, WorkerOrder("fork", local_rank=local_rank), (control, log))
        except rank_channel.Closed:
            return False
        return True

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the zygote, collect its exit status, and close the connection."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        linux.collect_killed(self.pid, END_S)
        self.line.close()

    def lost(self) -> int | None:
        """End a zygote that has closed its connection, and return its wait status.

        Returns None if this process killed it, or if the status cannot be determined.
        """
        status = None if self.killed else self._ended()
        self.end()
        return status

    def _ended(self) -> int | None:
        with contextlib.suppress(OSError):  # the process no longer exists
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], ENDING_S)
            finally:
                os.close(pidfd)
        return linux.collected(self.pid)


def fork_zygote(
    kept: ProgramSources, tracer: int, directory: str, nproc: int, *not_its_own: socket.socket
) -> Zygote:
    """Fork a zygote from this process, and return its handle. Does not return in the zygote itself.

    This process must already have imported the script's modules. It becomes the launcher afterwards.
    """
    ours, theirs = rank_channel.pair()
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Zygote(pid, ours)
    for each in (ours, *not_its_own):
        each.close()
    if kept.descriptor >= 0:
        os.close(kept.descriptor)  # only the launcher needs this descriptor, for later zygotes
    linux.end_with_parent(launcher)
    title.set_title(title.RANKS_FORK_SERVER)
    given = {"parent": launcher, "tracer": tracer, "directory": directory, "nproc": nproc}
    zygote.serve(kept.program, kept.main, given, theirs)
    os._exit(0)
