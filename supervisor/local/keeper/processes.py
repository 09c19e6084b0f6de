"""Start or adopt the keeper's processes, watch them until they end, and kill their orphans."""

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
from supervisor.local.keeper.process_specs import ProcessSpec

GONE_S = 5.0  # the time for killed processes to end; the kernel takes over a second to free gigabytes


class AdoptedProcess:
    """A child process that a fork server created, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        status = None if self.returncode is not None else linux.collected(self.pid)
        if status is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:  # no other process can get its PID before it is collected
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

    @property
    def has_failed(self) -> bool:
        """True if the process crashed or exited and was not killed from outside."""
        return self.process.returncode not in (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(slots=True)
class ProcessTable:
    """Watches processes and calls back when they end.

    When a process ends, its orphans are killed. Then `left` is called, even if the kernel is still freeing
    the orphans. When they are gone, `ended` is called. Each of the two is called once per process.
    """

    logs: Path
    selector: selectors.BaseSelector
    ended: Callable[[ManagedProcess], None]
    left: Callable[[ManagedProcess], None] = lambda _: None
    _parts: list[ManagedProcess] = field(default_factory=list)
    _held: set[int] = field(default_factory=set)  # killed processes that cannot be collected yet

    def spawn(self, name: str, start: ProcessSpec) -> ManagedProcess:
        """Start and watch a process. If this raises `OSError`, no process is left running."""
        with logfile.opened(self.log(name)) as log:
            process = subprocess.Popen(
                start.argv,
                env=start.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=start.descriptors,
                start_new_session=True,  # only the keeper receives Ctrl-C and decides what it means
            )
        return self.watch(name, process)

    def watch(self, name: str, process: subprocess.Popen[bytes] | AdoptedProcess) -> ManagedProcess:
        """Watch `process`. If this raises `OSError`, the process has been killed."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            linux.collect_killed(process.pid, GONE_S)
            _collect_return_code(process)
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
        """Kill and collect the orphans of dead processes, which have become children of this process.

        Three kinds of processes cannot be collected yet, so later sweeps do not wait for them, and
        `collect_held` collects them:

        - processes that the kernel does not release within `GONE_S`, because they wait for a device or a file
          system;
        - processes that a debugger must collect first;
        - processes that appear dead because their main thread has ended before their other threads.
        """
        mine = {part.process.pid for part in self.alive()}
        give_up_at = time.monotonic() + GONE_S
        while True:
            strays = set(linux.children()) - mine
            self._held &= strays
            for pid in strays:
                linux.kill_group(pid)
                if linux.collected(pid) is not None or time.monotonic() > give_up_at:
                    self._held.add(pid)
            if strays <= self._held:
                return
            time.sleep(linux.PAUSE_S)

    def collect_held(self) -> None:
        """Collect processes that sweeps left behind and that can now be collected. Never waits."""
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
        _collect_return_code(part.process)
        self._kill_strays()
        self.left(part)
        self.sweep()
        self.ended(part)


def _collect_return_code(process: subprocess.Popen[bytes] | AdoptedProcess) -> None:
    """Set the return code of a process that has ended, even if a debugger must collect it first."""
    if process.poll() is None:
        status = linux.status_of_dead(process.pid)
        process.returncode = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)


# If its imports exceed a limit, a fork server is killed, and each process imports the modules itself.
IMPORT_S = 120.0  # the time limit for the imports of a script
PARTS_S = 20.0  # the time limit for the imports of the supervisor and the sidecars, which delay its start
BORN_S = 2.0  # how long the keeper waits for a fork, which takes milliseconds


class ForkServerClient:
    """The keeper's side of a fork server that has imported the modules its forks need.

    `settled` is called once, when `importing` becomes false. After that, `fork` works, or returns None
    because the fork server has failed and each process must be started separately.
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
        """Start the process that `begin` returns. `begin` receives the process's end of a connection.

        If `begin` returns None or the process cannot be started, `settled` is called immediately.
        """
        own_end, other_end = rank_channel.pair()
        with other_end:
            start = begin(other_end.fileno())
            if start is None:
                own_end.close()
                return self._settled()
            try:
                self._part = self._children.spawn(self._name, start)
            except OSError:  # not an error yet, because a fork server is not required
                own_end.close()
                return self._settled()
        self._line, self._limit_s, self.importing = own_end, now_s + self._import_s, True
        self._children.selector.register(own_end, selectors.EVENT_READ, self._receive)
        return None

    def poll(self, now_s: float) -> None:
        """Kill the fork server if it has been importing for too long."""
        if self.importing and now_s > self._limit_s:
            self._drop()

    def fork(self, name: str, order: WorkerOrder, descriptors: tuple[int, ...] = ()) -> ManagedProcess | None:
        """Fork a process for `order` with `descriptors`; return None if no fork server is running."""
        if self._line is None:
            return None
        try:
            born = _forked(self._line, order, self._children.log(name), descriptors)
            return self._children.watch(name, born)
        except rank_channel.Closed:
            self._drop()
            return None

    def start_part(
        self,
        name: str,
        order: WorkerOrder,
        alone: Callable[[], ProcessSpec],
        descriptors: tuple[int, ...] = (),
    ) -> ManagedProcess:
        """Fork a process as `fork` does, or start the one that `alone` returns if no fork server is running.

        Raises `OSError` if no process can be started.
        """
        return self.fork(name, order, descriptors) or self._children.spawn(name, alone())

    def _receive(self) -> None:
        assert self._line is not None
        try:
            ready = rank_channel.receive(self._line, WorkerMessage)[0].what == "ready"
        except (rank_channel.Closed, codec.InvalidMessage):
            ready = False
        if ready:
            self._end_import()
        else:
            self._drop()

    def _drop(self) -> None:
        """Kill the fork server. The processes that it has forked are not affected."""
        if self._line is not None and self._part is not None:
            self._children.selector.unregister(self._line)
            self._line.close()
            self._line = None
            self._part.process.kill()
        self._end_import()

    def _end_import(self) -> None:
        if self.importing:
            self.importing = False
            self._settled()


def _forked(
    line: socket.socket, order: WorkerOrder, log: Path, descriptors: tuple[int, ...]
) -> AdoptedProcess:
    """Return the forked process. Raises `Closed` if none was reported within `BORN_S`."""
    own_end, other_end = rank_channel.pair()
    own_end.settimeout(BORN_S)
    with own_end, logs.opened(log) as out:
        try:
            with other_end:
                rank_channel.send(line, order, (other_end.fileno(), out.fileno(), *descriptors))
            born, _ = rank_channel.receive(own_end, WorkerMessage)
        except (TimeoutError, codec.InvalidMessage):  # it hangs, or the command is too long for a message
            raise rank_channel.Closed from None
    return AdoptedProcess(born.pid)
