"""Run the webhook, `holdfast cluster webhook`: the API server sends it each pod that requests Holdfast.

The webhook responds without reading from the cluster, within milliseconds. It never rejects a pod. If it
cannot inject a pod, it admits the pod with an annotation that says why. If the webhook is unavailable, the
API server admits pods unchanged. In both cases, the supervisor finds the pods that were not injected, and
records events about them.

The API server does not identify itself, so any pod of the cluster can send requests. `AdmissionExchanges`
limits the memory of all requests together, and the server closes idle connections when there are too many. A
request changes nothing in the cluster. The webhook records no events, because the pod in a request may not
exist, and a client could forge events in any namespace.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from holdfast.fileio import strict_json
from holdfast.process import event_loop, logs
from holdfast.process.network import Door, listen_everywhere
from holdfast.version import __version__
from supervisor.admission import injection, pod_layout
from supervisor.admission.injection import InjectionContext, NotAsked, Refused
from supervisor.kubernetes.certificates import ServerCertificate
from supervisor.kubernetes.client import PODS, ApiServer, PatchType, ResourceKind, connect
from supervisor.kubernetes.errors import ApiError
from supervisor.kubernetes.own_pod import START_TRIES, WAIT_S, OwnPod, certificate_for, service_names

log = logging.getLogger("webhook")

SERVICE = CONFIGURATION = "holdfast-webhook"
PORT = 8443
MAX_REVIEW_BYTES = 4 << 20  # the API server accepts objects of at most 3 MiB, and a review contains one
# The maximum size of the requests and responses of all connections together. Parsing a review and making its
# response take up to 60 MiB more, but this happens for one review at a time. The manifest allows 256 MiB.
MAX_HELD_BYTES = 16 << 20
MAX_EXCHANGES = 64  # requests that arrive or are answered at the same time
EXCHANGE_S = 3.0  # how long the API server waits for the response: timeoutSeconds in the manifest
# Connections without a request. Each API server keeps up to 25 connections to the webhook.
MAX_IDLE, IDLE_S = 128, 90.0
COLLECT_S = 1.0  # the interval between passes of the garbage collector
PIECE_BYTES = 64 << 10  # a piece of a response; an idle connection may still hold about two pieces
MAX_WARNINGS, WARNING_CHARS = 3, 250  # the API server truncates longer warnings
RETRY_S, CHECK_S = 5.0, 60.0  # the wait after a failed check of the configuration, and after a successful one
SHUTDOWN_S = 2.0
BACKLOG = 128  # a controller may create the pods of a large job at the same time
CONFIGURATIONS = ResourceKind(
    "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", namespaced=False
)


class AdmissionExchange:
    """One request and its response, which hold `held_bytes` of memory."""

    def __init__(self, request: web.Request, exchanges: AdmissionExchanges) -> None:
        self.held_bytes = 0
        self._request, self._exchanges = request, exchanges
        self._body = bytearray()
        self._unsent = memoryview(b"")

    async def receive(self) -> bytes:
        """Return the body of the request.

        Raises `HTTPRequestEntityTooLarge`, or `ConnectionError` if the exchange was aborted.
        """
        while chunk := await self._request.content.readany():
            if len(self._body) + len(chunk) > MAX_REVIEW_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_REVIEW_BYTES, len(self._body) + len(chunk))
            self._exchanges.hold(self, len(chunk))
            self._body += chunk
        return bytes(self._body)

    async def send(self, body: bytes) -> web.StreamResponse:
        """Send a response, and return it when at most about 2 x `PIECE_BYTES` are left to send.

        Raises `ConnectionError` if the exchange was aborted, or the client is gone.
        """
        self._exchanges.hold(self, len(body))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(body)
        await response.prepare(self._request)
        if self._request.transport is not None:
            self._request.transport.set_write_buffer_limits(PIECE_BYTES)
        self._unsent, body = memoryview(body), b""
        while self._unsent:  # in pieces, because a TLS transport accepts a single piece of any size
            piece, self._unsent = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            await response.write(bytes(piece))
        await response.write_eof()
        return response

    def release(self) -> None:
        """Free the memory now, because reference cycles may keep this object alive until much later."""
        self._body.clear()
        self._unsent = memoryview(b"")

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


class AdmissionExchanges:
    """All exchanges in progress, oldest first.

    If there are too many, or they hold too much, the oldest are dropped. The API server sends and receives
    within milliseconds, so the oldest exchanges belong to slow or hostile clients.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._open: dict[AdmissionExchange, None] = {}

    @contextmanager
    def begin(self, request: web.Request) -> Iterator[AdmissionExchange]:
        """Yield the exchange of `request`, which is aborted if the block takes longer than `EXCHANGE_S`."""
        while len(self._open) >= MAX_EXCHANGES:
            self._abort(next(iter(self._open)))
        exchange = AdmissionExchange(request, self)
        self._open[exchange] = None
        timer = asyncio.get_running_loop().call_later(EXCHANGE_S, self._abort, exchange)
        try:
            yield exchange
        finally:
            timer.cancel()
            self._end(exchange)

    def hold(self, exchange: AdmissionExchange, more_bytes: int) -> None:
        """Count memory that an exchange takes. Raises `ConnectionError` if the exchange was aborted."""
        if exchange in self._open:
            exchange.held_bytes += more_bytes
            self.held_bytes += more_bytes
            while self.held_bytes > MAX_HELD_BYTES:
                self._abort(next(iter(self._open)))
        if exchange not in self._open:
            raise ConnectionResetError("the exchange was aborted")

    def _abort(self, exchange: AdmissionExchange) -> None:
        self._end(exchange)
        exchange.abort()

    def _end(self, exchange: AdmissionExchange) -> None:
        if exchange in self._open:
            del self._open[exchange]
            self.held_bytes -= exchange.held_bytes
            exchange.release()


class Admission:
    """Answers the API server's requests."""

    def __init__(self, image: str) -> None:
        self.ca = ""  # the CA for the sidecars, as PEM text
        self.is_entered = False  # True after the API server has the CA, which it needs to call the webhook
        self._image = image
        self._exchanges = AdmissionExchanges()

    async def review(self, request: web.Request) -> web.StreamResponse:
        """Respond to an AdmissionReview. The response always admits the pod."""
        with self._exchanges.begin(request) as exchange:
            try:
                return await exchange.send(self._response(await exchange.receive()))
            except ConnectionError:  # the client is gone; aiohttp would log a traceback
                raise web.HTTPServiceUnavailable from None

    def _response(self, text: bytes) -> bytes:
        try:
            review = strict_json.loads(text, max_values=200_000)
        except strict_json.RejectedJson as error:
            raise web.HTTPBadRequest(text=f"not an AdmissionReview: {error}\n") from None
        asked = review.get("request") if isinstance(review, dict) else None
        uid = asked.get("uid") if isinstance(asked, dict) else None
        if not isinstance(asked, dict) or not isinstance(uid, str):
            raise web.HTTPBadRequest(text="not an AdmissionReview with a request and its uid\n")
        response = {"uid": uid, "allowed": True, **self._answer(asked)}
        made = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        return json.dumps(made).encode()

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        pod, namespace = asked.get("object"), asked.get("namespace")
        if not isinstance(pod, dict) or asked.get("operation") != "CREATE":
            return {}
        where = namespace if isinstance(namespace, str) else ""
        context = InjectionContext(self._image, __version__, ca=self.ca, namespace=where)
        found = injection.inject(pod, context)
        if isinstance(found, NotAsked):
            return {}
        if isinstance(found, Refused):
            return {**_patch(found.patch), "warnings": _warnings((f"Holdfast: not injected: {found.why}",))}
        tried = (pod_layout.WOULD_INJECT,) if asked.get("dryRun") is True else ()
        notes = tuple(f"Holdfast: {each}" for each in (*tried, *found.notes))
        return {**_patch(found.patch), **({"warnings": _warnings(notes)} if notes else {})}


def _patch(patch: list[dict[str, Any]]) -> dict[str, Any]:
    text = json.dumps(patch, separators=(",", ":")).encode()
    return {"patchType": "JSONPatch", "patch": base64.b64encode(text).decode()}


def _warnings(texts: tuple[str, ...]) -> list[str]:
    return [each[:WARNING_CHARS] for each in texts[:MAX_WARNINGS]]


async def keep_configuration(server: ApiServer, certificate: ServerCertificate, admission: Admission) -> None:
    """Keep the CA in the webhook's configuration, where the API server reads it. Never returns.

    The manifests contain the configuration without the CA, and users apply them again with every upgrade.
    """
    while True:
        delay_s = CHECK_S
        try:
            await _enter_authorities(server, base64.b64encode(certificate.bundle.encode()).decode())
            admission.is_entered = True
        except (ApiError, OSError) as error:
            log.warning("configuration not updated", extra={"error": str(error)})
            delay_s = RETRY_S
        await asyncio.sleep(delay_s)


async def _enter_authorities(server: ApiServer, bundle: str) -> None:
    found = await server.get(CONFIGURATIONS, CONFIGURATION)
    version = found["metadata"]["resourceVersion"]
    wrong = [
        number
        for number, each in enumerate(found.get("webhooks") or ())
        if each["clientConfig"].get("caBundle") != bundle
    ]
    if not wrong:
        return
    changes = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        *(
            {"op": "add", "path": f"/webhooks/{number}/clientConfig/caBundle", "value": bundle}
            for number in wrong
        ),
    ]
    await server.patch(CONFIGURATIONS, CONFIGURATION, changes, how=PatchType.JSON)
    log.info("authorities written to the configuration")


async def serve(_: event_loop.Lag) -> None:
    """Run the process until SIGTERM or SIGINT, or until one of its services fails."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    me = OwnPod.read()
    async with await connect() as server:
        image = await _own_image(server, me)
        certificate = await certificate_for(server, me, service_names(SERVICE, me.namespace))
        admission = Admission(image)
        admission.ca = certificate.bundle
        door = Door(MAX_IDLE, IDLE_S)
        runner = await _app(admission, door)
        listener = listen_everywhere(PORT, BACKLOG)
        make = runner.server
        assert make is not None  # set by `setup`
        try:
            await event_loop.until_one_ends(
                door.accept(listener, make, certificate.context),
                door.watch(),
                collect_garbage(),
                _renew(certificate, admission),
                certificate.run(),
                keep_configuration(server, certificate, admission),
                stop.wait(),
            )
        finally:
            listener.close()
            await runner.cleanup()


async def _own_image(server: ApiServer, me: OwnPod) -> str:
    """Return the image of this process. Injected pods use the same image, and thus the same version."""
    for tries_left in reversed(range(START_TRIES)):
        try:
            pod = await server.get(PODS, me.name, me.namespace)
        except (ApiError, OSError) as error:
            if not tries_left:
                raise
            log.warning("own pod not read yet", extra={"error": str(error)})
            await asyncio.sleep(WAIT_S)
        else:
            return str(pod["spec"]["containers"][0]["image"])
    raise AssertionError("unreachable")


async def _renew(certificate: ServerCertificate, admission: Admission) -> None:
    """Keep `admission.ca` equal to the current bundle of authorities. Never returns."""
    while True:
        admission.ca = certificate.bundle
        await asyncio.sleep(CHECK_S)


async def collect_garbage() -> None:
    """Collect garbage every `COLLECT_S`. Never returns.

    A closed connection leaves reference cycles that hold up to a megabyte of buffers. Python's automatic
    passes depend on the number of objects, not on their size, and would run too late. The objects that exist
    when this function starts are excluded from all passes, which then take about a millisecond.
    """
    gc.freeze()
    while True:
        await asyncio.sleep(COLLECT_S)
        gc.collect()


async def _app(admission: Admission, door: Door) -> web.AppRunner:
    """Return the application; `door` accepts the connections."""

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        if not admission.is_entered:
            raise web.HTTPServiceUnavailable(text="the authorities are not in the configuration yet\n")
        return web.Response(text="ok\n")

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        with door.answering(request.protocol):
            answer: web.StreamResponse = await handler(request)
            return answer

    app = web.Application(middlewares=[guard])
    app.router.add_post("/mutate", admission.review)
    app.router.add_get("/healthz", healthy)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=SHUTDOWN_S,
        auto_decompress=False,  # a few compressed bytes can expand to any size; the API server sends none
        lingering_time=0.0,  # do not read the rest of a body that is refused
    )
    await runner.setup()
    return runner


def main() -> int:
    logs.setup()
    event_loop.limit_tls_buffers()
    event_loop.run(serve)
    return 0
