"""A real API server reviews real tokens of pods."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from supervisor.admission.pod_layout import AUDIENCE
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.identity import Caller, TokenRefused, TokenReviewer
from tests.cluster.api.kinds import NODES, PODS, SERVICE_ACCOUNTS, pod

pytestmark = pytest.mark.cluster
LIMIT_S = 60.0


async def token_for(
    api: ApiServer,
    namespace: str,
    audience: str,
    made: dict[str, Any] | None = None,
    account: str = "default",
) -> str:
    """Return a token as the kubelet requests it for the pod `made`, or a token that belongs to no pod."""
    spec: dict[str, Any] = {"audiences": [audience], "expirationSeconds": 600}
    if made is not None:
        metadata = made["metadata"]
        reference = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec["boundObjectRef"] = reference
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    answer = await api.create_subresource(SERVICE_ACCOUNTS, account, "token", body, namespace)
    token: str = answer["status"]["token"]
    return token


@pytest.fixture
async def made(api: ApiServer, namespace: str) -> dict[str, Any]:
    nodes = (await api.list(NODES)).objects
    await account_of(api, namespace)
    return dict(await api.create(PODS, pod(namespace, "worker-0", nodes[0]["metadata"]["name"]), namespace))


async def account_of(api: ApiServer, namespace: str) -> None:
    """Wait for the account that each namespace gets soon after its creation."""
    end_s = asyncio.get_running_loop().time() + LIMIT_S
    while asyncio.get_running_loop().time() < end_s:
        if any(
            each["metadata"]["name"] == "default"
            for each in (await api.list(SERVICE_ACCOUNTS, namespace)).objects
        ):
            return
    raise AssertionError("no default account")


async def test_a_token_of_a_pod_names_the_pod_and_its_node(
    api: ApiServer, namespace: str, made: dict[str, Any]
) -> None:
    token = await token_for(api, namespace, AUDIENCE, made)
    assert await TokenReviewer(api, AUDIENCE).review(token) == Caller(
        namespace, "worker-0", made["metadata"]["uid"], made["spec"]["nodeName"], "default"
    )


async def test_other_tokens_are_refused(api: ApiServer, namespace: str, made: dict[str, Any]) -> None:
    reviewer = TokenReviewer(api, AUDIENCE)
    for_the_server = await token_for(api, namespace, "https://kubernetes.default.svc", made)
    of_no_pod = await token_for(api, namespace, AUDIENCE)
    right = await token_for(api, namespace, AUDIENCE, made)
    head, body, signature = right.split(".")
    forged = ".".join((head, body, signature[::-1]))
    found = [await reviewer.review(each) for each in (for_the_server, of_no_pod, forged, "a.b.c")]
    assert all(isinstance(each, TokenRefused) for each in found)
    assert isinstance(found[1], TokenRefused)
    assert "not bound to a pod" in found[1].why


async def test_the_token_of_a_pod_that_is_gone_is_refused(
    api: ApiServer, namespace: str, made: dict[str, Any]
) -> None:
    """The server caches valid tokens for 10 s, and our own cache adds at most a minute."""
    token = await token_for(api, namespace, AUDIENCE, made)
    assert isinstance(await TokenReviewer(api, AUDIENCE).review(token), Caller)
    await api.delete(PODS, "worker-0", namespace, grace_s=0)
    end_s = asyncio.get_running_loop().time() + LIMIT_S
    while isinstance(found := await TokenReviewer(api, AUDIENCE).review(token), Caller):
        assert asyncio.get_running_loop().time() < end_s
    assert isinstance(found, TokenRefused)
