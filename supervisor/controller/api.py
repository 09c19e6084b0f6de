"""Serve the supervisor's HTTP API. Health and metrics are open; all other paths require the run's token."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from holdfast.process import event_loop
from holdfast.process.network import Door, has_token
from holdfast.protocol.drills import DRILLS
from holdfast.protocol.member_messages import MEMBER_PATH
from supervisor.controller.member_server import MemberServer
from supervisor.controller.supervised_run import SupervisedRun

MAX_BODY_BYTES = 4096
READ_S = 5.0  # the time limit for reading the incidents from the run directory
_OPEN = frozenset({"/healthz", "/readyz", "/metrics"})  # probes and scrapers have no token

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(
    run: SupervisedRun, connections: MemberServer, token: str, door: Door, *, drills: bool = True
) -> web.Application:
    """Return the application. No request blocks its event loop. Drills are refused unless `drills` is set."""
    api = _Api(run, drills)
    app = web.Application(middlewares=[_guard(token, door)], client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/v1/status", api.status)
    app.router.add_get("/v1/incidents", api.incidents)
    app.router.add_post("/v1/stop", api.stop)
    app.router.add_post("/v1/inject", api.cause_fault)
    app.router.add_get(MEMBER_PATH, connections.serve)
    app.router.add_get("/healthz", api.healthz)
    app.router.add_get("/readyz", api.healthz)
    app.router.add_get("/metrics", api.metrics)
    return app


def _guard(token: str, door: Door) -> Any:
    """Return the middleware that refuses requests without `token`, except on the open paths."""

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        known = has_token(request.headers.get("Authorization", ""), token)
        with door.answering(request.protocol, trusted=known):
            if not known and request.path not in _OPEN:
                raise web.HTTPUnauthorized(text="this request requires the run's token")
            return await handler(request)

    return guard


class _Api:
    """Handles the requests about one run."""

    def __init__(self, run: SupervisedRun, drills: bool) -> None:
        self._run = run
        self._drills = drills

    async def status(self, _: web.Request) -> web.Response:
        return web.json_response(self._run.publisher.published)

    async def incidents(self, _: web.Request) -> web.Response:
        publisher = self._run.publisher
        try:
            found = await event_loop.result_of(publisher.files.submit(publisher.run.incidents), READ_S)
        except OSError as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from None
        return web.json_response(found)

    async def stop(self, request: web.Request) -> web.Response:
        self._run.stop(bool((await _body(request)).get("now")))
        return web.json_response({"asked": True}, status=202)

    async def cause_fault(self, request: web.Request) -> web.Response:
        wanted = await _body(request)
        if not self._drills:
            raise web.HTTPForbidden(text="drills are disabled: the run was started with --no-drills")
        what, rank = wanted.get("what"), wanted.get("rank", 0)
        if what not in DRILLS or type(rank) is not int:
            known = ", ".join(DRILLS)
            raise web.HTTPBadRequest(text=f"`what` must be one of {known}; `rank` must be an integer")
        try:
            requested = self._run.cause_fault(str(what), rank)
        except ValueError as error:
            raise web.HTTPConflict(text=str(error)) from None
        note = self._run.drill_note(str(what), rank)
        refusal = "" if requested is None else await self._run.drills.await_outcome(requested)
        if refusal:
            raise web.HTTPConflict(text=f"{refusal}: the drill is withdrawn")
        noted = {"note": note} if note else {}
        return web.json_response({"injected": what, "rank": rank, **noted}, status=202)

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def metrics(self, _: web.Request) -> web.Response:
        content = generate_latest(self._run.publisher.measured().registry)
        return web.Response(body=content, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in the body, or an empty one if there is no body. Raises `HTTPBadRequest`."""
    try:
        found = json.loads(await request.text() or "{}")
    except ValueError:
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    if not isinstance(found, dict):
        raise web.HTTPBadRequest(text="the body is not a JSON object")
    return found
