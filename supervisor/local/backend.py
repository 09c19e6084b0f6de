"""A local run's backend: the supervisor's line to `holdfast run`, which creates the members."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping

from holdfast.process.clock import seconds_to_next_tick

SIGN_S = 1.0  # between signs of life: the keeper replaces a supervisor that gives none for several of them


class LocalBackend:
    """The local one: `holdfast run` itself starts and watches the members' processes.

    One socket, JSON lines. The keeper tells all it has whenever that changes, and again to a new supervisor.
    """

    def __init__(self, line: socket.socket, changed: Callable[[], None]) -> None:
        self._line = line
        self._changed = changed
        self._writer: asyncio.StreamWriter | None = None
        self._members: dict[str, str] = {}
        self._stop = ""
        self._volume_error = ""
        self._wanted: tuple[int, tuple[str, ...], tuple[str, ...]] | None = None
        self.known = asyncio.Event()

    @property
    def members(self) -> Mapping[str, str]:
        return self._members

    @property
    def stop(self) -> str:
        return self._stop

    @property
    def volume_error(self) -> str:
        return self._volume_error

    async def run(self) -> None:
        """Listen until the keeper is gone; then this process has no reason to be."""
        reader, self._writer = await asyncio.open_connection(sock=self._line)
        self._send({"do": "hello"})
        while line := await reader.readline():
            said = json.loads(line)
            self._members = said["members"]
            self._stop = said["stop"]
            self._volume_error = said.get("volume_error", "")
            self.known.set()
            self._changed()

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        asked = (count, discard, tuple(self._members))  # again whenever one has come or gone
        if self._wanted != asked:
            self._wanted = asked
            self._send({"do": "want", "count": count, "discard": list(discard)})

    def kill(self, member: str) -> None:
        self._send({"do": "kill", "name": member})

    def renew(self, member: str) -> None:
        self._send({"do": "renew", "name": member})

    async def live(self) -> None:
        """Give the keeper a sign of life, for ever: that this process's event loop runs."""
        while True:
            self._send({"do": "alive"})
            await asyncio.sleep(seconds_to_next_tick(SIGN_S))

    def stop_asked(self, how: str) -> None:
        self._send({"do": "stop", "how": how})

    def finish(self, exit_code: int, why: str, message: str) -> None:
        self._send({"do": "finish", "code": exit_code, "why": why, "message": message})

    def _send(self, said: Mapping[str, object]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(said).encode() + b"\n")
