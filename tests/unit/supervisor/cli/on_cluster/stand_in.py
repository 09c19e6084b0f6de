"""A stand-in for an API server on this machine, in a separate thread, with the objects of a test."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.unit.supervisor.status_samples import incident, status

SUPERVISIONS = "/apis/holdfast.dev/v1alpha1"
CONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "%s"}}]
users: [{name: u, user: {token: secret}}]
contexts:
- {name: first, context: {cluster: c, user: u, namespace: research}}
- {name: second, context: {cluster: c, user: u}}
current-context: first
"""


class ApiStandIn:
    """The server's memory: objects by their path. Requests change it, and so does the test between them.

    Attributes:
        denied: Pairs of a verb and a plural that the user has no right to.
        unknown: Plurals that the server does not know.
        changed: Called with each patched object, to act on it as the supervisor does.
        read: Called with each object before it is sent.
        after_read: Called with each object after the answer was created.
        refusal: The status of the answer to every request, if not 0.
    """

    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[str, dict[str, Any]] = {}
        self.denied: set[tuple[str, str]] = set()
        self.unknown: set[str] = set()
        self.changed: Callable[[dict[str, Any]], object] = lambda _: None
        self.read: Callable[[dict[str, Any]], object] = lambda _: None
        self.after_read: Callable[[dict[str, Any]], object] = lambda _: None
        self.refusal = 0
        self.requests: list[tuple[str, str, Any]] = []
        self._version = 10

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Add an object at a path such as /api/v1/namespaces/research/pods/gpt-0."""
        parts = path.split("/")
        metadata = {"name": parts[-1], **({"namespace": parts[-3]} if parts[-4] == "namespaces" else {})}
        body["metadata"] = {**metadata, "uid": f"uid-{parts[-1]}", **body.get("metadata", {})}
        self.objects[path] = body
        self.touch(body)
        return body

    def touch(self, found: dict[str, Any]) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)

    def job(self, name: str = "gpt", namespace: str = "research", **changed: Any) -> dict[str, Any]:
        """Add a supervised job."""
        path = f"{SUPERVISIONS}/namespaces/{namespace}/supervisions/{name}"
        return self.put(path, supervision(**changed))

    # -- requests

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, body))
        plural, found = self._find(request.path)
        if self.refusal:
            return _failure(self.refusal, "no")
        if plural in self.unknown:
            return _failure(404, "404 page not found")
        verb = {"GET": "list" if found is None else "get", "POST": "create"}.get(request.method, "patch")
        if (verb, plural) in self.denied or ("*", plural) in self.denied:
            return _failure(403, self._denial(verb, plural, request.path))
        if request.method == "POST":
            allowed = ("patch", "supervisions") not in self.denied
            return web.json_response({"status": {"allowed": allowed, "userInfo": {"username": "eva"}}})
        if found is None:
            return self._list(request.path, request.query.get("labelSelector", ""))
        if not found:
            return _failure(404, f'{plural} "{request.path.rpartition("/")[2]}" not found')
        if request.method == "PATCH":
            return self._patch(found, body)
        self.read(found)
        answer = web.json_response(found)
        self.after_read(found)
        return answer

    def _find(self, path: str) -> tuple[str, dict[str, Any] | None]:
        """Return the plural in a path, and the object; {} if there is none, None for a collection."""
        parts = path.split("/")[3 if path.startswith("/api/") else 4 :]
        if parts[0] == "namespaces" and len(parts) > 2:
            parts = parts[2:]
        return parts[0], self.objects.get(path, {}) if len(parts) > 1 else None

    def _list(self, path: str, label: str) -> web.Response:
        """Return the objects of a collection. With `label`, return only those that have that label."""
        head, _, plural = path.rpartition("/")
        items = [
            each
            for place, each in self.objects.items()
            if place.startswith(head)
            and place.split("/")[-2] == plural
            and (not label or label in each["metadata"].get("labels", {}))
        ]
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})

    def _patch(self, found: dict[str, Any], body: Any) -> web.Response:
        version = (body.get("metadata") or {}).get("resourceVersion")
        if version not in (None, found["metadata"]["resourceVersion"]):
            return _failure(409, "the object has been modified")
        found["spec"] = {**found.get("spec", {}), **body.get("spec", {})}
        notes = (body.get("metadata") or {}).get("annotations") or {}
        found["metadata"]["annotations"] = {**found["metadata"].get("annotations", {}), **notes}
        self.touch(found)
        self.changed(found)
        return web.json_response(found)

    def _denial(self, verb: str, plural: str, path: str) -> str:
        _, inside, place = path.partition("/namespaces/")
        where = f'in the namespace "{place.split("/")[0]}"' if inside else "at the cluster scope"
        return f'{plural} is forbidden: User "eva" cannot {verb} resource "{plural}" in API group "x" {where}'


def _failure(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def supervision(**changed: Any) -> dict[str, Any]:
    """Return a Supervision without metadata; `changed` are fields of its status, or `spec`."""
    spec = {"members": 2, "nprocPerNode": 1, "owner": {"kind": "PyTorchJob", "uid": "uid-owner"}}
    values = {
        "phase": "running",
        "generation": 3,
        "step": 1234,
        "ettr": "99.2%",
        "incidents": 1,
        "recent": [incident()],
        "view": status(run="c879433c", updated=time.time()),
        **changed,
    }
    spec |= values.pop("spec", {})
    if isinstance(values["view"], dict):
        values["view"] = json.dumps(values["view"])
    created = {"creationTimestamp": "2026-11-25T03:55:40Z"}
    return {"metadata": created, "spec": spec, "status": {k: v for k, v in values.items() if v is not None}}


@contextmanager
def standing_in() -> Iterator[ApiStandIn]:
    """Serve a stand-in that is empty at first."""
    made, loop = ApiStandIn(), asyncio.new_event_loop()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    server = TestServer(app, loop=loop)
    loop.run_until_complete(server.start_server())
    made.url = str(server.make_url("")).rstrip("/")
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(server.close())
        loop.close()
