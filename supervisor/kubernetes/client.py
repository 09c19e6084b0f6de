"""Send requests to the Kubernetes API server.

Objects are raw JSON. Every wait has a time limit, and every response a size limit. Transport failures and
refusals are raised as the exceptions in `supervisor.kubernetes.errors`, whose messages describe the request.
After a 401, the client retries a request once with new credentials. It does not retry in any other case,
because only the caller can find out whether a request without a response took effect.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import aiohttp

from holdfast.version import __version__
from supervisor.kubernetes.access import ServerAccess, find_access
from supervisor.kubernetes.errors import (
    MESSAGE_CHARS,
    AnswerTooLong,
    ApiError,
    ServerUnreachable,
    WatchStalled,
    refusal,
)

KubernetesObject = Mapping[str, Any]
_Objects = list[KubernetesObject]  # an alias, because `list` is a method within `ApiServer`

REQUEST_S = 15.0  # the API server's own limit for most requests is 60 s; it usually responds in milliseconds
CONNECT_S = 5.0
# The limit for a response with one object, or for an event of a watch. The API server accepts objects of at
# most 3 MiB, and stores them as protobuf. As JSON, an object can have up to 8 times that size, because each
# "<" in it becomes "\u003c".
ANSWER_BYTES = LINE_BYTES = 32 << 20
# The limit for a page of several objects. A parsed page can take ten times its size in memory. A page that
# exceeds the limit is requested again with fewer objects.
PAGE_BYTES = 8 << 20
# The number of objects per page of a list. Parsing a page blocks the event loop: in a measurement, a page of
# 100 pods of 16 KiB took 39 ms.
PAGE = 100
MAX_WARNINGS = 16
SLICE = 10  # prune only this many objects before other work may run, because `prune` may decode them
MAX_PAGES = 4000  # stops a list that would never end
WATCH_S = 300  # the server ends a watch after this time, and the next watch resumes where it ended
STALL_S = 130.0  # two missed bookmarks, because the server sends one every minute in a quiet watch


class PatchType(enum.Enum):
    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"  # not for custom resources


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """A kind of object, identified by its place in the API. `group` is "" for the core group."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of an object or a collection. If `namespace` is "", it spans all namespaces."""
        if self.namespaced and name and not namespace:
            raise ValueError(f"{self.plural} {name!r} needs a namespace")
        parts = [f"/apis/{self.group}" if self.group else "/api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", _segment(namespace)]
        parts.append(self.plural)
        parts += [_segment(each) for each in (name, subresource) if each]
        return "/".join(parts)


PODS = ResourceKind("", "v1", "pods")
NODES = ResourceKind("", "v1", "nodes", namespaced=False)
CONFIG_MAPS = ResourceKind("", "v1", "configmaps")


@dataclass(frozen=True, slots=True)
class Listing:
    """A collection at `version`, from which a watch can continue."""

    objects: tuple[KubernetesObject, ...]
    version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """An event of a watch. `verb` is ADDED, MODIFIED, DELETED, or BOOKMARK with only a resource version."""

    verb: str
    object: KubernetesObject


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    words: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: KubernetesObject | Sequence[KubernetesObject] | None = None
    content_type: str = "application/json"


_CHECK: ContextVar[Callable[[], str]] = ContextVar("check", default=lambda: "")


class _NotSent(Exception):
    """The request must not be sent. The message says why."""


@contextmanager
def checked(check: Callable[[], str]) -> Iterator[None]:
    """Call `check` just before writing each request of the tasks that are created in the block.

    At this point, the request already has its connection. If `check` returns a reason, the request is not
    sent, and raises `ServerUnreachable`.
    """
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


async def _check(*_: object) -> None:
    if why := _CHECK.get()():
        raise _NotSent(why)


async def connect(kubeconfig: str | Path | None = None, context: str | None = None) -> ApiServer:
    """Return a client of the API server that the arguments, the environment or this pod specify.

    This sends no request. Raises `ClusterNotConfigured`.
    """
    return ApiServer(await find_access(kubeconfig, context))


class ApiServer:
    """A client of one API server. Create it in a running event loop, and close it after use.

    A failed request raises `ApiError`, one of its subclasses, or `ServerUnreachable`.
    """

    def __init__(self, access: ServerAccess, request_s: float = REQUEST_S, stall_s: float = STALL_S) -> None:
        self._access = access
        self._request_s, self._stall_s = request_s, stall_s
        connected = aiohttp.TraceConfig()
        connected.on_connection_create_end.append(_check)
        connected.on_connection_reuseconn.append(_check)
        self._session = aiohttp.ClientSession(
            trace_configs=[connected],
            connector=aiohttp.TCPConnector(ssl=access.tls or True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"holdfast/{__version__}", "Accept": "application/json"},
            read_bufsize=1 << 18,
        )

    @property
    def namespace(self) -> str:
        """The namespace of the kubeconfig's context, or of this pod."""
        return self._access.namespace

    async def __aenter__(self) -> ApiServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    # -- reading

    async def get(
        self, kind: ResourceKind, name: str, namespace: str = "", *, subresource: str = ""
    ) -> KubernetesObject:
        return await self._ask(_request("GET", kind, namespace, name, subresource))

    async def list(
        self,
        kind: ResourceKind,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        prune: Callable[[KubernetesObject], KubernetesObject] = lambda each: each,
    ) -> Listing:
        """Return all objects that match the selectors, at one version.

        The list is read in pages. `prune` is applied to the objects of each page as the page arrives, so the
        whole list is never in memory unpruned. A page that is too long is requested again with half as many
        objects, so that one user's large objects do not make the list for all users unreadable. Raises `Gone`
        if reading took so long that the server no longer has that version. In that case, list again.
        """
        found: _Objects = []
        query, limit = _selectors(labels, fields), PAGE
        for _ in range(MAX_PAGES):
            request = _request("GET", kind, namespace, query={**query, "limit": str(limit)})
            try:
                page = await self._ask(request, PAGE_BYTES if limit > 1 else ANSWER_BYTES)
            except AnswerTooLong:
                if limit == 1:
                    raise
                limit //= 2  # the position in the list, `continue`, does not depend on the limit
                continue
            for number, each in enumerate(_items(request, page), 1):
                found.append(prune(each))
                if number % SLICE == 0:
                    await asyncio.sleep(0)
            more = page["metadata"].get("continue")
            if not more:
                return Listing(tuple(found), page["metadata"]["resourceVersion"])
            query, limit = {**query, "continue": more}, min(PAGE, 2 * limit)
        raise ServerUnreachable(request.words, f"more than {MAX_PAGES} pages")

    @asynccontextmanager
    async def watch(
        self,
        kind: ResourceKind,
        since: str,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        watch_s: int = WATCH_S,
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Yield an iterator over the events after the version `since`; the server ends it after `watch_s`.

        The iterator raises `Gone` if the server no longer has that version. It raises `WatchStalled` if
        nothing arrives for `STALL_S`, because a working server sends a bookmark every minute.
        """
        query = {
            "watch": "true",
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(watch_s),
            **_selectors(labels, fields),
        }
        request = _request("WATCH", kind, namespace, query=query)
        longest_s = watch_s + self._stall_s
        limit = aiohttp.ClientTimeout(longest_s, sock_connect=CONNECT_S, sock_read=self._stall_s)
        response = await self._open(request, limit)
        try:
            yield _events(request, response)
        finally:
            response.close()

    # -- writing

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = "", *, dry_run: bool = False
    ) -> KubernetesObject:
        """Create the object. In a dry run, only return what would be created.

        Raises `AlreadyThere` if it exists, perhaps because of an earlier request whose response was lost.
        """
        query = {"dryRun": "All"} if dry_run else {}
        return await self._ask(_request("POST", kind, namespace, query=query, body=body))

    async def create_subresource(
        self, kind: ResourceKind, name: str, subresource: str, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject:
        """Post to a subresource, such as a pod's eviction. An eviction can raise `EvictionBlocked`."""
        return await self._ask(_request("POST", kind, namespace, name, subresource, body=body))

    async def evict(self, namespace: str, pod: str, uid: str, version: str = "") -> None:
        """Evict the pod with this uid, but no other pod with its name. Raises `EvictionBlocked`.

        Raises `Conflict` if the pod's uid differs, or its resource version differs from `version`, if given.
        """
        conditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
            "deleteOptions": {"preconditions": conditions},
        }
        await self.create_subresource(PODS, pod, "eviction", body, namespace)

    async def replace(
        self, kind: ResourceKind, body: KubernetesObject, *, subresource: str = ""
    ) -> KubernetesObject:
        """Replace the object; raises `Conflict` if its resourceVersion differs from the one in `body`."""
        metadata = body["metadata"]
        namespace = metadata.get("namespace", "")
        return await self._ask(_request("PUT", kind, namespace, metadata["name"], subresource, body=body))

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        body: KubernetesObject | Sequence[KubernetesObject],
        namespace: str = "",
        *,
        how: PatchType = PatchType.MERGE,
        subresource: str = "",
        manager: str = "",
    ) -> KubernetesObject:
        """Change parts of the object, as the field manager `manager` if given, and return the whole object.

        If a merge patch contains metadata.resourceVersion or metadata.uid and the object's value differs,
        this raises `Conflict`. If a test in a JSON patch fails, this raises `InvalidObject`.
        """
        query = {"fieldManager": manager} if manager else {}
        request = _request(
            "PATCH", kind, namespace, name, subresource, query=query, body=body, content_type=how.value
        )
        return await self._ask(request)

    async def apply(
        self,
        kind: ResourceKind,
        body: KubernetesObject,
        manager: str,
        *,
        force: bool = False,
        subresource: str = "",
    ) -> KubernetesObject:
        """Apply `body` as the field manager `manager`, and remove this manager's fields that `body` omits.

        Unless `force` is set, raises `Conflict` if another manager owns a field and has set a different
        value.
        """
        metadata = body["metadata"]
        request = _request(
            "PATCH",
            kind,
            metadata.get("namespace", ""),
            metadata["name"],
            subresource,
            query={"fieldManager": manager, "force": str(force).lower()},
            body=body,
            content_type="application/apply-patch+yaml",  # JSON is valid YAML
        )
        return await self._ask(request)

    async def delete(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        version: str = "",
        grace_s: int | None = None,
        propagation: str = "",
    ) -> None:
        """Delete the object. Raises `Conflict` if its uid or resource version differs from the given one.

        This returns as soon as the deletion is accepted. The object may persist until its grace period has
        ended and its finalizers have run.
        """
        conditions = {"uid": uid, "resourceVersion": version}
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid or version:
            options["preconditions"] = {key: value for key, value in conditions.items() if value}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if propagation:
            options["propagationPolicy"] = propagation
        await self._ask(_request("DELETE", kind, namespace, name, body=options))

    # -- transport

    async def _ask(self, request: _Request, most_bytes: int = 0) -> KubernetesObject:
        limit = aiohttp.ClientTimeout(total=self._request_s, sock_connect=CONNECT_S)
        response = await self._open(request, limit)
        try:
            return _parse(request, await _read(request, response, most_bytes or ANSWER_BYTES))
        finally:
            response.release()

    async def _open(self, request: _Request, limit: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Return the response to `request`, with its body unread. Raise if the server refuses the request."""
        refused: str | None = None
        while True:
            header = await self._access.credentials.header()
            response = await self._send(request, header, limit)
            if response.status < 300:
                return response
            try:
                error = _error(request, response.status, await _read(request, response, ANSWER_BYTES))
                if isinstance(error, ApiError):
                    error.warnings = tuple(response.headers.getall("Warning", ())[:MAX_WARNINGS])
            finally:
                response.release()
            if response.status != 401 or refused is not None:
                raise error
            if not await self._access.credentials.renew(header):
                raise error
            refused = header

    async def _send(
        self, request: _Request, header: str, limit: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        headers = {"Authorization": header} if header else {}
        data = None
        if request.body is not None:
            data = json.dumps(request.body).encode()
            headers["Content-Type"] = request.content_type
        with _translating(request):
            return await self._session.request(
                "GET" if request.method == "WATCH" else request.method,
                self._access.url + request.path,
                params=request.query,
                data=data,
                headers=headers,
                timeout=limit,
                allow_redirects=False,  # a redirect would send the credentials elsewhere
                proxy=self._access.proxy or None,
                server_hostname=self._access.server_name or None,
            )


def _request(
    method: str,
    kind: ResourceKind,
    namespace: str = "",
    name: str = "",
    subresource: str = "",
    *,
    query: Mapping[str, str] | None = None,
    body: KubernetesObject | Sequence[KubernetesObject] | None = None,
    content_type: str = "application/json",
) -> _Request:
    what = f"{kind.plural}/{subresource}" if subresource else kind.plural
    where = "/".join(each for each in (namespace, name) if each)
    words = f"{method} {what} {where}".rstrip()
    return _Request(method, kind.path(namespace, name, subresource), words, query or {}, body, content_type)


def _segment(text: str) -> str:
    """Return `text` quoted as one segment of a path."""
    if text in ("", ".", ".."):
        raise ValueError(f"{text!r} is not the name of an object")
    return quote(text, safe="")


def _selectors(labels: str, fields: str) -> dict[str, str]:
    given = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in given.items() if value}


@contextmanager
def _translating(request: _Request) -> Iterator[None]:
    """Raise transport errors as `ServerUnreachable`."""
    try:
        yield
    except ServerUnreachable:
        raise
    except _NotSent as error:
        raise ServerUnreachable(request.words, str(error), sent=False) from None
    except aiohttp.SocketTimeoutError:  # only watches have this limit
        raise WatchStalled(request.words, "silent for too long") from None
    except aiohttp.ClientConnectorError as error:
        raise ServerUnreachable(request.words, str(error), sent=False) from None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
        text = str(error) or "no answer in time"
        raise ServerUnreachable(request.words, f"{text} ({type(error).__name__})") from None


async def _read(request: _Request, response: aiohttp.ClientResponse, most_bytes: int) -> bytearray:
    found = bytearray()
    with _translating(request):
        async for piece in response.content.iter_any():
            found += piece
            if len(found) > most_bytes:
                raise AnswerTooLong(request.words, f"the answer has more than {most_bytes} bytes")
    return found


def _parse(request: _Request, data: bytes | bytearray) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ServerUnreachable(request.words, "the answer is not a JSON object")
    return found


def _items(request: _Request, page: KubernetesObject) -> _Objects:
    """Return the objects of a list. Add the kind and API version, which only the list itself contains."""
    items, metadata = page.get("items"), page.get("metadata")
    if not (isinstance(metadata, dict) and "resourceVersion" in metadata):
        raise ServerUnreachable(request.words, "the answer is not a list of objects")
    if not all(_is_object(each) for each in items or []):
        raise ServerUnreachable(request.words, "the answer is not a list of objects")
    common = {"apiVersion": page.get("apiVersion"), "kind": str(page.get("kind", "")).removesuffix("List")}
    return [{**common, **each} for each in items or []]


def _is_object(found: object) -> bool:
    return isinstance(found, dict) and isinstance(found.get("metadata"), dict)


async def _events(request: _Request, response: aiohttp.ClientResponse) -> AsyncIterator[WatchEvent]:
    async for line in _lines(request, response):
        event = _parse(request, line)
        verb, found = event.get("type"), event.get("object")
        if verb == "ERROR" and isinstance(found, dict):
            code = found.get("code")
            raise refusal(request.words, code if isinstance(code, int) else 500, found)
        if not isinstance(verb, str) or not isinstance(found, dict) or not _is_object(found):
            raise ServerUnreachable(request.words, "an event is not a watch event")
        yield WatchEvent(verb, found)


async def _lines(request: _Request, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    pieces = response.content.iter_any()
    rest = bytearray()
    while True:
        with _translating(request):
            piece = await anext(pieces, None)
        if piece is None:
            break
        first, *others = piece.split(b"\n")
        rest += first
        for each in others:
            if rest.strip():
                yield bytes(rest)
            rest = bytearray(each)
        if len(rest) > LINE_BYTES:
            raise ServerUnreachable(request.words, f"an event has more than {LINE_BYTES} bytes")
    if rest.strip():
        raise ServerUnreachable(request.words, "the stream ended within an event")


def _error(request: _Request, status: int, data: bytearray) -> Exception:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):  # a proxy's own page, for example
        found = {"message": data[:MESSAGE_CHARS].decode(errors="replace")}
    return refusal(request.words, status, found)
