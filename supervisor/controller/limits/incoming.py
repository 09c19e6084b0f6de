"""Limit the memory of messages that are being received, or that wait to be decoded.

aiohttp collects a message in memory until it is complete. Without a limit, each of thousands of members could
send most of a large message and then stop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

SMALL_BYTES = 64 << 10  # each connection may hold this much; to hold more, it needs a place
PLACES = 24  # each allows up to `codec.MAX_MESSAGE_BYTES` plus one more read
NAMESPACE_PLACES = 3
PLACE_S = 5.0  # how long a message may take to arrive while other connections wait for its place
READ_BYTES = 64  # the memory that each read takes in addition to its data


class MessageBuffer(Protocol):
    """A connection that may need a place."""

    namespace: str
    has_whole_message: bool  # a message has arrived, and waits to be decoded

    def resume(self) -> None:
        """Receive the rest of the message, because there is a place now."""

    def abort(self) -> None:
        """End the connection."""


class IncomingMessages:
    """The places for large messages, shared by all connections of one process."""

    def __init__(self) -> None:
        self._held: dict[MessageBuffer, float] = {}  # when each place was taken, the oldest first
        self._by_namespace: Counter[str] = Counter()
        self._waiting: dict[MessageBuffer, None] = {}

    def ask(self, buffer: MessageBuffer, now_s: float) -> bool:
        """Return whether `buffer` has a place now. If not, `resume` is called when it gets one."""
        if self._has_room(buffer):
            self._take(buffer, now_s)
            return True
        self._waiting[buffer] = None
        return False

    def leave(self, buffer: MessageBuffer, now_s: float) -> None:
        """Give up the place of `buffer`, or stop waiting for one. Safe to repeat."""
        self._waiting.pop(buffer, None)
        if self._held.pop(buffer, None) is None:
            return
        self._by_namespace[buffer.namespace] -= 1
        if not self._by_namespace[buffer.namespace]:
            del self._by_namespace[buffer.namespace]
        ready = [each for each in self._waiting if self._has_room(each)]
        if ready:  # choose the namespace with the fewest places, and its longest waiting buffer
            following = min(ready, key=lambda each: self._by_namespace[each.namespace])
            del self._waiting[following]
            self._take(following, now_s)
            following.resume()

    def end_slow(self, now_s: float) -> None:
        """End the connections that take too long to send a message while others wait for a place."""
        if not self._waiting:
            return
        for buffer, since_s in tuple(self._held.items()):
            if now_s - since_s > PLACE_S and not buffer.has_whole_message:
                buffer.abort()

    async def watch(self) -> None:
        """Call `end_slow` regularly. Never returns."""
        while True:
            await asyncio.sleep(1.0)
            self.end_slow(asyncio.get_running_loop().time())

    def _has_room(self, buffer: MessageBuffer) -> bool:
        return len(self._held) < PLACES and self._by_namespace[buffer.namespace] < NAMESPACE_PLACES

    def _take(self, buffer: MessageBuffer, now_s: float) -> None:
        self._held[buffer] = now_s
        self._by_namespace[buffer.namespace] += 1


class MemberBuffer:
    """The data that one connection has received but not yet passed on. Implements `MessageBuffer`."""

    def __init__(
        self, incoming: IncomingMessages, namespace: str, max_bytes: int, connection: MeteredConnection
    ) -> None:
        """A whole message has at most `max_bytes`."""
        self.namespace = namespace
        self.has_whole_message = False
        self.is_paused = False
        self._incoming, self._max_bytes, self._connection = incoming, max_bytes, connection
        self._received_bytes = 0
        self._reads = 0  # since the buffer was last empty
        self._has_place = self._is_waiting = False

    @property
    def held_bytes(self) -> int:
        return self._received_bytes + self._reads * READ_BYTES

    def received(self, size: int) -> None:
        """Count a read. Pause if there is no place for it, or if more than one message is held."""
        self._received_bytes += size
        self._reads += 1
        self._consider()

    def passed_on(self, size: int) -> None:
        """Record that a message of `size` bytes has been passed on, and free its place."""
        self.has_whole_message = False
        self._received_bytes = max(0, self._received_bytes - _frame_bytes(size))
        if not self._received_bytes:
            self._reads = 0
        if self._has_place:
            self._free_place()
        self._consider()

    def resume(self) -> None:
        self._has_place, self._is_waiting = True, False
        self._pause(self._is_full)

    def abort(self) -> None:
        self._connection.end()

    def close(self) -> None:
        """Stop counting, because data that arrives while the connection ends must not take a place."""
        self._connection.buffer = None
        self._free_place()

    @property
    def _is_full(self) -> bool:
        """True if more than one message is held, so the connection cannot be waiting for the rest of one."""
        return self.held_bytes > self._max_bytes + SMALL_BYTES

    def _free_place(self) -> None:
        if self._has_place or self._is_waiting:
            self._has_place = self._is_waiting = False
            self._incoming.leave(self, _now_s())

    def _consider(self) -> None:
        if self.held_bytes <= SMALL_BYTES:
            self._free_place()
            self._pause(False)
            return
        if not self._has_place and not self._is_waiting:
            self._has_place = self._incoming.ask(self, _now_s())
            self._is_waiting = not self._has_place
        self._pause(self._is_waiting or self._is_full)

    def _pause(self, pauses: bool) -> None:
        if pauses != self.is_paused:
            self.is_paused = pauses
            if pauses:
                self._connection.pause_reading()
            else:
                self._connection.resume_reading()


class MeteredConnection(web.RequestHandler):
    """aiohttp's connection to a client. While `buffer` is set, the received data is counted.

    `end_when_silent` replaces aiohttp's heartbeat, which makes the event loop handle one more event for each
    message that arrives.
    """

    buffer: MemberBuffer | None = None
    _has_received = False  # since the last call of `_look`
    _was_asked = False  # the client has been silent since it was asked for a sign of life
    _looking: asyncio.TimerHandle | None = None
    _asking: object = None  # the result of the last `ask`; a task that nothing refers to may be freed

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        super().data_received(data)
        if self.buffer is not None:
            self.buffer.received(len(data))

    def end_when_silent(self, limit_s: float, ask: Callable[[], object]) -> None:
        """Call `ask` after `limit_s` without data, or up to twice as long, and then end the connection.

        The client has half of `limit_s` to send anything, which keeps the connection. Call this once.
        """
        self._has_received, self._was_asked = True, False
        self._look(limit_s, ask)

    def _look(self, limit_s: float, ask: Callable[[], object]) -> None:
        # If this process was stopped, the event loop reads what has arrived since before it calls this.
        is_silent = not self._has_received and not (self.buffer is not None and self.buffer.is_paused)
        if is_silent and self._was_asked:
            self.end()
            return
        if is_silent:
            self._asking = ask()
        self._has_received, self._was_asked = False, is_silent
        wait_s = limit_s / 2 if is_silent else limit_s
        self._looking = asyncio.get_running_loop().call_later(wait_s, self._look, limit_s, ask)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Continue to read, unless the buffer is full. aiohttp calls this whenever its own queue has room."""
        if self.buffer is None or not self.buffer.is_paused:
            super().resume_reading(resume_parser)

    def end(self) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self.transport.abort()


def _frame_bytes(size: int) -> int:
    """Return the size of a client's frame that contains a whole message of `size` bytes."""
    return size + 6 + (0 if size < 126 else 2 if size < 1 << 16 else 8)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
