"""The agent over HTTP: read by anybody who reaches the address it listens on, changed by nobody.

It shows what the agent has published and never asks it for anything, so it answers while all sensors hang.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from nodeagent import metrics, report
from nodeagent.agent import Published

MAX_BODY_BYTES = 16 << 10
MAX_EVENTS = 1000  # in one answer
MAX_WAIT_S = 30.0
SILENT_S = 10.0  # the agent looks every 2.5 s: so long without a look and it is not alive
MAX_WAITING = 32  # for events at a time: others are answered at once, with none
_POLL_S = 0.05

Injector = Callable[[Mapping[str, Any]], str]  # returns what was done; raises ValueError with what is wrong
Handler = Callable[[web.Request], Any]


def application(
    published: Callable[[], Published],
    about: Callable[[], Mapping[str, Any]],
    now_s: Callable[[], float],
    inject: Injector | None = None,
) -> web.Application:
    """Return the application. With `inject` there is `POST /v1/inject`: only for tests."""
    registry = metrics.registry(published)
    waiting = 0

    async def healthz(_: web.Request) -> web.Response:
        silent_s = now_s() - published().at_s
        if silent_s > SILENT_S:
            raise web.HTTPServiceUnavailable(text=f"no look for {silent_s:.0f} s\n")
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if not published().ready:
            raise web.HTTPServiceUnavailable(text="not all sensors have been tried yet\n")
        return web.Response(text="ok\n")

    async def health(_: web.Request) -> web.Response:
        return web.json_response(report.health(published(), about()))

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def events(request: web.Request) -> web.Response:
        after = _number(request, "after", 0, 1 << 53)
        limit = _number(request, "limit", 100, MAX_EVENTS)
        until = time.monotonic() + _number(request, "wait_s", 0, MAX_WAIT_S)
        nonlocal waiting
        waiting += 1
        try:
            while True:
                found = [each for each in published().events if each["seq"] > after][: int(limit)]
                if found or time.monotonic() >= until or waiting > MAX_WAITING:
                    return web.json_response(
                        {"events": found, "after": found[-1]["seq"] if found else int(after)}
                    )
                await asyncio.sleep(_POLL_S)
        finally:
            waiting -= 1

    async def injected(request: web.Request) -> web.Response:
        assert inject is not None
        try:
            asked = json.loads(await request.text() or "{}")
            if not isinstance(asked, dict):
                raise ValueError("the body is not a JSON object")
            return web.json_response({"injected": inject(asked)}, status=202)
        except (ValueError, RecursionError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from None

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", exposition)
    app.router.add_get("/v1/health", health)
    app.router.add_get("/v1/events", events)
    if inject is not None:
        app.router.add_post("/v1/inject", injected)
    return app


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
