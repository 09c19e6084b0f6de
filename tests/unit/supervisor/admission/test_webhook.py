"""The webhook on a real socket admits every pod, injected or unchanged, whatever it receives."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.process import event_loop
from supervisor.admission import pod_layout, webhook
from supervisor.admission.webhook import CONFIGURATION, MAX_REVIEW_BYTES, Admission
from supervisor.kubernetes import certificates
from supervisor.kubernetes.certificates import AuthoritySecret, ServerCertificate
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import NotFound
from supervisor.kubernetes.events import EventRecorder
from supervisor.kubernetes.own_pod import OwnPod, service_names
from tests.unit.supervisor.admission.pods import Pod, container, named, patched, pod, variables
from tests.unit.supervisor.cluster.supervising.api_server import ServedObjects

ME = OwnPod("webhook-1", "holdfast-system", "10.0.0.9")
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "uid-9", "controller": True}


@dataclass
class Place:
    served: ServedObjects
    server: ApiServer
    admission: Admission
    events: EventRecorder
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
        events = EventRecorder(server, "holdfast-webhook", ME.name)
        admission = Admission(events, "holdfast:dev")
        admission.ca = "PEM\n"
        app = web.Application(client_max_size=MAX_REVIEW_BYTES)
        app.router.add_post("/mutate", admission.review)
        async with TestClient(TestServer(app)) as client:
            yield Place(served, server, admission, events, client)


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
    refused["metadata"]["ownerReferences"] = [OWNER]
    async with place() as there:
        writing = asyncio.create_task(there.events.run())
        response = await there.response(refused)
        made = after(refused, response)
        why = made["metadata"]["annotations"][pod_layout.NOT_INJECTED]
        assert "grace" in why
        assert made["spec"] == refused["spec"]
        assert response["warnings"][0].startswith("Holdfast: not injected: ")
        await there.served.until(lambda: there.served.events)
        (event,) = there.served.events
        assert (event["reason"], event["type"], event["message"]) == ("NotInjected", "Warning", why)
        assert event["involvedObject"]["kind"] == "Job", "the pod has no name yet"
        assert event["involvedObject"]["namespace"] == "team"
        await event_loop.end([writing])


@pytest.mark.parametrize(
    ("metadata", "name"), [({"name": "w-0"}, "w-0"), ({"generateName": "w-"}, "w-"), ({}, "unnamed")]
)
async def test_the_event_for_a_pod_without_an_owner_is_about_the_pod(
    metadata: dict[str, str], name: str
) -> None:
    refused = pod(annotations={"grace": "soon"})
    refused["metadata"] = {"annotations": refused["metadata"]["annotations"], **metadata}
    async with place() as there:
        writing = asyncio.create_task(there.events.run())
        await there.response(refused)
        await there.served.until(lambda: there.served.events)
        assert there.served.events[0]["involvedObject"]["kind"] == "Pod"
        assert there.served.events[0]["involvedObject"]["name"] == name
        await event_loop.end([writing])


async def test_a_dry_run_leaves_no_event() -> None:
    async with place() as there:
        await there.response(pod(annotations={"grace": "soon"}), dryRun=True)
        assert await there.events.flush(5.0)


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


async def test_the_webhook_is_ready_once_the_api_server_knows_its_authorities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    monkeypatch.setattr(webhook, "PORT", port)
    async with place() as there:
        made = await certificate(there.server)
        runner = await webhook._listen(there.admission, made)
        trusts = ssl.create_default_context(cadata=made.bundle)
        try:
            async with ClientSession(f"https://127.0.0.1:{port}") as session:
                for entered, code in ((False, 503), (True, 200)):
                    there.admission.is_entered = entered
                    for path, expected in (("/readyz", code), ("/healthz", 200)):
                        name = f"{webhook.SERVICE}.{ME.namespace}.svc"
                        async with session.get(path, ssl=trusts, server_hostname=name) as answer:
                            assert answer.status == expected
        finally:
            await runner.cleanup()


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
