"""One worker: its process from fork to end, and the rank of a generation that it runs."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.process import linux, logs
from holdfast.protocol.launcher_messages import BadNumber, Ending, RankStart, StartTimes

TAIL_BYTES = 4096  # of what a rank printed last


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One rank's process, from its fork to its end. `pid` is 0 until it has said so."""

    local_rank: int
    control: socket.socket
    log: Path
    pid: int = 0
    pidfd: int = -1
    parked: bool = False
    said: Ending | None = None  # what it told before it ended
    killed: int = 0  # the signal that we sent
    made_s: float = field(default_factory=time.monotonic)

    def kill(self, signum: int) -> None:
        self.killed = self.killed or signum
        if self.pid:
            linux.kill_group(self.pid, signum)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self.control.close()


@dataclass(slots=True, eq=False)
class Worker:
    """`process` is None until a warm one is there."""

    rank: int
    local_rank: int
    order: RankStart
    process: WorkerProcess | None = None
    ending: Ending | None = None
    flag: BadNumber | None = None
    marks: StartTimes = field(default_factory=StartTimes)
    exited: bool = False
    note: str = ""
    where: str = ""
    stopped: bool = False
    left: str = ""

    @property
    def state(self) -> str:
        if self.exited:
            return "exited"
        if self.ending is not None:
            return "failing"
        return "running" if self.marks.started_ns else "starting"


def live_workers(seats: tuple[Worker, ...]) -> list[tuple[Worker, WorkerProcess]]:
    """Return who has a process that has not ended, and that process."""
    return [(s, s.process) for s in seats if s.process is not None and s.process.pid and not s.exited]


def reap(process: WorkerProcess) -> Ending:
    """Collect a process whose pidfd is readable; return how it ended.

    What the process said itself goes before what the kernel says, but not its signal.
    """
    now_ns, code, signum = time.monotonic_ns(), None, None
    _end_orphans(process.pid)
    found = linux.collected(process.pid) if process.pid else None
    status = 0xFF00 if found is None else found
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
    else:
        code = os.WEXITSTATUS(status)
    said, ours = process.said, process.killed != 0 and signum == process.killed
    if said is not None and not (signum and not ours):
        return said
    return Ending(now_ns, code, signum, ours, "", 0, logs.tail(process.log, TAIL_BYTES))


def _end_orphans(pid: int) -> None:
    """Kill what a rank that failed has left in its group: data loader workers look for it every 5 s only.

    While the rank is not yet collected, nobody else can have its number. What a rank left that ended well may
    be meant to go on (an upload); it has until the member ends.
    """
    if not pid:
        return
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return
    if found is None:  # a debugger is attached
        failed = bool(linux.status_of_dead(pid))
    else:
        failed = found.si_code != os.CLD_EXITED or found.si_status != 0
    if failed:
        linux.kill_group(pid)
