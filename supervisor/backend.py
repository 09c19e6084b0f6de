"""Who creates members. Decisions know only this interface; a cluster's backend will make pods."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

from holdfast.beat import left_s

SIGN_S = 1.0  # between signs of life: the keeper replaces a supervisor that gives none for several of them


class Backend(Protocol):
    """Makes sure that so many members exist. All calls are wishes and may be repeated."""

    @property
    def members(self) -> Mapping[str, str]:
        """Name -> state ("running") of the members that exist."""

    @property
    def stop(self) -> str:
        """What the user asked of the run: see `Memory.stop`."""

    @property
    def volume_error(self) -> str:
        """Why what the members have in memory cannot be used; "" when it can."""

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        """See to it that `count` members exist besides those in `discard`, which are to go."""

    def kill(self, member: str) -> None:
        """Power loss, for drills: the member and its memory are gone at once."""

    def renew(self, member: str) -> None:
        """See whether the sidecar of a member is stopped or stuck, and have another take its place if so."""

    def stop_asked(self, how: str) -> None:
        """Say that the user asked the supervisor itself for an end: "graceful" or "now"."""

    def finish(self, exit_code: int, why: str, message: str) -> None:
        """Tell whoever waits for the run how it ended."""


class KeeperBackend:
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
            await asyncio.sleep(left_s(SIGN_S))

    def stop_asked(self, how: str) -> None:
        self._send({"do": "stop", "how": how})

    def finish(self, exit_code: int, why: str, message: str) -> None:
        self._send({"do": "finish", "code": exit_code, "why": why, "message": message})

    def _send(self, said: Mapping[str, object]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(said).encode() + b"\n")
