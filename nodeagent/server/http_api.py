"""The agent's HTTP API and its server: read-only, and open to every client that can reach its address.

The server runs in a separate thread, serves the state that the agent has published, and never calls the
agent. It therefore responds even while every sensor or the agent's disk hangs.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from holdfast.process.network import SERVER_BACKLOG, Door
from nodeagent.agent.agent import Published
from nodeagent.server import listening, metrics, report

START_S = 5.0
STOP_S = 0.5
MAX_IDLE_S = 5.0  # a connection is closed if it is idle for this time, or if its headers take longer
MAX_IDLE = 64  # concurrent idle connections, to leave the sensors enough file descriptors
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES = 16 << 10
MAX_EVENTS = 1000  # in one response
MAX_WAIT_S = 30.0
SILENT_S = 10.0  # /healthz fails after this time without a cycle; the agent completes one every 2.5 s
MAX_WAITING = 8  # requests that may wait for events concurrently; others get an empty response immediately
_POLL_S = 0.05
Injector = Callable[[Mapping[str, Any]], str]  # returns the injected text; raises ValueError


class CannotListen(Exception):
    """The address is in use or not local; the message contains it."""


class AddressTaken(CannotListen):
    """A process that is no healthy agent holds the address; `HttpServer.start` may be called again."""


class HttpServer:
    """Serves one application on one address, in a separate thread, until `stop`."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host, port
        self._sockets: list[socket.socket] = []
        self._door = Door(MAX_IDLE, MAX_IDLE_S)
        app.middlewares.append(self._at_the_door)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        self.port = port  # the actual port, once `start` has returned

    def start(self, *, asks: bool = True) -> None:
        """Return once the server listens. Raises CannotListen, AddressTaken. For `asks`, see `listening`."""
        try:
            self._sockets = listening.listen(self._host, self._port, asks=asks)
        except listening.HeldByOther as error:
            raise AddressTaken(f"{self._host}:{self._port}: {error}") from None
        except OSError as error:
            raise CannotListen(f"{self._host}:{self._port}: {error}") from None
        self.port = self._sockets[0].getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="http", daemon=True)
        self._thread.start()
        self._up.wait(START_S)
        if self._error is not None or not self._up.is_set():
            raise CannotListen(f"{self._host}:{self._port}: {self._error or 'no answer'}")

    @property
    def address(self) -> str:
        """Return the host as given and the actual port."""
        return f"{self._host}:{self.port}"

    def stop(self) -> None:
        """Stop listening, if the server was started; requests in progress are cut off."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        runner = web.AppRunner(self._app, access_log=None, keepalive_timeout=MAX_IDLE_S, shutdown_timeout=0)
        try:
            with ExitStack() as servers:
                for each in loop.run_until_complete(self._serve(runner, loop)):
                    servers.enter_context(closing(each))
                self._up.set()
                watching = loop.create_task(self._door.watch())
                loop.run_forever()
                watching.cancel()
        except OSError as error:
            self._error = error
        finally:
            loop.run_until_complete(runner.cleanup())
            loop.close()
            self._up.set()

    @web.middleware
    async def _at_the_door(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        with self._door.answering(request.protocol):
            return await handler(request)

    async def _serve(self, runner: web.AppRunner, loop: asyncio.AbstractEventLoop) -> list[asyncio.Server]:
        await runner.setup()
        server = runner.server
        assert server is not None  # since `setup`
        made = self._door.guarded(server)
        return [await loop.create_server(made, sock=each, backlog=SERVER_BACKLOG) for each in self._sockets]


def probes(published: Callable[[], Published], now_s: Callable[[], float]) -> web.Application:
    """Return the application for the probe listener, which serves nothing but the probes."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    _add_probes(app, published, now_s)
    return app


def _add_probes(app: web.Application, published: Callable[[], Published], now_s: Callable[[], float]) -> None:
    async def healthz(_: web.Request) -> web.Response:
        silent_s = now_s() - published().at_s
        if silent_s > SILENT_S:
            raise web.HTTPServiceUnavailable(text=f"no cycle for {silent_s:.0f} s\n")
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if not published().ready:
            raise web.HTTPServiceUnavailable(text="not all sensors have been tried yet\n")
        return web.Response(text="ok\n")

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)


def application(
    published: Callable[[], Published],
    about: Callable[[], Mapping[str, Any]],
    now_s: Callable[[], float],
    inject: Injector | None = None,
    collectors: Iterable[Collector] = (),
) -> web.Application:
    """Return the application. With `inject` it also serves `POST /v1/inject`, which is for tests only.

    `collectors` provide metrics in addition to those of the published state.
    """
    registry = metrics.registry(published)
    for each in collectors:
        registry.register(each)
    waiting = 0

    async def health(_: web.Request) -> web.Response:
        return web.json_response(report.health_report(published(), about()))

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def events(request: web.Request) -> web.Response:
        after = int(_number(request, "after", 0, 1 << 53))
        followed = request.query.get("state_id", "")
        limit = _number(request, "limit", 100, MAX_EVENTS)
        until = time.monotonic() + _number(request, "wait_s", 0, MAX_WAIT_S)
        nonlocal waiting
        waiting += 1
        try:
            while True:
                now = published()
                restarted = _is_of_another_state(now, after, followed)
                cursor = 0 if restarted else after
                found = _events_after(now.events, cursor, int(limit))
                if found or restarted or time.monotonic() >= until or waiting > MAX_WAITING:
                    return web.json_response(
                        {
                            "events": found,
                            "after": found[-1]["seq"] if found else cursor,
                            "state_id": now.state_id,
                            "restarted": restarted,
                        }
                    )
                await asyncio.sleep(_POLL_S)
        finally:
            waiting -= 1

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    _add_probes(app, published, now_s)
    app.router.add_get("/metrics", exposition)
    app.router.add_get("/v1/health", health)
    app.router.add_get("/v1/events", events)
    if inject is not None:
        app.router.add_post("/v1/inject", _injected(inject))
    return app


def _is_of_another_state(now: Published, after: int, followed: str) -> bool:
    """Return True if a client's cursor belongs to a lost state, after which the numbers start again.

    A client that does not name the state that it follows (`followed` is "") is recognised only while its
    cursor is beyond the newest change.
    """
    return after > (now.events[-1]["seq"] if now.events else 0) or followed not in ("", now.state_id)


def _events_after(events: Sequence[dict[str, Any]], after: int, limit: int) -> list[dict[str, Any]]:
    if not events or events[-1]["seq"] <= after:
        return []  # the usual case while a request waits, because it polls often
    return [each for each in events if each["seq"] > after][:limit]


def _injected(inject: Injector) -> _Handler:
    async def injected(request: web.Request) -> web.Response:
        try:
            asked = json.loads(await request.text() or "{}")
            if not isinstance(asked, dict):
                raise ValueError("the body is not a JSON object")
            return web.json_response({"injected": inject(asked)}, status=202)
        except (ValueError, RecursionError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from None

    return injected


def _number(request: web.Request, name: str, otherwise: float, most: float) -> float:
    text = request.query.get(name)
    if text is None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise web.HTTPBadRequest(text=f"{name}: {text[:40]!r}, expected 0 to {most:g}\n")
    return value
