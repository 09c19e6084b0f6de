"""The client sends requests to a local server that misbehaves as a real one or a proxy might."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from holdfast.version import __version__
from supervisor.kubernetes import certificates, client
from supervisor.kubernetes.access import ServerAccess
from supervisor.kubernetes.client import ApiServer, PatchType, ResourceKind, WatchEvent
from supervisor.kubernetes.errors import (
    AlreadyThere,
    AnswerTooLong,
    ApiError,
    Conflict,
    EvictionBlocked,
    Forbidden,
    Gone,
    InvalidObject,
    NotFound,
    ServerUnreachable,
    Unauthenticated,
    WatchStalled,
)

PODS = ResourceKind("", "v1", "pods")
NODES = ResourceKind("", "v1", "nodes", namespaced=False)
SUPERVISIONS = ResourceKind("holdfast.dev", "v1alpha1", "supervisions")
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns"}}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Token:
    """Credentials that use the next of `tokens` whenever one is refused."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = list(tokens) or ["Bearer one"]

    async def header(self) -> str:
        return self.tokens[0]

    async def renew(self, refused: str) -> bool:
        if len(self.tokens) > 1:
            self.tokens.pop(0)
        return self.tokens[0] != refused


@asynccontextmanager
async def serving(
    handler: Handler, token: Token | None = None, request_s: float = 10.0, stall_s: float = 10.0
) -> AsyncIterator[ApiServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server:
        access = ServerAccess(str(server.make_url("")).rstrip("/"), token or Token())
        async with ApiServer(access, request_s, stall_s) as api:
            yield api


def answering(*answers: Any, status: int = 200) -> tuple[Handler, list[web.Request]]:
    """Return a handler that gives the answers in turn and repeats the last one, and the list of requests."""
    left, requests = list(answers), []

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        requests.append(request)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, dict):
            return web.json_response(answer, status=status)
        return web.Response(body=answer, status=status)

    return handle, requests


def status_of(code: int, reason: str, message: str = "said the server", cause: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"kind": "Status", "code": code, "reason": reason, "message": message}
    key = "field" if "." in cause else "reason"
    return {**found, "details": {"causes": [{key: cause}]}} if cause else found


# -- paths


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PODS.path(), "/api/v1/pods"),
        (PODS.path("ns"), "/api/v1/namespaces/ns/pods"),
        (PODS.path("ns", "p", "eviction"), "/api/v1/namespaces/ns/pods/p/eviction"),
        (NODES.path("", "n"), "/api/v1/nodes/n"),
        (NODES.path("ignored", "n"), "/api/v1/nodes/n"),
        (SUPERVISIONS.path("ns", "s"), "/apis/holdfast.dev/v1alpha1/namespaces/ns/supervisions/s"),
        (PODS.path("ns", "a/../../b?c"), "/api/v1/namespaces/ns/pods/a%2F..%2F..%2Fb%3Fc"),
    ],
)
def test_each_resource_has_its_path(path: str, expected: str) -> None:
    assert path == expected


@pytest.mark.parametrize(("namespace", "name"), [("", "p"), ("ns", ".."), ("..", "p"), (".", "p")])
def test_a_name_that_would_change_the_path_is_refused(namespace: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"namespace|is not the name"):
        PODS.path(namespace, name)


async def test_an_unusual_name_reaches_the_server_as_one_part_of_the_path() -> None:
    handle, requests = answering(POD)
    async with serving(handle) as api:
        await api.get(PODS, "a/../b c", "ns")
    assert requests[0].raw_path == "/api/v1/namespaces/ns/pods/a%2F..%2Fb%20c"


# -- requests


async def test_a_request_contains_the_credentials() -> None:
    handle, requests = answering(POD)
    async with serving(handle) as api:
        assert await api.get(PODS, "p", "ns") == POD
    assert requests[0].headers["User-Agent"] == f"holdfast/{__version__}"
    assert requests[0].headers["Authorization"] == "Bearer one"


async def test_a_list_is_read_page_by_page() -> None:
    def page(name: str, more: str) -> dict[str, Any]:
        metadata = {"resourceVersion": "7", **({"continue": more} if more else {})}
        items = [{"metadata": {"name": name, "managedFields": []}}]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}

    handle, requests = answering(page("a", "next"), page("b", ""))
    async with serving(handle) as api:
        found = await api.list(
            PODS, "ns", labels="a in (b,c)", prune=lambda each: {"pruned": each["metadata"]["name"], **each}
        )
    assert found.version == "7"
    assert [(each["pruned"], each["kind"], each["apiVersion"]) for each in found.objects] == [
        ("a", "Pod", "v1"),
        ("b", "Pod", "v1"),
    ]
    assert [request.query.get("continue") for request in requests] == [None, "next"]
    assert all(request.query["labelSelector"] == "a in (b,c)" for request in requests)
    assert all("fieldSelector" not in request.query for request in requests)


def paged(sizes: list[int]) -> tuple[Handler, list[int]]:
    """Serve objects of these sizes in pages, as the API server does. Also return the requests' limits."""
    limits: list[int] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        limit, start = int(request.query["limit"]), int(request.query.get("continue", "0"))
        limits.append(limit)
        items = [
            {"metadata": {"name": f"p-{number}"}, "bulk": "x" * size}
            for number, size in enumerate(sizes[start : start + limit], start)
        ]
        more = {"continue": str(start + limit)} if start + limit < len(sizes) else {}
        return web.json_response({"metadata": {"resourceVersion": "7", **more}, "items": items})

    return handle, limits


async def test_large_objects_are_listed_in_smaller_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_BYTES", 100_000)
    monkeypatch.setattr(client, "ANSWER_BYTES", 300_000)
    sizes = [10] * 150 + [40_000] * 9 + [200_000] * 2 + [10] * 150
    handle, limits = paged(sizes)
    async with serving(handle) as api:
        found = await api.list(PODS, prune=lambda each: {"name": each["metadata"]["name"]})
    assert [each["name"] for each in found.objects] == [f"p-{number}" for number in range(len(sizes))]
    assert limits[0] == max(limits) == client.PAGE
    assert 1 in limits
    assert len(limits) < 60


async def test_a_single_object_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_BYTES", 1_000)
    monkeypatch.setattr(client, "ANSWER_BYTES", 3_000)
    handle, limits = paged([10, 4_000])
    async with serving(handle) as api:
        with pytest.raises(AnswerTooLong, match="more than 3000 bytes"):
            await api.list(PODS)
    assert len(limits) < 12


@pytest.mark.parametrize(
    "page", [{}, {"metadata": {}}, {"metadata": {"resourceVersion": "1"}, "items": ["x"]}, {"items": []}]
)
async def test_an_answer_that_is_not_a_list_is_refused(page: dict[str, Any]) -> None:
    async with serving(answering(page)[0]) as api:
        with pytest.raises(ServerUnreachable, match="not a list"):
            await api.list(PODS)


async def test_a_list_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_PAGES", 3)
    page = {"metadata": {"resourceVersion": "1", "continue": "x"}, "items": []}
    handle, requests = answering(page)
    async with serving(handle) as api:
        with pytest.raises(ServerUnreachable, match="more than 3 pages"):
            await api.list(PODS)
    assert len(requests) == 3


async def test_a_deletion_carries_its_conditions() -> None:
    handle, requests = answering({"kind": "Status"})
    async with serving(handle) as api:
        await api.delete(PODS, "p", "ns", uid="u", version="5", grace_s=0, propagation="Background")
        await api.delete(PODS, "p", "ns")
    first, second = [json.loads(await request.read()) for request in requests]
    assert first["preconditions"] == {"uid": "u", "resourceVersion": "5"}
    assert (first["gracePeriodSeconds"], first["propagationPolicy"]) == (0, "Background")
    assert second == {"apiVersion": "v1", "kind": "DeleteOptions"}


async def test_an_eviction_is_only_of_this_pod() -> None:
    handle, requests = answering({"kind": "Status"})
    async with serving(handle) as api:
        await api.evict("ns", "p", "u")
    assert [request.path for request in requests] == ["/api/v1/namespaces/ns/pods/p/eviction"]
    body = json.loads(await requests[0].read())
    assert body["metadata"] == {"name": "p", "namespace": "ns"}
    assert body["deleteOptions"] == {"preconditions": {"uid": "u"}}


async def test_an_eviction_can_depend_on_the_version_of_the_pod() -> None:
    handle, requests = answering({"kind": "Status"})
    async with serving(handle) as api:
        await api.evict("ns", "p", "u", "17")
    body = json.loads(await requests[0].read())
    assert body["deleteOptions"] == {"preconditions": {"uid": "u", "resourceVersion": "17"}}


async def test_a_dry_run_is_requested_and_warnings_survive_a_refusal() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.query_string)
        refusal = {"kind": "Status", "reason": "Forbidden", "message": "exceeded quota"}
        response = web.json_response(refusal, status=403)
        response.headers.add("Warning", '299 - "Holdfast: one"')
        response.headers.add("Warning", '299 - "two"')
        return response

    async with serving(handle) as api:
        with pytest.raises(Forbidden, match="exceeded quota") as refused:
            await api.create(PODS, POD, "ns", dry_run=True)
    assert asked == ["dryRun=All"]
    assert refused.value.warnings == ('299 - "Holdfast: one"', '299 - "two"')


async def test_each_kind_of_patch_has_its_content_type() -> None:
    handle, requests = answering(POD)
    async with serving(handle) as api:
        await api.patch(PODS, "p", {"a": 1}, "ns", subresource="status")
        await api.patch(PODS, "p", [{"op": "add"}], "ns", how=PatchType.JSON)
        await api.apply(PODS, POD, "holdfast-quarantine", force=True)
    assert [request.headers["Content-Type"] for request in requests] == [
        "application/merge-patch+json",
        "application/json-patch+json",
        "application/apply-patch+yaml",
    ]
    assert requests[0].path == "/api/v1/namespaces/ns/pods/p/status"
    assert dict(requests[2].query) == {"fieldManager": "holdfast-quarantine", "force": "true"}


async def test_writes_go_to_the_path_of_the_object() -> None:
    handle, requests = answering(POD)
    async with serving(handle) as api:
        await api.create(PODS, POD, "ns")
        await api.replace(PODS, POD, subresource="status")
        await api.create_subresource(PODS, "p", "eviction", {}, "ns")
        await api.create(NODES, {"metadata": {"name": "n"}})
    assert [(request.method, request.path) for request in requests] == [
        ("POST", "/api/v1/namespaces/ns/pods"),
        ("PUT", "/api/v1/namespaces/ns/pods/p/status"),
        ("POST", "/api/v1/namespaces/ns/pods/p/eviction"),
        ("POST", "/api/v1/nodes"),
    ]


# -- refusals


@pytest.mark.parametrize(
    ("code", "reason", "cause", "expected"),
    [
        (400, "BadRequest", "", InvalidObject),
        (401, "Unauthorized", "", Unauthenticated),
        (403, "Forbidden", "", Forbidden),
        (404, "NotFound", "", NotFound),
        (405, "MethodNotAllowed", "", ApiError),
        (409, "Conflict", "", Conflict),
        (409, "AlreadyExists", "", AlreadyThere),
        (410, "Expired", "", Gone),
        (422, "Invalid", "FieldValueInvalid", InvalidObject),
        (422, "Invalid", "metadata.uid", Conflict),
        (429, "TooManyRequests", "", ServerUnreachable),
        (429, "TooManyRequests", "DisruptionBudget", EvictionBlocked),
        (500, "InternalError", "", ServerUnreachable),
        (503, "ServiceUnavailable", "", ServerUnreachable),
        (504, "Timeout", "ResourceVersionTooLarge", Gone),
        (504, "Timeout", "", ServerUnreachable),
    ],
)
async def test_each_refusal_raises_its_exception_with_the_servers_message(
    code: int, reason: str, cause: str, expected: type[Exception]
) -> None:
    handle, _ = answering(status_of(code, reason, cause=cause), status=code)
    async with serving(handle) as api:
        with pytest.raises(Exception, match=r"GET pods ns/p: .*said the server") as caught:
            await api.get(PODS, "p", "ns")
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    "body", [b"", b"<html>Bad gateway</html>", b"[]", b"\xff", b'{"message": 5, "details": 3}']
)
async def test_a_refusal_without_a_status_object_is_classified_by_its_code(body: bytes) -> None:
    handle, _ = answering(body, status=404)
    async with serving(handle) as api:
        with pytest.raises(NotFound):
            await api.get(PODS, "p", "ns")


async def test_a_redirect_is_not_followed_with_the_token() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/elsewhere")

    async with serving(handle) as api:
        with pytest.raises(ApiError, match="302"):
            await api.get(PODS, "p", "ns")


def by_token(accepted: str) -> tuple[Handler, list[str]]:
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        if seen[-1] == accepted:
            return web.json_response(POD)
        return web.json_response(status_of(401, "Unauthorized"), status=401)

    return handle, seen


async def test_a_request_refused_for_its_token_is_repeated_with_the_new_one() -> None:
    handle, seen = by_token("Bearer new")
    async with serving(handle, Token("Bearer old", "Bearer new")) as api:
        assert await api.get(PODS, "p", "ns") == POD
        assert await api.get(PODS, "p", "ns") == POD
    assert seen == ["Bearer old", "Bearer new", "Bearer new"]


@pytest.mark.parametrize(
    ("tokens", "attempts"), [(["Bearer a"], 1), (["Bearer a", "Bearer b", "Bearer c"], 2)]
)
async def test_a_token_is_renewed_once(tokens: list[str], attempts: int) -> None:
    handle, seen = by_token("Bearer other")
    async with serving(handle, Token(*tokens)) as api:
        with pytest.raises(Unauthenticated):
            await api.get(PODS, "p", "ns")
    assert len(seen) == attempts


# -- transport


async def test_an_unreachable_server_has_certainly_not_received_the_request() -> None:
    async with ApiServer(ServerAccess("http://127.0.0.1:1", Token())) as api:
        with pytest.raises(ServerUnreachable, match="GET pods ns/p") as caught:
            await api.get(PODS, "p", "ns")
    assert not caught.value.sent


async def test_a_missing_answer_is_waited_for_only_for_a_limited_time() -> None:
    done = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        await done.wait()
        return web.json_response(POD)

    async with serving(handle, request_s=0.1) as api:
        with pytest.raises(ServerUnreachable, match="no answer in time") as caught:
            await api.create(PODS, POD, "ns")
        done.set()
    assert caught.value.sent


async def test_an_answer_that_arrives_byte_by_byte_is_waited_for_only_for_a_limited_time() -> None:
    done = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        await done.wait()
        return response

    async with serving(handle, request_s=0.1) as api:
        with pytest.raises(ServerUnreachable, match="no answer in time"):
            await api.get(PODS, "p", "ns")
        done.set()


async def test_an_endless_answer_is_read_only_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_BYTES", 1 << 20)

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    async with serving(handle) as api:
        with pytest.raises(ServerUnreachable, match="more than 1048576 bytes"):
            await api.get(PODS, "p", "ns")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
async def test_an_answer_that_is_not_an_object_is_refused(body: bytes) -> None:
    async with serving(answering(body)[0]) as api:
        with pytest.raises(ServerUnreachable, match="not a JSON object"):
            await api.get(PODS, "p", "ns")


async def test_a_truncated_answer_is_refused() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(json.dumps(POD).encode())
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(handle) as api:
        with pytest.raises(ServerUnreachable, match="GET pods ns/p"):
            await api.get(PODS, "p", "ns")


# -- TLS


@asynccontextmanager
async def serving_tls(names: list[str], addresses: list[str]) -> AsyncIterator[tuple[str, str]]:
    """Yield the URL of a server with a certificate for these names, and the bundle that verifies it."""
    now = datetime.now(timezone.utc)
    authority = certificates.new_authority(now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificates._load_chain(context, certificates.new_leaf(authority, names, addresses, now).chain)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answering(POD)[0])
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    try:
        yield str(server.make_url("")).rstrip("/"), certificates.bundle([authority])
    finally:
        await server.close()


async def test_a_server_with_a_valid_certificate_is_accepted() -> None:
    async with serving_tls(["x"], ["127.0.0.1"]) as (url, bundle):
        tls = ssl.create_default_context(cadata=bundle)
        async with ApiServer(ServerAccess(url, Token(), tls)) as api:
            assert await api.get(PODS, "p", "ns") == POD


async def test_a_server_may_be_verified_under_another_name() -> None:
    async with serving_tls(["kubernetes"], []) as (url, bundle):
        tls = ssl.create_default_context(cadata=bundle)
        async with ApiServer(ServerAccess(url, Token(), tls, server_name="kubernetes")) as api:
            assert await api.get(PODS, "p", "ns") == POD


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_a_server_with_an_invalid_certificate_does_not_receive_the_token(wrong: str) -> None:
    async with serving_tls(["x"], ["127.0.0.2" if wrong == "name" else "127.0.0.1"]) as (url, bundle):
        if wrong == "authority":
            bundle = certificates.bundle([certificates.new_authority(datetime.now(timezone.utc))])
        tls = ssl.create_default_context(cadata=bundle)
        async with ApiServer(ServerAccess(url, Token(), tls)) as api:
            with pytest.raises(ServerUnreachable, match="certificate") as caught:
                await api.get(PODS, "p", "ns")
    assert not caught.value.sent


# -- watches


def line(verb: str, version: int, **more: Any) -> bytes:
    found = {"metadata": {"name": "p", "resourceVersion": str(version)}, **more}
    return json.dumps({"type": verb, "object": found}).encode() + b"\n"


def streaming(*pieces: bytes, until: asyncio.Event | None = None) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)  # so that each piece is a chunk of its own
        if until is not None:
            await until.wait()
        return response

    return handle


async def watched(handler: Handler) -> list[WatchEvent]:
    async with serving(handler) as api, api.watch(PODS, "5", "ns") as events:
        return [each async for each in events]


async def test_events_arrive_however_the_stream_is_split_until_the_server_ends_the_watch() -> None:
    text = line("ADDED", 6) + line("BOOKMARK", 9) + b"\n" + line("DELETED", 10)
    for size in (1, 7, 50, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = await watched(streaming(*pieces))
        assert [each.verb for each in found] == ["ADDED", "BOOKMARK", "DELETED"]
        assert found[2].object["metadata"]["resourceVersion"] == "10"


async def test_a_watch_requests_bookmarks_and_a_timeout() -> None:
    handle, requests = answering(b"")
    async with serving(handle) as api, api.watch(PODS, "5", labels="a=b", watch_s=60) as events:
        assert [each async for each in events] == []
    assert requests[0].path == "/api/v1/pods"
    assert dict(requests[0].query) == {
        "watch": "true",
        "resourceVersion": "5",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "60",
        "labelSelector": "a=b",
    }


async def test_an_expired_version_is_reported_in_the_stream_or_before_it() -> None:
    status = status_of(410, "Expired", "too old resource version: 5")
    with pytest.raises(Gone, match="too old resource version"):
        await watched(streaming(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"))
    with pytest.raises(Gone, match="too old resource version"):
        await watched(answering(status, status=410)[0])


async def test_another_error_in_the_stream_raises_its_exception() -> None:
    status = status_of(500, "InternalError", "etcd is leaderless")
    with pytest.raises(ServerUnreachable, match="etcd is leaderless"):
        await watched(streaming(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"))


async def test_silence_of_a_half_open_connection_is_detected() -> None:
    done = asyncio.Event()
    async with serving(streaming(line("ADDED", 6), until=done), stall_s=0.2) as api:
        async with api.watch(PODS, "5") as events:
            assert (await anext(events)).verb == "ADDED"
            with pytest.raises(WatchStalled):
                await anext(events)
        done.set()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"garbage\n", "not a JSON object"),
        (b'{"type": "ADDED"}\n', "not a watch event"),
        (b'{"type": "ADDED", "object": {}}\n', "not a watch event"),
        (b'{"type": "ERROR", "object": 5}\n', "not a watch event"),
        (b'{"type": "ADDED", "obj', "ended within an event"),
    ],
)
async def test_a_malformed_event_ends_the_watch(text: bytes, why: str) -> None:
    with pytest.raises(ServerUnreachable, match=why):
        await watched(streaming(text))


async def test_an_event_with_the_largest_object_that_the_api_server_can_send_is_read() -> None:
    """1.5 MB of "<" fit into the server's store, and have 9 MB as JSON."""
    text = line("ADDED", 6, bulk="<" * 1_500_000).replace(b"<", b"\\u003c") + line("ADDED", 7)
    pieces = [text[at : at + (1 << 18)] for at in range(0, len(text), 1 << 18)]
    assert len(await watched(streaming(*pieces))) == 2


async def test_an_endless_event_is_read_only_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LINE_BYTES", 1 << 20)
    with pytest.raises(ServerUnreachable, match="more than 1048576 bytes"):
        await watched(streaming(*[b"x" * 65536] * 40))


async def test_an_exception_of_the_watchs_reader_is_not_mistaken_for_the_servers() -> None:
    async def read(api: ApiServer) -> None:
        async with api.watch(PODS, "5") as events:
            async for _ in events:
                raise OSError("disk full")

    async with serving(streaming(line("ADDED", 6))) as api:
        with pytest.raises(OSError, match="disk full") as caught:
            await read(api)
    assert not isinstance(caught.value, ServerUnreachable)
