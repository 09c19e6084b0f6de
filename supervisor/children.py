"""The keeper's processes: started or adopted, watched until they end, and what they leave behind."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import logfile, osproc
from supervisor.plan import Start

GONE_S = 5.0  # for what was killed: to give gigabytes back takes the kernel a second and more


class Adopted:
    """A process that another forked for us: our child all the same. Used as `subprocess.Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        status = None if self.returncode is not None else osproc.collected(self.pid)
        if status is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:  # until then the pid is nobody else's
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(slots=True)
class Part:
    """One process that the keeper owns."""

    name: str
    process: subprocess.Popen[bytes] | Adopted
    pidfd: int
    born_s: float


@dataclass(slots=True)
class Children:
    """Calls `ended` once for each part, at its end, when nothing that it left behind is alive.

    And `left` before that: all of it is killed, but the kernel may not have taken it down yet.
    """

    logs: Path
    selector: selectors.BaseSelector
    ended: Callable[[Part], None]
    left: Callable[[Part], None] = lambda _: None
    _parts: list[Part] = field(default_factory=list)
    _held: set[int] = field(default_factory=set)  # killed, and not to be collected yet

    def spawn(self, name: str, start: Start) -> Part:
        """Start a process. Raises `OSError`, and there is none."""
        with logfile.opened(self.log(name)) as log:
            process = subprocess.Popen(
                start.argv,
                env=start.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=start.descriptors,
                start_new_session=True,  # Ctrl-C is ours to hear and theirs to be told
            )
        return self.watch(name, process)

    def watch(self, name: str, process: subprocess.Popen[bytes] | Adopted) -> Part:
        """Watch `process`. Raises `OSError`, and it is ended."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            osproc.collect_killed(process.pid, GONE_S)
            _settle(process)
            raise
        part = Part(name, process, pidfd, time.monotonic())
        self._parts.append(part)
        self.selector.register(part.pidfd, selectors.EVENT_READ, lambda: self._end(part))
        return part

    def log(self, name: str) -> Path:
        return self.logs / f"{name.replace(' ', '-')}.log"

    def alive(self) -> list[Part]:
        return [part for part in self._parts if part.process.returncode is None]

    def sweep(self) -> None:
        """Kill what a dead part left behind: it came to us as an orphan.

        What the kernel does not let go within `GONE_S`, because it waits for a device or a file system, and
        what a debugger has to collect first, is left to `collect_held`. Later sweeps do not wait for it. So
        is one of many threads whose first has ended before the others: it looks dead, and cannot be had yet.
        """
        mine = {part.process.pid for part in self.alive()}
        give_up_at = time.monotonic() + GONE_S
        while True:
            strays = set(osproc.children()) - mine
            self._held &= strays  # the others are gone
            for pid in strays:
                osproc.kill_group(pid)
                if osproc.collected(pid) is not None or time.monotonic() > give_up_at:
                    self._held.add(pid)
            if strays <= self._held:
                return
            time.sleep(osproc.PAUSE_S)

    def collect_held(self) -> None:
        """Collect what a sweep has left, if it is to be had by now. Never waits."""
        if not self._held:
            return
        self._held &= set(osproc.children()) - {part.process.pid for part in self.alive()}
        for pid in self._held:
            osproc.collected(pid)

    def _kill_strays(self) -> None:
        mine = {part.process.pid for part in self.alive()}
        for pid in set(osproc.children()) - mine:
            osproc.kill_group(pid)

    def _end(self, part: Part) -> None:
        self.selector.unregister(part.pidfd)
        os.close(part.pidfd)
        self._parts.remove(part)
        _settle(part.process)
        self._kill_strays()
        self.left(part)
        self.sweep()
        self.ended(part)


def _settle(process: subprocess.Popen[bytes] | Adopted) -> None:
    """Take note of the end of a process, whoever else has to hear of it first."""
    if process.poll() is None:
        status = osproc.status_of_dead(process.pid)
        process.returncode = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
