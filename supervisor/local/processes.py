"""The keeper's processes: started or adopted, watched until they end, and what they leave behind."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.process import linux, logs
from holdfast.process import logs as logfile
from holdfast.protocol import codec, rank_channel
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from supervisor.local.process_specs import ProcessSpec

GONE_S = 5.0  # for what was killed: to give gigabytes back takes the kernel a second and more


class AdoptedProcess:
    """A process that another forked for us: our child all the same. Used as `subprocess.Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        status = None if self.returncode is not None else linux.collected(self.pid)
        if status is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:  # until then the pid is nobody else's
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(slots=True)
class ManagedProcess:
    """One process that the keeper owns."""

    name: str
    process: subprocess.Popen[bytes] | AdoptedProcess
    pidfd: int
    born_s: float


@dataclass(slots=True)
class ProcessTable:
    """Calls `ended` once for each part, at its end, when nothing that it left behind is alive.

    And `left` before that: all of it is killed, but the kernel may not have taken it down yet.
    """

    logs: Path
    selector: selectors.BaseSelector
    ended: Callable[[ManagedProcess], None]
    left: Callable[[ManagedProcess], None] = lambda _: None
    _parts: list[ManagedProcess] = field(default_factory=list)
    _held: set[int] = field(default_factory=set)  # killed, and not to be collected yet

    def spawn(self, name: str, start: ProcessSpec) -> ManagedProcess:
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

    def watch(self, name: str, process: subprocess.Popen[bytes] | AdoptedProcess) -> ManagedProcess:
        """Watch `process`. Raises `OSError`, and it is ended."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            linux.collect_killed(process.pid, GONE_S)
            _settle(process)
            raise
        part = ManagedProcess(name, process, pidfd, time.monotonic())
        self._parts.append(part)
        self.selector.register(part.pidfd, selectors.EVENT_READ, lambda: self._end(part))
        return part

    def log(self, name: str) -> Path:
        return self.logs / f"{name.replace(' ', '-')}.log"

    def alive(self) -> list[ManagedProcess]:
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
            strays = set(linux.children()) - mine
            self._held &= strays  # the others are gone
            for pid in strays:
                linux.kill_group(pid)
                if linux.collected(pid) is not None or time.monotonic() > give_up_at:
                    self._held.add(pid)
            if strays <= self._held:
                return
            time.sleep(linux.PAUSE_S)

    def collect_held(self) -> None:
        """Collect what a sweep has left, if it is to be had by now. Never waits."""
        if not self._held:
            return
        self._held &= set(linux.children()) - {part.process.pid for part in self.alive()}
        for pid in self._held:
            linux.collected(pid)

    def _kill_strays(self) -> None:
        mine = {part.process.pid for part in self.alive()}
        for pid in set(linux.children()) - mine:
            linux.kill_group(pid)

    def _end(self, part: ManagedProcess) -> None:
        self.selector.unregister(part.pidfd)
        os.close(part.pidfd)
        self._parts.remove(part)
        _settle(part.process)
        self._kill_strays()
        self.left(part)
        self.sweep()
        self.ended(part)


def _settle(process: subprocess.Popen[bytes] | AdoptedProcess) -> None:
    """Take note of the end of a process, whoever else has to hear of it first."""
    if process.poll() is None:
        status = linux.status_of_dead(process.pid)
        process.returncode = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)


# The keeper's end of a template: it forks a local run's members from one, our own parts from another.


# A template that imports for longer is given up: whoever would be forked from it imports for itself.
IMPORT_S = 120.0  # what a script imports
PARTS_S = 20.0  # what our own parts do: until then there is no supervisor
BORN_S = 2.0  # a fork takes milliseconds, and the keeper waits for it


class ForkServerClient:
    """One process that imports what many need. Without it each of them does that for itself.

    `settled` is called when `importing` is over: it may be forked now, or there is none.
    """

    def __init__(
        self, name: str, children: ProcessTable, settled: Callable[[], None], import_s: float = IMPORT_S
    ) -> None:
        self.importing = False
        self._import_s = import_s
        self._name = name
        self._children = children
        self._settled = settled
        self._line: socket.socket | None = None
        self._part: ManagedProcess | None = None
        self._limit_s = 0.0

    def start(self, begin: Callable[[int], ProcessSpec | None], now_s: float) -> None:
        """Start what `begin` returns for its line's descriptor. Ends in `settled`, at once if it is None."""
        ours, theirs = rank_channel.pair()
        with theirs:
            start = begin(theirs.fileno())
            if start is None:
                ours.close()
                return self._settled()
            try:
                self._part = self._children.spawn(self._name, start)
            except OSError:  # without it each imports for itself, or says why it cannot
                ours.close()
                return self._settled()
        self._line, self._limit_s, self.importing = ours, now_s + self._import_s, True
        self._children.selector.register(ours, selectors.EVENT_READ, self._hear)
        return None

    def poll(self, now_s: float) -> None:
        """Give it up when it has imported for too long."""
        if self.importing and now_s > self._limit_s:
            self._drop()

    def fork(self, name: str, order: WorkerOrder, descriptors: tuple[int, ...] = ()) -> ManagedProcess | None:
        """Return the process that `order` asks for, given `descriptors`; None where there is none to fork."""
        if self._line is None:
            return None
        try:
            born = _forked(self._line, order, self._children.log(name), descriptors)
            return self._children.watch(name, born)
        except rank_channel.Closed:
            self._drop()
            return None

    def _hear(self) -> None:
        assert self._line is not None
        try:
            ready = rank_channel.receive(self._line, WorkerMessage)[0].what == "ready"
        except (rank_channel.Closed, codec.InvalidMessage):
            ready = False
        if ready:
            self._settle()
        else:
            self._drop()

    def _drop(self) -> None:
        """Go on without it. What it has forked is apart from it."""
        if self._line is not None and self._part is not None:
            self._children.selector.unregister(self._line)
            self._line.close()
            self._line = None
            self._part.process.kill()
        self._settle()

    def _settle(self) -> None:
        if self.importing:
            self.importing = False
            self._settled()


def _forked(
    line: socket.socket, order: WorkerOrder, log: Path, descriptors: tuple[int, ...]
) -> AdoptedProcess:
    """Return the process that was forked, or raise `Closed` when none has come in time."""
    ours, theirs = rank_channel.pair()
    ours.settimeout(BORN_S)
    with ours, logs.opened(log) as out:
        try:
            with theirs:
                rank_channel.send(line, order, (theirs.fileno(), out.fileno(), *descriptors))
            born, _ = rank_channel.receive(ours, WorkerMessage)
        except (TimeoutError, codec.InvalidMessage):  # it hangs, or the command is of 100 KB
            raise rank_channel.Closed from None
    return AdoptedProcess(born.pid)
