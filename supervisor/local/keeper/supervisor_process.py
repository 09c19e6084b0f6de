"""Represent the supervisor as its keeper sees it: a process, a connection, and whether it still works."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.process import linux
from holdfast.protocol import codec
from supervisor.local import keeper_messages
from supervisor.local.keeper.processes import ManagedProcess
from supervisor.local.keeper.watchdog import Watchdog
from supervisor.local.keeper_messages import Alive, KeeperState, Request
from supervisor.view.model import StopRequest

SEND_S = 0.5  # a supervisor that takes longer than this to read a state is stuck
MAX_REFUSALS = 16  # how many causes of refused requests are reported
_READ_BYTES = 1 << 16


class SupervisorProcess:
    """The run's current supervisor. It can be replaced any number of times."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
        handle: Callable[[Request], None],
        answer: Callable[[], None],
    ) -> None:
        """Prepare for the first supervisor.

        Args:
            selector: Calls `receive` when the supervisor has sent something.
            say: Called with lines for the user.
            handle: Called with each request except `Alive`.
            answer: Called after each request except `Alive`, and after each line that is not a request.
        """
        self.process: ManagedProcess | None = None
        self._selector = selector
        self._say, self._handle, self._answer = say, handle, answer
        self._connection: socket.socket | None = None
        self._received = codec.LineBuffer()
        self._refusals: set[str] = set()  # the causes that were reported
        self._watchdog = Watchdog()
        self._reported_unkillable = False

    def start(self, spawn: Callable[[int], ManagedProcess]) -> None:
        """Start a supervisor with `spawn`, which gets the descriptor of the supervisor's end of a connection.

        Raises `OSError` if it cannot be started. The run then has no supervisor.
        """
        self.disconnect()
        here, there = socket.socketpair()
        here.settimeout(SEND_S)
        try:
            with there:
                self.process = spawn(there.fileno())
        except OSError:
            here.close()
            raise
        self._watchdog = self._watchdog.born(time.monotonic())
        self._reported_unkillable = False
        self.connect(here)

    def connect(self, connection: socket.socket) -> None:
        """Receive requests on `connection` from now on."""
        self._connection, self._received = connection, codec.LineBuffer()
        self._selector.register(connection, selectors.EVENT_READ, self.receive)

    def disconnect(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def died(self) -> None:
        """Record that the process has ended."""
        self.process = None
        self._watchdog = self._watchdog.died()

    def stop_requested(self, how: StopRequest) -> None:
        """Record that the user asked the run to stop. The supervisor must respond in time."""
        self._watchdog = self._watchdog.stop_requested(how, time.monotonic())

    def send(self, state: KeeperState) -> None:
        """Send the keeper's state, if a supervisor is connected."""
        if self._connection is None:
            return
        with suppress(OSError):  # it is dead or stuck, and the next supervisor gets the state when it starts
            self._connection.sendall(codec.encode(state))

    def receive(self) -> None:
        """Receive what the supervisor has sent, and handle and answer each request."""
        assert self._connection is not None
        try:
            data = self._connection.recv(_READ_BYTES)
        except TimeoutError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.disconnect()
            return
        for line in self._received.split(data):
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            request = keeper_messages.decode_request(line)
        except codec.InvalidMessage as error:
            self._refuse(str(error))
        else:
            if isinstance(request, Alive):
                self._watchdog = self._watchdog.heard(time.monotonic())
                return
            self._handle(request)
        self._answer()

    def _refuse(self, why: str) -> None:
        """Tell the user about a refused request, once for each cause. The run continues without it."""
        if why not in self._refusals and len(self._refusals) < MAX_REFUSALS:
            self._refusals.add(why)
            self._say(f"a message from the supervisor was refused: {why}")

    def watch(self, now_s: float, late_s: float) -> None:
        """Kill a stuck supervisor. This check is `late_s` late; the delay is not counted as silence."""
        self._watchdog = self._watchdog.later(now_s, late_s)
        if self.process is None:
            return
        pid = self.process.process.pid
        doubtful = self._watchdog.doubtful(now_s)
        why = self._watchdog.stuck(now_s, linux.state_of(pid)[0]) if doubtful else ""
        if why:
            self._watchdog = self._watchdog.killed(now_s)
            self._say(f"{why}: killing and replacing it")
            self.process.process.kill()
        elif self._watchdog.unkillable(now_s) and not self._reported_unkillable:
            self._reported_unkillable = True
            self._say(
                f"process {pid}, a supervisor, was killed but has not exited, because the kernel waits for a"
                " device or a file system. The ranks keep training, but the run cannot recover from"
                " faults until the process ends"
            )

    def overdue(self, now_s: float) -> str:
        """Return why the keeper must end the run itself; "" while a supervisor can still do so."""
        return self._watchdog.overdue(now_s)
