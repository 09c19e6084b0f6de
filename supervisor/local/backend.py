"""A local run's backend: the supervisor's connection to the keeper, which creates the members."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Mapping

from holdfast.process.clock import seconds_to_next_tick
from holdfast.protocol import codec
from supervisor.local import keeper_messages
from supervisor.local.keeper_messages import (
    Alive,
    Finish,
    GiveUpMember,
    Hello,
    KeeperState,
    Renew,
    StopRun,
    Want,
)
from supervisor.view.model import Completion, Departure, StopRequest

log = logging.getLogger(__name__)

ALIVE_S = 1.0  # the interval of `Alive` messages; the keeper replaces a supervisor that misses several
_READ_BYTES = 1 << 16


class LocalBackend:
    """Sends requests to the keeper, and holds the newest state received from it.

    The keeper sends its whole state at every change, and to each new supervisor.
    """

    def __init__(self, connection: socket.socket, changed: Callable[[], None]) -> None:
        """`changed` is called for each state that is received."""
        self._connection = connection
        self._changed = changed
        self._writer: asyncio.StreamWriter | None = None
        self._state = KeeperState({}, "")
        self._wanted: tuple[int, tuple[str, ...], tuple[str, ...]] | None = None
        self.known = asyncio.Event()  # set when the first state arrives

    @property
    def members(self) -> Collection[str]:
        return self._state.members.keys()

    @property
    def departures(self) -> Mapping[str, Departure]:
        """Always empty, because no other program ends members on this machine."""
        return {}

    @property
    def stop(self) -> StopRequest:
        return self._state.stop

    @property
    def volume_error(self) -> str:
        return self._state.volume_error

    async def run(self) -> None:
        """Receive states until the keeper closes the connection. The supervisor must then end."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._send(Hello())
        received = codec.LineBuffer()
        while data := await reader.read(_READ_BYTES):
            for line in received.split(data):
                self._read_line(line)

    async def report_alive(self) -> None:
        """Send `Alive` at each tick until cancelled, to show that this process's event loop runs."""
        while True:
            self._send(Alive())
            await asyncio.sleep(seconds_to_next_tick(ALIVE_S))

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        wanted = (count, discard, tuple(self.members))  # a change of the members requires a new request
        if self._wanted != wanted:
            self._wanted = wanted
            self._send(Want(count, discard))

    def end_member(self, member: str) -> None:
        self._send(GiveUpMember(member))

    def renew(self, member: str) -> None:
        self._send(Renew(member))

    def record_stop(self, how: StopRequest) -> None:
        self._send(StopRun(how))

    def finish(self, exit_code: int, why: str, message: str, completion: Completion | None) -> None:
        self._send(Finish(exit_code, why, message, completion))

    def _read_line(self, line: bytes) -> None:
        try:
            self._state = keeper_messages.decode_state(line)
        except codec.InvalidMessage as error:  # the keeper sends its whole state again at the next change
            log.warning("keeper's state refused", extra={"error": str(error)})
            return
        self.known.set()
        self._changed()

    def _send(self, request: keeper_messages.Request) -> None:
        if self._writer is not None:
            self._writer.write(keeper_messages.encode_request(request))
