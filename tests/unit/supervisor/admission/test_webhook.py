"""The webhook on a real socket admits every pod, injected or unchanged, whatever it receives."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import io
import json
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.process import event_loop
from holdfast.process.network import Door, listen_everywhere
from supervisor.admission import pod_layout, training_command, webhook
from supervisor.admission.webhook import CONFIGURATION, MAX_REVIEW_BYTES, Admission
from supervisor.kubernetes import certificates
from supervisor.kubernetes.certificates import AuthoritySecret, ServerCertificate
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import NotFound
from supervisor.kubernetes.own_pod import OwnPod, service_names
from tests.unit.supervisor.admission.pods import Pod, container, named, patched, pod, variables
from tests.unit.supervisor.cluster.api_server import ServedObjects

ROOT = Path(__file__).parents[4]
ME = OwnPod("webhook-1", "holdfast-system", "10.0.0.9")
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "uid-9", "controller": True}


@dataclass
class Place:
    served: ServedObjects
    server: ApiServer
    admission: Admission
    client: TestClient[web.Request, web.Application]

    async def send(self, review: object) -> tuple[int, Any]:
        data = review if isinstance(review, bytes) else json.dumps(review).encode()
        async with self.client.post("/mutate", data=io.BytesIO(data)) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if answer.status == 200 else text

    async def response(self, found: object, **given: Any) -> dict[str, Any]:
        """Return the response when a pod is created. The API server always gets one."""
        code, answer = await self.send(review(found, **given))
        assert (code, answer["kind"], answer["apiVersion"]) == (200, "AdmissionReview", "admission.k8s.io/v1")
        response: dict[str, Any] = answer["response"]
        assert response["allowed"] is True
        assert response["uid"] == given.get("uid", "asked-1")
        return response


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    served = ServedObjects()
    async with served.serving() as server:
        admission = Admission("holdfast:dev")
        admission.ca = "PEM\n"
        app = web.Application()
        app.router.add_post("/mutate", admission.review)
        async with TestClient(TestServer(app)) as client:
            yield Place(served, server, admission, client)


def review(found: object, **given: Any) -> dict[str, Any]:
    asked = {"uid": "asked-1", "operation": "CREATE", "namespace": "team", "object": found, **given}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}


def after(found: Pod, response: dict[str, Any]) -> Pod:
    assert response["patchType"] == "JSONPatch"
    made: Pod = patched(found, json.loads(base64.b64decode(response["patch"])))
    return made


async def test_an_opted_in_pod_is_injected_with_the_webhooks_image_and_authorities() -> None:
    async with place() as there:
        made = after(pod(), await there.response(pod()))
        sidecar = named(made["spec"]["initContainers"], pod_layout.SIDECAR)
        assert sidecar["image"] == "holdfast:dev"
        assert variables(sidecar)["HOLDFAST_CA"] == "PEM\n"
        assert made["metadata"]["labels"][pod_layout.MEMBER_LABEL] == pod_layout.IS_MEMBER


async def test_a_pod_that_does_not_opt_in_is_not_changed() -> None:
    plain = pod()
    plain["metadata"].pop("annotations")
    async with place() as there:
        assert await there.response(plain) == {"uid": "asked-1", "allowed": True}


@pytest.mark.parametrize(
    "given", [{"operation": "UPDATE"}, {"operation": None}, {"object": None}, {"object": [1]}]
)
async def test_a_request_that_is_not_a_pod_creation_is_admitted_unchanged(given: dict[str, Any]) -> None:
    async with place() as there:
        assert await there.response(pod(), **given) == {"uid": "asked-1", "allowed": True}


async def test_a_pod_that_cannot_be_injected_is_admitted_with_the_reason() -> None:
    refused = pod(container(("sleep", "9")), annotations={"grace": "soon"})
    async with place() as there:
        response = await there.response(refused)
        made = after(refused, response)
        assert "grace" in made["metadata"]["annotations"][pod_layout.NOT_INJECTED]
        assert made["spec"] == refused["spec"]
        assert response["warnings"][0].startswith("Holdfast: not injected: ")


async def test_a_dry_run_warns_that_the_pod_would_be_injected() -> None:
    """The API server shows warnings even if a quota refuses the pod afterwards."""
    async with place() as there:
        response = await there.response(pod(), dryRun=True)
        assert response["warnings"][0] == f"Holdfast: {pod_layout.WOULD_INJECT}"
        assert pod_layout.MEMBER_LABEL in after(pod(), response)["metadata"]["labels"]
        assert pod_layout.WOULD_INJECT not in str(await there.response(pod()))
        refused = await there.response(pod(annotations={"grace": "soon"}), dryRun=True)
        assert pod_layout.WOULD_INJECT not in str(refused)


async def test_warnings_are_few_and_short_enough_for_the_api_server() -> None:
    async with place() as there:
        response = await there.response(pod(annotations={f"nonsense-{'x' * 400}-{n}": "y" for n in range(9)}))
        assert 0 < len(response["warnings"]) <= 3
        assert all(len(each) <= 256 for each in response["warnings"])


async def test_an_oversized_review_is_refused_and_the_server_continues() -> None:
    """The API server then admits the pod unchanged, because the webhook's failure policy is Ignore."""
    async with place() as there:
        code, _ = await there.send(b'"' + b"x" * (MAX_REVIEW_BYTES + 1) + b'"')
        assert code == 413
        await there.response(pod())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b'{"request": 3}',
        b'{"request": {}}',
        b'{"request": {"uid": 3}}',
        b"[" * 100_000,
        b'{"request": {"uid": "a", "uid": "b"}}',
        b'{"request": {"uid": "a", "object": NaN}}',
        b"[" + b"0," * 300_000 + b"0]",
    ],
)
async def test_a_malformed_review_is_refused(data: bytes) -> None:
    async with place() as there:
        code, why = await there.send(data)
        assert code == 400
        assert why.startswith(b"not an AdmissionReview")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_PLACES = (
    *("metadata", "metadata.annotations", "metadata.labels", "metadata.ownerReferences", "metadata.name"),
    *("spec", "spec.containers", "spec.initContainers", "spec.volumes", "spec.securityContext"),
    *("spec.containers.0", "spec.containers.0.name", "spec.containers.0.command", "spec.containers.0.args"),
    *("spec.containers.0.env", "spec.containers.0.resources", "spec.containers.0.volumeMounts"),
    *("spec.containers.0.securityContext", "spec.containers.0.resources.limits", "spec.restartPolicy"),
)


def put(found: Pod, path: str, value: object) -> None:
    *way, last = path.split(".")
    holder: Any = found
    for word in way:
        holder = holder[int(word)] if isinstance(holder, list) else holder.setdefault(word, {})
    if isinstance(holder, list):
        holder[int(last)] = value
    else:
        holder[last] = value


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(_PLACES), _JSON), min_size=1, max_size=1), st.binary(max_size=40))
def test_every_pod_is_admitted(changes: list[tuple[str, object]], junk: bytes) -> None:
    """If the webhook failed, the pod would be created without Holdfast and nobody would know why."""

    async def send() -> None:
        found = pod()
        for path, value in changes:
            put(found, path, value)
        async with place() as there:
            response = await there.response(found)
            if "patch" in response:
                made = after(found, response)
                assert made["metadata"]["annotations"]
            code, _ = await there.send(junk)
            assert code in (200, 400)
            await there.response(found, dryRun=changes[0][1], namespace=changes[0][1])

    asyncio.run(send())


@settings(max_examples=25)
@given(_JSON, _JSON)
def test_any_json_gets_an_answer_that_admits(found: object, rest: object) -> None:
    async def send() -> None:
        async with place() as there:
            await there.response(found, extra=rest)
            for each in (
                found,
                {"request": found},
                {"request": {"uid": "a", "object": rest, "operation": found}},
            ):
                code, answer = await there.send(each)
                assert code in (200, 400)
                assert code == 400 or answer["response"]["allowed"] is True

    asyncio.run(send())


# -- the configuration


async def certificate(server: ApiServer) -> ServerCertificate:
    names = service_names(webhook.SERVICE, ME.namespace)
    return await certificates.server_certificate(AuthoritySecret(server, ME.namespace), names, (ME.address,))


def configured(*bundles: str | None) -> dict[str, Any]:
    hooks = [
        {"name": f"h{n}", "clientConfig": {"caBundle": each} if each else {}}
        for n, each in enumerate(bundles)
    ]
    return {"metadata": {"name": CONFIGURATION}, "webhooks": hooks}


async def test_holdfasts_authorities_are_kept_in_the_configuration() -> None:
    """The configuration is applied without them at every upgrade. Another replica may have written them."""
    async with place() as there:
        served = there.served
        made = await certificate(there.server)
        bundle = base64.b64encode(made.bundle.encode()).decode()
        served.put("mutatingwebhookconfigurations", configured(None, bundle, "old"))
        keeping = asyncio.create_task(webhook.keep_configuration(there.server, made, there.admission))
        key = ("mutatingwebhookconfigurations", "", CONFIGURATION)

        def bundles() -> list[str | None]:
            return [each["clientConfig"].get("caBundle") for each in served.objects[key]["webhooks"]]

        await served.until(lambda: bundles() == [bundle] * 3)
        await event_loop.end([keeping])
        before = list(served.requests)
        await webhook._enter_authorities(there.server, bundle)
        assert served.requests == before, "the steady state must not write anything"


async def test_a_configuration_that_is_missing_or_changes_in_between_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "RETRY_S", 0.001)
    async with place() as there:
        served = there.served
        made = await certificate(there.server)
        keeping = asyncio.create_task(webhook.keep_configuration(there.server, made, there.admission))

        def change() -> None:
            served.put("mutatingwebhookconfigurations", configured(None, "other"))

        served.faults = [change, 500, None]
        served.put("mutatingwebhookconfigurations", configured(None))
        key = ("mutatingwebhookconfigurations", "", CONFIGURATION)
        bundle = base64.b64encode(made.bundle.encode()).decode()
        await served.until(
            lambda: (
                [each["clientConfig"].get("caBundle") for each in served.objects[key]["webhooks"]]
                == [bundle] * 2
            )
        )
        await event_loop.end([keeping])


@dataclass
class Port:
    """The webhook's real server, over TLS."""

    number: int
    trusts: ssl.SSLContext
    door: Door

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # the kernel reads little ahead
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", self.number))
        return await asyncio.open_connection(sock=made, ssl=self.trusts, server_hostname=NAME)

    async def ask(self, found: object, **given: Any) -> tuple[int, Any]:
        """Send a review as the API server does; return the status, and the response to a pod's creation."""
        async with (
            ClientSession(f"https://127.0.0.1:{self.number}") as session,
            session.post(
                "/mutate", json=review(found, **given), ssl=self.trusts, server_hostname=NAME
            ) as answer,
        ):
            return answer.status, (await answer.json())["response"] if answer.status == 200 else None


NAME = f"{webhook.SERVICE}.{ME.namespace}.svc"


@asynccontextmanager
async def port_of(there: Place, most_idle: int = 64) -> AsyncIterator[Port]:
    made, door = await certificate(there.server), Door(most_idle)
    runner = await webhook._app(there.admission, door)
    listener = listen_everywhere(0, webhook.BACKLOG)
    make = runner.server
    assert make is not None
    accepting = asyncio.create_task(door.accept(listener, make, made.context))
    try:
        yield Port(listener.getsockname()[1], ssl.create_default_context(cadata=made.bundle), door)
    finally:
        await event_loop.end([accepting])
        listener.close()
        await runner.cleanup()


async def test_the_webhook_is_ready_once_the_api_server_knows_its_authorities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        place() as there,
        port_of(there) as port,
        ClientSession(f"https://127.0.0.1:{port.number}") as session,
    ):
        for entered, code in ((False, 503), (True, 200)):
            there.admission.is_entered = entered
            for path, expected in (("/readyz", code), ("/healthz", 200)):
                async with session.get(path, ssl=port.trusts, server_hostname=NAME) as answer:
                    assert answer.status == expected


# -- any pod can connect


async def post(port: Port, body: bytes, announced: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin a request with a body of `announced` bytes, and send `body`."""
    reader, writer = await port.connect()
    writer.write(f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {announced}\r\n\r\n".encode())
    with suppress(ConnectionError):
        for at in range(0, len(body), 1 << 18):
            writer.write(body[at : at + (1 << 18)])
            await writer.drain()
    return reader, writer


@pytest.mark.parametrize("namespace", ["team", "..", "a/b", "\ud800", "x" * 4096])
async def test_a_forged_review_neither_ends_the_webhook_nor_writes_anything(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod and the owner in it need not exist, and the namespace may be another user's."""
    for name, value in (("NAME", ME.name), ("NAMESPACE", ME.namespace), ("IP", ME.address)):
        monkeypatch.setenv(f"POD_{name}", value)
    monkeypatch.setattr(webhook, "PORT", free_port())
    forged = pod(annotations={"grace": "soon"})
    forged["metadata"]["ownerReferences"] = [{**OWNER, "name": namespace}]
    served = ServedObjects()
    mine = {"name": ME.name, "namespace": ME.namespace}
    served.put("pods", {"metadata": mine, "spec": {"containers": [{"image": "holdfast:dev"}]}})
    served.put("mutatingwebhookconfigurations", configured(None))
    async with served.serving() as server:

        async def connect() -> ApiServer:
            return server

        monkeypatch.setattr(webhook, "connect", connect)
        serving = asyncio.create_task(webhook.serve(event_loop.Lag()))
        try:
            await served.until(lambda: any("PATCH mutating" in each for each in served.requests))
            made, before = await certificate(server), list(served.requests)
            port = Port(webhook.PORT, ssl.create_default_context(cadata=made.bundle), Door())
            for _ in range(2):
                code, response = await port.ask(forged, namespace=namespace)
                assert (code, response["allowed"]) == (200, True)
                assert response["warnings"], "the pod is refused"
            assert "patch" in (await port.ask(pod()))[1]
            assert not serving.done()
            assert (served.requests, served.events) == (before, [])
        finally:
            await event_loop.end([serving])
            gc.unfreeze()


def free_port() -> int:
    with listen_everywhere(0, 1) as listener:
        port: int = listener.getsockname()[1]
    return port


async def test_bodies_that_do_not_end_hold_little_memory_and_delay_no_review(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "MAX_HELD_BYTES", 4 << 20)
    async with place() as there, port_of(there) as port:
        exchanges, opened = there.admission._exchanges, []
        for _ in range(12):
            opened.append(await post(port, b"x" * (1 << 20), 4 << 20))
            assert exchanges.held_bytes <= 4 << 20
        code, response = await port.ask(pod())
        assert code == 200
        assert "patch" in response
        ended = 0
        for reader, writer in opened:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(suppressed(reader.read()), 0.05)
                ended += 1
            writer.transport.abort()
        assert 8 <= ended < 12, "the oldest gave way"


async def suppressed(work: Awaitable[object]) -> None:
    with suppress(ConnectionError):
        await work


async def test_many_slow_requests_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "MAX_EXCHANGES", 8)
    async with place() as there, port_of(there, most_idle=8) as port:
        opened = [await post(port, b"x", 100) for _ in range(40)]
        code, response = await port.ask(pod())
        assert (code, "patch" in response) == (200, True)
        assert len(there.admission._exchanges._open) <= 8
        for _, writer in opened:
            writer.transport.abort()


async def test_a_request_that_takes_longer_than_the_api_server_waits_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "EXCHANGE_S", 0.1)
    async with place() as there, port_of(there) as port:
        reader, writer = await post(port, b"x", 100)
        await asyncio.wait_for(suppressed(reader.read()), 20)
        assert there.admission._exchanges.held_bytes == 0
        writer.transport.abort()


async def test_a_response_that_is_not_read_is_held_only_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "EXCHANGE_S", 1.0)
    monkeypatch.setattr(training_command, "MAX_CHARS", 4 << 20)  # a response that no socket's buffer can hold
    large = pod(container(("torchrun", "--nproc-per-node=1", "train.py", "x" * 3_900_000)))
    text = json.dumps(review(large)).encode()
    async with place() as there, port_of(there) as port:
        exchanges = there.admission._exchanges
        _, writer = await port.connect()
        assert isinstance(writer.transport, asyncio.Transport)
        writer.transport.pause_reading()
        writer.write(f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode())
        writer.write(text)
        await writer.drain()
        for expected in (True, False):
            for _ in range(2_000):
                if (exchanges.held_bytes > len(text)) == expected:
                    break
                await asyncio.sleep(0.01)
            assert (exchanges.held_bytes > len(text)) == expected
        assert exchanges.held_bytes == 0
        writer.transport.abort()


async def test_idle_connections_are_few_and_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place() as there, port_of(there, most_idle=4) as port:
        opened = [await port.connect() for _ in range(12)]
        for reader, _ in opened[:8]:
            await asyncio.wait_for(suppressed(reader.read()), 20)
        assert (await port.ask(pod()))[0] == 200
        for _, writer in opened:
            writer.transport.abort()


async def test_a_compressed_body_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of them can become a gigabyte."""
    async with place() as there, port_of(there) as port:
        packed = gzip.compress(json.dumps(review(pod())).encode())
        async with (
            ClientSession(f"https://127.0.0.1:{port.number}") as session,
            session.post(
                "/mutate",
                data=packed,
                headers={"Content-Encoding": "gzip"},
                ssl=port.trusts,
                server_hostname=NAME,
            ) as answer,
        ):
            assert answer.status == 400


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.myself = self


async def test_what_closed_connections_leave_is_freed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "COLLECT_S", 0.01)
    freed = asyncio.Event()
    collecting = asyncio.create_task(webhook.collect_garbage())
    try:
        await asyncio.sleep(0)
        weakref.finalize(Cycle(), freed.set)
        await asyncio.wait_for(freed.wait(), 20)
    finally:
        await event_loop.end([collecting])
        gc.unfreeze()


async def test_the_limits_fit_the_manifest() -> None:
    documents = list(yaml.safe_load_all((ROOT / "manifests/base/webhook.yaml").read_text()))
    (hooks,) = [each["webhooks"] for each in documents if each["kind"] == "MutatingWebhookConfiguration"]
    assert [each["timeoutSeconds"] for each in hooks] == [webhook.EXCHANGE_S]
    (pods,) = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    limit = int(pods["containers"][0]["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
    at_rest, one_review = 80 << 20, 60 << 20
    assert at_rest + one_review + webhook.MAX_HELD_BYTES + webhook.MAX_IDLE * 2 * webhook.PIECE_BYTES < limit


async def test_pods_get_the_webhooks_own_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "WAIT_S", 0.001)
    async with place() as there:
        mine = {"metadata": {"namespace": ME.namespace, "name": ME.name}}
        asking = asyncio.create_task(webhook._own_image(there.server, ME))
        there.served.put("pods", {**mine, "spec": {"containers": [{"image": "registry/holdfast:3"}]}})
        assert await asking == "registry/holdfast:3"
        monkeypatch.setattr(webhook, "START_TRIES", 2)
        with pytest.raises(NotFound):
            await webhook._own_image(there.server, OwnPod("other", ME.namespace, ""))
