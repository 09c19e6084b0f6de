"""The API server's answer identifies a caller for a minute; in simulated time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from supervisor.admission.pod_layout import AUDIENCE
from supervisor.kubernetes import identity
from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import Forbidden, ServerUnreachable
from supervisor.kubernetes.identity import (
    Caller,
    ReviewUnavailable,
    TokenRefused,
    TokenReviewer,
    caller_of,
)
from tests.unit.supervisor.kubernetes.simulated_time import simulated

TOKEN = "aaa.bbb.ccc"
WORKER = Caller("team", "worker-0", "uid-0", "node1", "default")


def status(**changes: Any) -> dict[str, Any]:
    prefix = "authentication.kubernetes.io/"
    extra = {
        f"{prefix}pod-name": ["worker-0"],
        f"{prefix}pod-uid": ["uid-0"],
        f"{prefix}node-name": ["node1"],
    }
    user = {"username": "system:serviceaccount:team:default", "extra": extra}
    return {"authenticated": True, "audiences": [AUDIENCE], "user": user, **changes}


class Server:
    """Gives `answer` to each review, after `delay_s`."""

    def __init__(self, answer: dict[str, Any] | Exception | None = None, delay_s: float = 0.0) -> None:
        self.answer: dict[str, Any] | Exception = status() if answer is None else answer
        self.delay_s = delay_s
        self.bodies: list[KubernetesObject] = []
        self.at_once = self.most_at_once = 0

    async def create(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject:
        assert kind.path() == "/apis/authentication.k8s.io/v1/tokenreviews"
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay_s)
        self.at_once -= 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return {**body, "status": self.answer}


@simulated
async def test_a_caller_is_the_pod_that_the_server_names_for_the_right_audience() -> None:
    server = Server()
    assert await TokenReviewer(server, AUDIENCE).review(TOKEN) == WORKER
    assert server.bodies[0]["spec"] == {"token": TOKEN, "audiences": [AUDIENCE]}


@simulated
async def test_an_answer_is_valid_for_a_minute_from_the_time_its_request_was_sent() -> None:
    server = Server(delay_s=10.0)
    reviewer = TokenReviewer(server, AUDIENCE)
    await reviewer.review(TOKEN)
    await asyncio.sleep(49.9)
    assert await reviewer.review(TOKEN) == WORKER
    assert len(server.bodies) == 1
    await asyncio.sleep(0.1)
    assert await reviewer.review(TOKEN) == WORKER
    assert len(server.bodies) == 2


@simulated
async def test_a_refusal_is_valid_for_five_seconds() -> None:
    server = Server({"authenticated": False, "error": "[invalid bearer token, token has expired]"})
    reviewer = TokenReviewer(server, AUDIENCE)
    for _ in range(2):
        found = await reviewer.review(TOKEN)
        assert isinstance(found, TokenRefused)
        assert "token has expired" in found.why
    assert len(server.bodies) == 1
    await asyncio.sleep(5)
    server.answer = status()
    assert await reviewer.review(TOKEN) == WORKER


@pytest.mark.parametrize("error", [ServerUnreachable("POST", "no route"), Forbidden("POST", "no", 403)])
@simulated
async def test_while_the_server_is_away_known_callers_stay_valid_and_others_are_not_refused(
    error: Exception,
) -> None:
    server = Server()
    reviewer = TokenReviewer(server, AUDIENCE)
    await reviewer.review(TOKEN)
    server.answer = error
    assert await reviewer.review(TOKEN) == WORKER
    assert isinstance(await reviewer.review("other.b.c"), ReviewUnavailable)
    await asyncio.sleep(60)
    assert isinstance(await reviewer.review(TOKEN), ReviewUnavailable)
    server.answer = status()
    assert await reviewer.review(TOKEN) == WORKER  # the unavailability is not cached


@pytest.mark.parametrize(
    "token", ["", "x", "a.b", "a.b.c.d", "a.b.c\n", "a.b.c d", "ä.b.c", "a" * 20_000 + ".b.c", "a.b.c\x00"]
)
@simulated
async def test_text_that_is_not_a_token_is_refused_without_a_request(token: str) -> None:
    server = Server()
    assert isinstance(await TokenReviewer(server, AUDIENCE).review(token), TokenRefused)
    assert server.bodies == []


@simulated
async def test_invalid_tokens_do_not_displace_callers_and_the_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "REMEMBERED", 4)
    monkeypatch.setattr(identity, "REMEMBERED_REFUSALS", 2)
    server = Server()
    reviewer = TokenReviewer(server, AUDIENCE)
    await reviewer.review(TOKEN)
    server.answer = {"authenticated": False}
    for n in range(50):
        await reviewer.review(f"junk.{n}.x")
    asked = len(server.bodies)
    assert await reviewer.review(TOKEN) == WORKER
    assert len(server.bodies) == asked
    server.answer = status()
    for n in range(50):
        await reviewer.review(f"good.{n}.x")
    assert len(reviewer._callers._answers) == 4
    assert len(reviewer._refusals._answers) == 2


@simulated
async def test_the_token_itself_is_not_stored() -> None:
    reviewer = TokenReviewer(Server(), AUDIENCE)
    await reviewer.review(TOKEN)
    assert not any(TOKEN.encode() in key for key in reviewer._callers._answers)
    assert TOKEN not in repr(list(reviewer._callers._answers.values()))


@simulated
async def test_many_concurrent_members_do_not_flood_the_server() -> None:
    server = Server(delay_s=0.5)
    reviewer = TokenReviewer(server, AUDIENCE)
    found = await asyncio.gather(*(reviewer.review(f"a.{n}.b") for n in range(500)))
    assert found == [WORKER] * 500
    assert server.most_at_once == identity.AT_ONCE


@simulated
async def test_requests_with_the_same_token_wait_for_one_review_when_many_wait() -> None:
    server = Server(delay_s=0.5)
    reviewer = TokenReviewer(server, AUDIENCE)
    await asyncio.gather(*(reviewer.review(TOKEN) for _ in range(500)))
    assert len(server.bodies) <= identity.AT_ONCE


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "does not accept"),
        ({}, "does not accept"),
        (status(authenticated=False), "does not accept"),
        (status(authenticated="true"), "does not accept"),
        (status(audiences=["https://kubernetes.default.svc"]), "not for the audience holdfast.dev"),
        (status(audiences=None), "not for the audience"),
        (status(user={"username": "admin", "extra": status()["user"]["extra"]}), "not bound to a pod"),
        (status(user={"username": "system:serviceaccount:team:default"}), "not bound to a pod"),
        (status(user={"username": "system:serviceaccount:a:b:c", "extra": {}}), "not bound to a pod"),
        (status(user=None), "not bound to a pod"),
    ],
)
def test_a_token_that_does_not_prove_a_pod_is_refused(found: object, why: str) -> None:
    answer = caller_of(found, AUDIENCE)
    assert isinstance(answer, TokenRefused)
    assert why in answer.why


def test_a_server_that_does_not_report_the_node_still_names_the_pod() -> None:
    user = status()["user"]
    extra = {key: value for key, value in user["extra"].items() if "node" not in key}
    answer = caller_of(status(user={**user, "extra": extra}), AUDIENCE)
    assert answer == Caller("team", "worker-0", "uid-0", "", "default")
