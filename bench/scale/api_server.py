"""A small API server in a separate process: paged lists, watches, conditional writes, token reviews.

It stores what the supervisor of a cluster reads and writes, checks what a real API server checks (resource
versions, tests in JSON patches, existing names), and answers over TLS. Every pod exists from the start.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import ssl
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from bench.harness.console import say
from bench.scale import cluster_objects
from bench.scale.cluster_objects import Json
from supervisor.admission.pod_layout import AUDIENCE

KEPT_EVENTS = 4096  # the events kept for each kind, for watches that resume; an older version is "gone"
BOOKMARK_S = 30.0
_POD = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"


class SimulatedRefusal(Exception):
    """The request is refused with this status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class ObjectStore:
    """All objects and the newest events. An event holds its object as JSON, because all watches repeat it."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}  # by plural, namespace and name
        self.version = 1000
        self.writes: dict[str, int] = {}  # by verb and plural
        self._events: dict[str, deque[tuple[int, bytes, Json]]] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def put(self, plural: str, found: Json, verb: str = "") -> bytes:
        """Store an object at a new version, notify the watches, and return the object as JSON."""
        metadata = found["metadata"]
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        kind = "MODIFIED" if key in self.objects else "ADDED"
        metadata.setdefault("uid", str(uuid4()))
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        self.objects[key] = found
        self.writes[f"{verb} {plural}"] = self.writes.get(f"{verb} {plural}", 0) + 1
        text = json.dumps(found, separators=(",", ":")).encode()
        event = b'{"type":"' + kind.encode() + b'","object":' + text + b"}\n"
        self._events.setdefault(plural, deque(maxlen=KEPT_EVENTS)).append((self.version, event, found))
        changed = self._changed.pop(plural, None)
        if changed is not None:
            changed.set()
        return text

    def get(self, plural: str, namespace: str, name: str) -> Json:
        found = self.objects.get((plural, namespace, name))
        if found is None:
            raise SimulatedRefusal(404, "NotFound")
        return found

    def selected(self, plural: str, namespace: str, labels: str, fields: str = "") -> list[Json]:
        return [
            found
            for (kind, where, _), found in self.objects.items()
            if kind == plural
            and namespace in ("", where)
            and is_selected(found, labels)
            and has_fields(found, fields)
        ]

    def events_after(self, plural: str, version: int) -> list[tuple[int, bytes, Json]]:
        """Return the events after `version`. Raises `SimulatedRefusal` if some are no longer stored."""
        kept = self._events.get(plural, ())
        if kept and len(kept) == KEPT_EVENTS and version < kept[0][0] - 1:
            raise SimulatedRefusal(410, "Expired")
        found: list[tuple[int, bytes, Json]] = []
        for event in reversed(kept):
            if event[0] <= version:
                break
            found.append(event)
        return found[::-1]

    def change_of(self, plural: str) -> asyncio.Event:
        """Return an event that is set at the next write to an object of this kind."""
        return self._changed.setdefault(plural, asyncio.Event())


class SimulatedApi:
    """The HTTP side of the API server."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._lists: dict[str, tuple[int, list[Json]]] = {}  # the unread rest of lists that are read in pages

    async def serve(self, request: web.Request) -> web.StreamResponse:
        plural, namespace, name, part = place_of(request.path)
        try:
            if request.method == "GET":
                if "watch" in request.query:
                    return await self._watch(request, plural)
                return self._read(request, plural, namespace, name)
            body = await request.json()
            return self._write(request, plural, namespace, name, part, body)
        except SimulatedRefusal as error:
            answer = {"kind": "Status", "code": error.status, "reason": error.reason, "message": error.reason}
            return web.json_response(answer, status=error.status)

    def _read(self, request: web.Request, plural: str, namespace: str, name: str) -> web.Response:
        if name:
            return web.json_response(self.store.get(plural, namespace, name))
        token = request.query.get("continue", "")
        if token:
            if token not in self._lists:
                raise SimulatedRefusal(410, "Expired")
            version, left = self._lists[token]  # kept, because a client may ask again with a lower limit
        else:
            version = self.store.version
            labels, fields = (request.query.get(name, "") for name in ("labelSelector", "fieldSelector"))
            left = self.store.selected(plural, namespace, labels, fields)
        limit = int(request.query.get("limit", "0")) or len(left)
        metadata: Json = {"resourceVersion": str(version)}
        if left[limit:]:
            metadata["continue"] = uuid4().hex
            self._lists[metadata["continue"]] = (version, left[limit:])
        return web.json_response(
            {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": left[:limit]}
        )

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        labels, fields = (request.query.get(name, "") for name in ("labelSelector", "fieldSelector"))
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + float(request.query.get("timeoutSeconds", "300"))
        self.store.events_after(plural, since)  # refuses a version that is too old
        response = web.StreamResponse()
        await response.prepare(request)
        while (left_s := ends_s - loop.time()) > 0:
            changed = self.store.change_of(plural)
            found = self.store.events_after(plural, since)
            if found:
                since = found[-1][0]
                shown = (e for e in found if is_selected(e[2], labels) and has_fields(e[2], fields))
                await response.write(b"".join(text for _, text, _ in shown))
                continue
            try:
                await asyncio.wait_for(changed.wait(), min(left_s, BOOKMARK_S))
            except asyncio.TimeoutError:
                since = self.store.version
                mark = {"metadata": {"resourceVersion": str(since)}}
                await response.write(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
        return response

    def _write(
        self, request: web.Request, plural: str, namespace: str, name: str, part: str, body: Any
    ) -> web.Response:
        store, method = self.store, request.method
        if plural == "tokenreviews":
            return web.json_response(self._reviewed(body["spec"]["token"]))
        if part == "eviction":
            store.writes["evictions"] = store.writes.get("evictions", 0) + 1
            return web.json_response({"kind": "Status"})
        if method == "POST":
            if (plural, namespace, body["metadata"]["name"]) in store.objects:
                raise SimulatedRefusal(409, "AlreadyExists")
            body["metadata"]["namespace"] = namespace
            if plural == "supervisions":
                body.pop("status", None)
            return _answer(store.put(plural, body, method), 201)
        found = store.get(plural, namespace, name)
        if method == "PUT":
            _check_version(found, body)
            body["metadata"]["uid"] = found["metadata"]["uid"]
            return _answer(store.put(plural, body, method))
        made = patched(found, body, request.content_type)
        kept, other = ("spec", "status") if part == "status" else ("status", "spec")
        made = {**made, kept: found.get(kept), other: made.get(other)}
        return _answer(store.put(plural, {k: v for k, v in made.items() if v is not None}, method))

    def _reviewed(self, token: str) -> Json:
        self.store.writes["token reviews"] = self.store.writes.get("token reviews", 0) + 1
        uid = cluster_objects.uid_of(token)
        if not uid:
            return {"status": {"error": "unknown token"}}
        user = {
            "username": f"system:serviceaccount:{cluster_objects.NAMESPACE}:default",
            "extra": {_POD: [f"pod-{uid}"], _POD_UID: [uid]},
        }
        return {"status": {"authenticated": True, "audiences": [AUDIENCE], "user": user}}


def place_of(path: str) -> tuple[str, str, str, str]:
    """Return the plural, the namespace, the name and the subresource in a path of the API."""
    words = path.strip("/").split("/")[2 if path.startswith("/api/") else 3 :]
    namespace = ""
    if words[0] == "namespaces" and len(words) > 2:
        namespace, words = words[1], words[2:]
    plural, name, part = (*words, "", "", "")[:3]
    return plural, namespace, name, part


def is_selected(found: Mapping[str, Any], selector: str) -> bool:
    """True if the object matches a label selector, such as `a=b` or `!a`. An empty selector matches all."""
    labels = found["metadata"].get("labels") or {}
    if selector.startswith("!"):
        return selector[1:] not in labels
    name, _, value = selector.partition("=")
    return not name or labels.get(name) == value


def has_fields(found: Mapping[str, Any], selector: str) -> bool:
    """True if the object matches a field selector such as `a.b=c,d.e!=f`. An empty selector matches all."""
    for each in filter(None, selector.split(",")):
        name, _, value = each.partition("=")
        held: Any = found
        for word in name.removesuffix("!").split("."):
            held = (held or {}).get(word)
        if ((held or "") == value) is name.endswith("!"):
            return False
    return True


def patched(found: Json, change: Any, how: str) -> Json:
    """Return a changed copy of `found`. Raises `SimulatedRefusal` if a condition of the patch is false."""
    if how == "application/json-patch+json":
        return _operated(found, change)
    _check_version(found, change)
    made: Json = merged(found, change)
    made["metadata"] = dict(made["metadata"])
    return made


def merged(before: Any, change: Any) -> Any:
    """Return `before` after a merge patch (RFC 7386); unchanged parts are shared."""
    if not isinstance(change, Mapping):
        return change
    made = dict(before) if isinstance(before, Mapping) else {}
    for name, value in change.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), value)
    return made


def _operated(found: Json, operations: list[Json]) -> Json:
    """Apply a JSON patch that tests and adds members of objects, at most two levels deep."""
    made = {**found, "metadata": dict(found["metadata"])}
    copied: set[str] = set()
    for each in operations:
        first, _, last = each["path"].strip("/").partition("/")
        if first not in made:
            raise SimulatedRefusal(422, "Invalid")
        if first not in copied:
            made[first] = dict(made[first])
            copied.add(first)
        if each["op"] == "test":
            if made[first].get(last) != each["value"]:
                raise SimulatedRefusal(422, "Invalid")
        elif each["op"] == "add":
            made[first][last] = each["value"]
        else:
            raise SimulatedRefusal(400, "BadRequest")
    return made


def _check_version(found: Json, body: Json) -> None:
    asked = (body.get("metadata") or {}).get("resourceVersion")
    if asked not in (None, found["metadata"]["resourceVersion"]):
        raise SimulatedRefusal(409, "Conflict")


def _answer(text: bytes, status: int = 200) -> web.Response:
    return web.Response(body=text, status=status, content_type="application/json")


async def _run(options: argparse.Namespace) -> None:
    store = ObjectStore()
    for owner, pods in cluster_objects.workloads(options.jobs, options.members, options.nproc):
        store.put("jobs", owner)
        for pod in pods:
            store.put("pods", pod)
    store.writes.clear()
    app = web.Application(client_max_size=4 << 20)

    async def writes(_: web.Request) -> web.Response:
        return web.json_response(store.writes)

    app.router.add_get("/bench/writes", writes)
    app.router.add_route("*", "/{path:.*}", SimulatedApi(store).serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.certificate)
    await web.TCPSite(runner, "127.0.0.1", options.port, ssl_context=context).start()
    say("ready")
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("port", "jobs", "members", "nproc"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--certificate", type=Path, required=True, help="private key and certificate, PEM")
    gc.disable()  # collections, which take 0.2 s for all objects, would count as the supervisor's time
    asyncio.run(_run(parser.parse_args(sys.argv[1:])))


if __name__ == "__main__":
    main()
