"""Run the webhook, `holdfast cluster webhook`, to which the API server sends each pod that requests Holdfast.

The webhook does not read from the cluster in order to respond, so a response takes milliseconds. It never
rejects a pod. If a pod cannot be injected, the webhook admits it with an annotation and an event that say
why. If the webhook is unavailable, the API server admits pods unchanged, and the supervisor reports this in
an event.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import signal
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from holdfast.fileio import strict_json
from holdfast.process import event_loop, logs
from holdfast.version import __version__
from supervisor.admission import injection
from supervisor.admission.injection import InjectionContext, NotAsked, Refused
from supervisor.kubernetes.certificates import ServerCertificate
from supervisor.kubernetes.client import PODS, ApiServer, PatchType, ResourceKind, connect
from supervisor.kubernetes.errors import ApiError
from supervisor.kubernetes.events import EventRecorder, ObjectReference
from supervisor.kubernetes.own_pod import START_TRIES, WAIT_S, OwnPod, certificate_for, service_names

log = logging.getLogger("webhook")

SERVICE = CONFIGURATION = "holdfast-webhook"
PORT = 8443
MAX_REVIEW_BYTES = 8 << 20  # an object in etcd has at most about 3 MiB, and an update carries two
MAX_WARNINGS, WARNING_CHARS = 3, 250  # the API server truncates more
RETRY_S, CHECK_S = 5.0, 60.0  # until the next check of the configuration: after a failure, and otherwise
SHUTDOWN_S = 2.0
CONFIGURATIONS = ResourceKind(
    "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", namespaced=False
)


class Admission:
    """Answers the API server's requests."""

    def __init__(self, events: EventRecorder, image: str) -> None:
        self.ca = ""  # the CA for the sidecars, as PEM text
        self.is_entered = False  # True once the API server has the CA, which it needs to call the webhook
        self._events, self._image = events, image

    async def review(self, request: web.Request) -> web.Response:
        """Respond to an AdmissionReview. The response always admits the pod."""
        try:
            review = strict_json.loads(await request.read(), max_values=200_000)
        except strict_json.RejectedJson as error:
            raise web.HTTPBadRequest(text=f"not an AdmissionReview: {error}\n") from None
        asked = review.get("request") if isinstance(review, dict) else None
        uid = asked.get("uid") if isinstance(asked, dict) else None
        if not isinstance(asked, dict) or not isinstance(uid, str):
            raise web.HTTPBadRequest(text="not an AdmissionReview with a request and its uid\n")
        return web.json_response(
            {
                "apiVersion": "admission.k8s.io/v1",
                "kind": "AdmissionReview",
                "response": {"uid": uid, "allowed": True, **self._answer(asked)},
            }
        )

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
            if asked.get("dryRun") is not True:
                self._report(pod, where, found.why)
            return {**_patch(found.patch), "warnings": _warnings((f"Holdfast: not injected: {found.why}",))}
        notes = tuple(f"Holdfast: {each}" for each in found.notes)
        return {**_patch(found.patch), **({"warnings": _warnings(notes)} if notes else {})}

    def _report(self, pod: Mapping[str, Any], namespace: str, why: str) -> None:
        """Record an event, about the pod's owner if possible, because the pod has no uid yet."""
        metadata = pod.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        owners = metadata.get("ownerReferences")
        owner = owners[0] if isinstance(owners, list) and owners and isinstance(owners[0], dict) else {}
        if owner:
            reference = ObjectReference(
                str(owner.get("apiVersion")),
                str(owner.get("kind")),
                namespace,
                str(owner.get("name")),
                str(owner.get("uid", "")),
            )
        else:
            name = metadata.get("name") or metadata.get("generateName") or "unnamed"
            reference = ObjectReference("v1", "Pod", namespace, str(name), "")
        self._events.record(reference, "NotInjected", why, "Warning")


def _patch(patch: list[dict[str, Any]]) -> dict[str, Any]:
    text = json.dumps(patch, separators=(",", ":")).encode()
    return {"patchType": "JSONPatch", "patch": base64.b64encode(text).decode()}


def _warnings(texts: tuple[str, ...]) -> list[str]:
    return [each[:WARNING_CHARS] for each in texts[:MAX_WARNINGS]]


async def keep_configuration(server: ApiServer, certificate: ServerCertificate, admission: Admission) -> None:
    """Keep the CA in the webhook's configuration, from which the API server reads it. Never returns.

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
        events = EventRecorder(server, SERVICE, me.name)
        admission = Admission(events, image)
        admission.ca = certificate.bundle
        runner = await _listen(admission, certificate)
        try:
            await event_loop.until_one_ends(
                events.run(),
                _renew(certificate, admission),
                certificate.run(),
                keep_configuration(server, certificate, admission),
                stop.wait(),
            )
        finally:
            await events.flush(1.0)
            await runner.cleanup()


async def _own_image(server: ApiServer, me: OwnPod) -> str:
    """Return the image of this process. Injected pods use the same image, and so have the same version."""
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


async def _listen(admission: Admission, certificate: ServerCertificate) -> web.AppRunner:
    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        if not admission.is_entered:
            raise web.HTTPServiceUnavailable(text="the authorities are not in the configuration yet\n")
        return web.Response(text="ok\n")

    app = web.Application(client_max_size=MAX_REVIEW_BYTES)
    app.router.add_post("/mutate", admission.review)
    app.router.add_get("/healthz", healthy)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, port=PORT, ssl_context=certificate.context).start()
    return runner


def main() -> int:
    logs.setup()
    event_loop.run(serve)
    return 0
