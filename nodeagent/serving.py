"""The HTTP server in a thread of its own: it goes on when the agent's disk or a sensor does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing

from aiohttp import web

from holdfast.door import BACKLOG, Door

START_S = 5.0
STOP_S = 0.5
MAX_IDLE_S = 15.0  # a kept connection
MAX_IDLE = 64  # of them at a time: the files that we may open are for the sensors


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CannotListen(Exception):
    """The address is taken or not ours; the message names it."""


class Server:
    """Serves one application on one address until `stop`."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host, port
        self._door = Door(MAX_IDLE, MAX_IDLE_S)
        app.middlewares.append(self._at_the_door)
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
                watching = self._loop.create_task(self._door.watch())
                self._loop.run_forever()
                watching.cancel()
        except OSError as error:
            self._error = error
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()
            self._up.set()

    @web.middleware
    async def _at_the_door(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with self._door.answering(request.protocol):
            return await handler(request)

    async def _listen(self, runner: web.AppRunner) -> asyncio.Server:
        await runner.setup()
        server = runner.server
        assert server is not None  # since `setup`
        listening = await self._loop.create_server(
            self._door.guarded(server), self._host, self._port, backlog=BACKLOG
        )
        self.port = listening.sockets[0].getsockname()[1]
        return listening
