"""An API server on a real socket, with versions, patches, watches, and answers that get lost."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.scale.api_server import has_fields, merged
from supervisor.kubernetes.access import ServerAccess
from supervisor.kubernetes.client import ApiServer

Json = dict[str, Any]
Fault = Callable[[], object] | int  # called before the request takes effect, or a refusal's status
LOST_ANSWER = -1  # the request takes effect, and the connection breaks
NEVER = -2  # the request takes effect, and is never answered
LIMIT_S = 20.0


class NoToken:
    """Credentials without a token."""

    async def header(self) -> str:
        return ""

    async def renew(self, refused: str) -> bool:
        return False


async def accept_the_rest() -> None:
    """Make servers accept the connections that clients gave up, so that closing a server closes them."""
    for _ in range(10):
        await asyncio.sleep(0)


class ServedObjects:
    """The objects, by plural, namespace and name. All have the subresource `status`, like Supervisions.

    Each of `faults` happens to one of the next requests that write; None means no fault.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.events: list[Json] = []
        self.evictions: list[Json] = []
        self.budget = ""  # why a disruption budget refuses all evictions
        self.tokens: dict[str, Json] = {}  # the status of a token review, by token
        self.faults: list[Fault | None] = []
        self.broken: dict[str, int] = {}  # by plural: the status of every answer
        self.refused = 0  # answers for these objects, and for objects that do not exist
        self.requests: list[str] = []  # the requests that wrote something: verb, plural and name
        self.dry_runs: list[Json] = []  # the objects whose creation was only tried
        self.try_creation: Callable[[Json], web.Response] = web.json_response  # answers those requests
        self._version = 100
        self._changed = asyncio.Event()
        self._log: list[tuple[int, str, str, Json]] = []  # version, plural, verb, object

    # -- what a test does

    def put(self, plural: str, found: Json) -> Json:
        """Store an object as another client would, and return it."""
        metadata = found["metadata"]
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        verb = "MODIFIED" if key in self.objects else "ADDED"
        metadata.setdefault("uid", str(uuid4()))
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.objects[key] = found
        self._tell(plural, verb, found)
        return found

    def remove(self, plural: str, namespace: str, name: str) -> None:
        found = self.objects.pop((plural, namespace, name))
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self._tell(plural, "DELETED", found)

    def supervision(self, name: str = "llama", namespace: str = "team") -> Json:
        return self.objects["supervisions", namespace, name]

    def change(self, name: str = "llama", namespace: str = "team", **parts: Json) -> None:
        """Change parts of a Supervision as another client would. None removes a value."""
        found = self.supervision(name, namespace)
        for part, values in parts.items():
            found[part] = merged(found.get(part, {}), values)
        self.put("supervisions", found)

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds. It is checked at every change."""

        async def wait() -> None:
            while not condition():
                await self._changed.wait()

        try:
            await asyncio.wait_for(wait(), LIMIT_S)
        except asyncio.TimeoutError:
            raise AssertionError(f"not within {LIMIT_S:g} s: {self.objects}") from None

    @asynccontextmanager
    async def serving(self, request_s: float = 10.0) -> AsyncIterator[ApiServer]:
        """Serve the objects, and yield a client."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        async with TestServer(app) as server:
            access = ServerAccess(str(server.make_url("")).rstrip("/"), NoToken())
            async with ApiServer(access, request_s) as api:
                yield api
            await accept_the_rest()

    # -- the server

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        plural, namespace, name, part = place_of(request.path)
        if plural in self.broken:
            self.refused += 1
            self._wake()
            return status(self.broken[plural], "Broken")
        if request.method == "GET":
            if "watch" in request.query:
                return await self._watch(request, plural)
            return self._read(request, plural, namespace, name)
        body = json.loads(await request.read() or b"{}")
        fault = self.faults.pop(0) if self.faults else None
        if callable(fault):
            fault()
        elif fault is not None and fault > 0:
            return status(fault, "Refused")
        answer = self._write(request, plural, namespace, name, part, body)
        if fault == NEVER:
            await asyncio.sleep(LIMIT_S)
        if fault in (LOST_ANSWER, NEVER):
            assert request.transport is not None
            request.transport.abort()
        return answer

    def _read(self, request: web.Request, plural: str, namespace: str, name: str) -> web.Response:
        if name:
            found = self.objects.get((plural, namespace, name))
            if found is None:
                self.refused += 1
                self._wake()
                return status(404, "NotFound")
            return web.json_response(found)
        kept = [
            found
            for key, found in self.objects.items()
            if key[0] == plural and (not namespace or key[1] == namespace) and _is_selected(found, request)
        ]
        start, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        metadata = {"resourceVersion": str(self._version)}
        if kept[start + limit :]:
            metadata["continue"] = str(start + limit)
        return web.json_response({"metadata": metadata, "items": kept[start : start + limit]})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        since = int(request.query["resourceVersion"])
        shown: set[str] = {
            found["metadata"]["uid"]
            for version, kind, _, found in self._log
            if version <= since and kind == plural and _is_selected(found, request)
        }
        while True:
            for version, kind, verb, found in tuple(self._log):
                if version <= since or kind != plural:
                    continue
                is_selected, uid = _is_selected(found, request), found["metadata"]["uid"]
                if is_selected or uid in shown:  # an object that is no longer selected seems to be deleted
                    verb = verb if is_selected else "DELETED"
                    await response.write(json.dumps({"type": verb, "object": found}).encode() + b"\n")
                    since = version
                    (shown.add if is_selected else shown.discard)(uid)
            await self._changed.wait()

    def _write(
        self, request: web.Request, plural: str, namespace: str, name: str, part: str, body: Any
    ) -> web.Response:
        if plural == "tokenreviews":
            return web.json_response({"status": self.tokens.get(body["spec"]["token"], {})})
        if plural == "events":
            self.events.append(body)
            self._wake()
            return web.json_response(body)
        if part == "eviction" and self.budget:
            causes = {"causes": [{"reason": "DisruptionBudget", "message": self.budget}]}
            answer = {"kind": "Status", "code": 429, "message": self.budget, "details": causes}
            return web.json_response(answer, status=429)
        if part == "eviction":
            self.evictions.append(body)
            self._wake()
            return web.json_response({"kind": "Status"})
        if request.method == "POST":
            if request.query.get("dryRun") == "All":
                self.dry_runs.append(copy.deepcopy(body))
                return self.try_creation(body)
            return self._create(plural, namespace, body)
        if request.method == "DELETE":
            return self._delete(plural, namespace, name, body)
        assert request.method == "PATCH"
        found = self.objects.get((plural, namespace, name))
        if found is None:
            return status(404, "NotFound")
        try:
            made = _patched(found, body, request.content_type)
            made = made if plural == "mutatingwebhookconfigurations" else _only_part(found, made, part)
        except PatchRefused as error:
            return status(error.code, "Conflict" if error.code == 409 else "Invalid")
        self.requests.append(f"PATCH {plural} {name}")
        return web.json_response(self.put(plural, made))

    def _create(self, plural: str, namespace: str, body: Json) -> web.Response:
        name = body["metadata"]["name"]
        if (plural, namespace, name) in self.objects:
            return status(409, "AlreadyExists")
        body.pop("status", None)  # a kind with the subresource
        self.requests.append(f"POST {plural} {name}")
        return web.json_response(self.put(plural, body), status=201)

    def _delete(self, plural: str, namespace: str, name: str, body: Json) -> web.Response:
        found = self.objects.get((plural, namespace, name))
        if found is None:
            return status(404, "NotFound")
        uid = (body.get("preconditions") or {}).get("uid")
        if uid not in (None, found["metadata"]["uid"]):
            return status(409, "Conflict")
        self.requests.append(f"DELETE {plural} {name}")
        self.remove(plural, namespace, name)
        return web.json_response({"kind": "Status"})

    def _tell(self, plural: str, verb: str, found: Json) -> None:
        self._log.append((self._version, plural, verb, copy.deepcopy(found)))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class PatchRefused(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def place_of(path: str) -> tuple[str, str, str, str]:
    """Return the plural, the namespace, the name and the subresource in a path of the API."""
    words = path.strip("/").split("/")[2 if path.startswith("/api/") else 3 :]
    namespace = ""
    if words[0] == "namespaces" and len(words) > 2:
        namespace, words = words[1], words[2:]
    plural, name, part = (*words, "", "", "")[:3]
    return plural, namespace, name, part


def status(code: int, reason: str) -> web.Response:
    answer = {"kind": "Status", "code": code, "reason": reason, "message": f"said the server: {reason}"}
    return web.json_response(answer, status=code)


def _patched(found: Json, body: Any, how: str) -> Json:
    made = copy.deepcopy(found)
    if how == "application/json-patch+json":
        _apply(made, body)
    else:
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, found["metadata"]["resourceVersion"]):
            raise PatchRefused(409)
        made = merged(made, body)
    return made


def _only_part(found: Json, made: Json, part: str) -> Json:
    """Return `found` with the status of `made` if `part` is the status, otherwise with the spec of `made`."""
    own, others = ("status", "spec") if part == "status" else ("spec", "status")
    kept = {key: value for key, value in found.items() if key not in (own, others)}
    return {**kept, **{key: made[key] for key in (own,) if key in made}, **_only(found, others)}


def _only(found: Json, name: str) -> Json:
    return {name: found[name]} if name in found else {}


def _apply(made: Any, operations: list[Json]) -> None:
    for each in operations:
        *way, last = each["path"].strip("/").split("/")
        holder = made
        for word in way:
            key = int(word) if isinstance(holder, list) else word
            if isinstance(holder, dict) and key not in holder:
                raise PatchRefused(422)
            holder = holder[key]
        if each["op"] == "test":
            if last not in holder or holder[last] != each["value"]:
                raise PatchRefused(422)
        elif each["op"] == "add":
            holder[last] = each["value"]
        else:
            assert each["op"] == "remove"
            if last not in holder:
                raise PatchRefused(422)
            del holder[last]


def _is_selected(found: Json, request: web.Request) -> bool:
    """True if the object matches the field selector, and a label selector of the form `a=b` or `!a`."""
    if not has_fields(found, request.query.get("fieldSelector", "")):
        return False
    selector = request.query.get("labelSelector", "")
    labels = found["metadata"].get("labels") or {}
    if selector.startswith("!"):
        return selector[1:] not in labels
    name, _, value = selector.partition("=")
    return not name or labels.get(name) == value
