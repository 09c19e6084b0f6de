"""The HTTP server in a thread of its own: it goes on when the agent's disk or a sensor does not."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import cast

from aiohttp import web

START_S = 5.0
STOP_S = 0.5
BACKLOG = 64
MAX_IDLE_S = 15.0  # a kept connection
MAX_CONNECTIONS = BACKLOG  # open at a time, asking or not: the files that we may open are for the sensors


class CannotListen(Exception):
    """The address is taken or not ours; the message names it."""


class _Full(asyncio.Protocol):
    """Answers one connection too many: at once, whatever it asks."""

    _ANSWER = (
        b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 21\r\n\r\n"
        b"too many connections\n"
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        out = cast("asyncio.WriteTransport", transport)
        out.write(self._ANSWER)
        out.close()


class Server:
    """Serves one application on one address until `stop`."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host, port
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.port = port  # the real one, once `start` has returned

    def start(self) -> None:
        """Return once it listens. Raises CannotListen."""
        self._thread.start()
        self._up.wait(START_S)
        if self._error is not None or not self._up.is_set():
            raise CannotListen(f"{self._host}:{self._port}: {self._error or 'no answer'}")

    def stop(self) -> None:
        """Stop listening; requests under way are cut."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self._app, access_log=None, keepalive_timeout=MAX_IDLE_S, shutdown_timeout=0)
        try:
            with closing(self._loop.run_until_complete(self._listen(runner))):
                self._up.set()
                self._loop.run_forever()
        except OSError as error:
            self._error = error
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()
            self._up.set()

    async def _listen(self, runner: web.AppRunner) -> asyncio.Server:
        await runner.setup()
        server = runner.server
        assert server is not None  # since `setup`

        def answering() -> asyncio.Protocol:
            return server() if len(server.connections) < MAX_CONNECTIONS else _Full()

        listening = await self._loop.create_server(answering, self._host, self._port, backlog=BACKLOG)
        self.port = listening.sockets[0].getsockname()[1]
        return listening
