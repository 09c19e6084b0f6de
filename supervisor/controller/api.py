"""The supervisor's HTTP side: status and metrics for everybody on this host, orders for who has the token."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from holdfast.process import event_loop
from holdfast.process.network import Door
from supervisor.controller.job import Job
from supervisor.controller.member_server import MemberServer
from supervisor.fault_kinds import DRILLS

MAX_BODY_BYTES = 4096
READ_S = 5.0  # for the run directory to answer
_OPEN = frozenset({"/healthz", "/readyz", "/metrics"})  # what a probe and a scraper need

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(
    job: Job, connections: MemberServer, token: str, door: Door, *, drills: bool = True
) -> web.Application:
    """Return the application; nothing it does blocks. Without `drills` it makes no faults."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        known = hmac.compare_digest(given, f"Bearer {token}".encode())
        with door.answering(request.protocol, trusted=known):
            if not known and request.path not in _OPEN:
                raise web.HTTPUnauthorized(text="the run's token is needed")
            return await handler(request)

    async def status(_: web.Request) -> web.Response:
        return web.json_response(job.publisher.published)

    async def incidents(_: web.Request) -> web.Response:
        files = job.publisher.files
        try:
            found = await event_loop.result_of(files.submit(job.publisher.run.incidents), READ_S)
        except OSError as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from None
        return web.json_response(found)

    async def stop(request: web.Request) -> web.Response:
        job.stop(bool((await _body(request)).get("now")))
        return web.json_response({"asked": True}, status=202)

    async def inject(request: web.Request) -> web.Response:
        asked = await _body(request)
        if not drills:
            raise web.HTTPForbidden(text="drills are switched off: the run was started with --no-drills")
        what, rank = asked.get("what"), asked.get("rank", 0)
        if what not in DRILLS or type(rank) is not int:
            raise web.HTTPBadRequest(text=f"what: one of {', '.join(DRILLS)}; rank: a whole number")
        try:
            sent = job.inject(str(what), rank)
        except ValueError as error:
            raise web.HTTPConflict(text=str(error)) from None
        refusal = "" if sent is None else await job.drills.refusal(sent)
        if refusal:
            raise web.HTTPConflict(text=f"{refusal}: the drill is withdrawn")
        return web.json_response({"injected": what, "rank": rank}, status=202)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def exposition(_: web.Request) -> web.Response:
        content = generate_latest(job.publisher.metrics.registry)
        return web.Response(body=content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/v1/status", status)
    app.router.add_get("/v1/incidents", incidents)
    app.router.add_post("/v1/stop", stop)
    app.router.add_post("/v1/inject", inject)
    app.router.add_get("/v1/member", connections.serve)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", healthz)
    app.router.add_get("/metrics", exposition)
    return app


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        found = json.loads(await request.text() or "{}")
    except ValueError:
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    if not isinstance(found, dict):
        raise web.HTTPBadRequest(text="the body is not a JSON object")
    return found
