"""A worker: its process, from the fork to the end, and the rank of a generation that the process runs."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.process import linux, logs
from holdfast.protocol.launcher_messages import (
    DISTRIBUTED,
    BadNumber,
    Ending,
    ProcessPhase,
    RankStart,
    StartTimes,
)
from holdfast.protocol.rank_channel import WorkerMessage

TAIL_BYTES = 4096  # how much is kept of the end of a rank's output


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """The process of one rank, from its fork to its end. `pid` is 0 until the process has reported it."""

    local_rank: int
    control: socket.socket
    log: Path
    pid: int = 0
    pidfd: int = -1
    parked: bool = False
    reported: Ending | None = None  # how the process ends, according to its own report
    killed: int = 0  # the first signal that the launcher sent
    made_s: float = field(default_factory=time.monotonic)

    def kill(self, signum: int) -> None:
        """Signal the process and its process group, or do so later if its pid is not known yet."""
        self.killed = self.killed or signum
        if self.pid:
            linux.kill_group(self.pid, signum)

    def sent(self, message: WorkerMessage) -> bool:
        """Return True if this process sent `message`, rather than a fork of it that inherited the channel."""
        return message.pid in (0, self.pid)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self.control.close()


@dataclass(slots=True, eq=False)
class Worker:
    """One rank of a generation and its state. `process` is None until one has been assigned."""

    rank: int
    local_rank: int
    rank_start: RankStart
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
    def phase(self) -> ProcessPhase:
        if self.exited:
            return "exited"
        if self.ending is not None:
            return "failing"
        return "running" if self.marks.started_ns else "starting"


def live_workers(workers: tuple[Worker, ...]) -> list[tuple[Worker, WorkerProcess]]:
    """Return the workers whose process has not exited, each with its process."""
    return [
        (each, each.process)
        for each in workers
        if each.process is not None and each.process.pid and not each.exited
    ]


def reported_ending(before: Ending | None, message: WorkerMessage) -> Ending | None:
    """Return how a rank will end according to its earlier report `before` and its new report `message`.

    An ending can be withdrawn or replaced only while its exception is unwinding and may still be caught.
    """
    if before is not None and not before.unwinding:
        return before
    if message.what == "withdrawn":
        return None
    if message.what == "failing" and message.ending is not None:
        return message.ending
    return before


def reap(process: WorkerProcess) -> Ending:
    """Reap a process whose pidfd is readable. Return how it ended, according to its report and the kernel."""
    now_ns, code, signum = time.monotonic_ns(), None, None
    _end_orphans(process.pid)
    found = linux.collected(process.pid) if process.pid else None
    status = 0xFF00 if found is None else found
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
    else:
        code = os.WEXITSTATUS(status)
    ours = process.killed != 0 and signum == process.killed
    ended = Ending(now_ns, code, signum, ours, "", 0, logs.tail(process.log, TAIL_BYTES))
    return final_ending(process.reported, ended)


def final_ending(reported: Ending | None, ended: Ending) -> Ending:
    """Combine the ending that a rank itself `reported` with `ended`, the ending that the kernel observed.

    | reported | exit code | signal of the launcher | another signal |
    |---|---|---|---|
    | nothing | ended | ended | ended |
    | a failure | reported | reported | ended |
    | that its peers are lost | reported | reported | reported |
    | an exception that is unwinding | reported, with that code; ended if it is 0 | reported | ended |

    If the exit code is 0 although an exception was unwinding, a `finally` block has ended the process, and
    this is not a failure.
    """
    if reported is None:
        return ended
    if ended.signal and not ended.ours:
        is_victim = reported.fail == DISTRIBUTED and not reported.unwinding
        return reported if is_victim else replace(ended, paused=reported.paused)
    if not reported.unwinding:
        return reported
    if ended.code == 0:
        return ended
    code = reported.code if ended.signal else ended.code
    return replace(reported, unwinding=False, overdue=False, code=code)


def _end_orphans(pid: int) -> None:
    """If the rank failed, kill the rest of its process group.

    Data loader workers would take up to 5 s to notice that their parent has exited. The pid cannot belong to
    another process yet, because the rank has not been reaped. If the rank succeeded, its processes may still
    have work to do, such as an upload, and may run until the member ends.
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
