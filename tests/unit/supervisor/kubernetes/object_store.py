"""A simulated API server: objects with versions, conditional writes, and answers that can get lost."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import AlreadyThere, Conflict, NotFound, ServerUnreachable

HANG = "hang"  # the request is never answered, and has no effect
LOST_REQUEST = "lost request"  # no connection
LOST_ANSWER = "lost answer"  # it takes effect, and the connection breaks
HANG_AFTER = "hang after"  # it takes effect, and is never answered


class ObjectStore:
    """Each of `faults` happens to one of the next requests; None means an answer, as for all later ones."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.faults: Sequence[str | Exception | float | None] = ()
        self.writes: list[tuple[str, str]] = []  # verb and name
        self._version = 100

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> KubernetesObject:
        after = await self._meet()
        found = copy.deepcopy(self._found("GET", kind, name, namespace))
        await self._answer(after)
        return found

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject:
        after = await self._meet()
        name = body["metadata"]["name"]
        if (kind.plural, namespace, name) in self.objects:
            raise AlreadyThere(f"POST {kind.plural}", "already exists", 409)
        made = self._put("create", kind, namespace, name, body)
        await self._answer(after)
        return made

    async def replace(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject:
        after = await self._meet()
        metadata = body["metadata"]
        namespace = metadata.get("namespace", "")
        known = self._found("PUT", kind, metadata["name"], namespace)
        if metadata.get("resourceVersion") not in (None, known["metadata"]["resourceVersion"]):
            raise Conflict(f"PUT {kind.plural}", "the object has been modified", 409)
        made = self._put("replace", kind, namespace, metadata["name"], body)
        await self._answer(after)
        return made

    async def patch(
        self, kind: ResourceKind, name: str, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject:
        after = await self._meet()
        known = self._found("PATCH", kind, name, namespace)
        made = self._put("patch", kind, namespace, name, {**known, **body})
        await self._answer(after)
        return made

    def change(self, plural: str, namespace: str, name: str, spec: Mapping[str, Any]) -> None:
        """Change a spec as another client would."""
        known = self.objects[plural, namespace, name]
        known["spec"].update(spec)
        self._touch(known)

    def _found(self, method: str, kind: ResourceKind, name: str, namespace: str) -> dict[str, Any]:
        found = self.objects.get((kind.plural, namespace, name))
        if found is None:
            raise NotFound(f"{method} {kind.plural} {name}", "not found", 404)
        return found

    def _put(
        self, verb: str, kind: ResourceKind, namespace: str, name: str, body: KubernetesObject
    ) -> KubernetesObject:
        made = copy.deepcopy(dict(body))
        self._touch(made)
        self.objects[kind.plural, namespace, name] = made
        self.writes.append((verb, name))
        return copy.deepcopy(made)

    def _touch(self, found: dict[str, Any]) -> None:
        self._version += 1
        found["metadata"] = {**found["metadata"], "resourceVersion": str(self._version)}

    async def _meet(self) -> str:
        """Apply the fault of a request before it takes effect, and return the fault of its answer."""
        fault = self.faults[0] if self.faults else None
        self.faults = self.faults[1:]
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, float):
            await asyncio.sleep(fault)
        if fault == HANG:
            await asyncio.sleep(1e6)
        if fault == LOST_REQUEST:
            raise ServerUnreachable("request", "connection refused", sent=False)
        return fault if isinstance(fault, str) else ""

    async def _answer(self, fault: str) -> None:
        if fault == LOST_ANSWER:
            raise ServerUnreachable("request", "connection reset")
        if fault == HANG_AFTER:
            await asyncio.sleep(1e6)


class Line:
    """One client's connection to a store. While `cut` is set, it reaches nothing."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.cut = False

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> KubernetesObject:
        self._check()
        return await self._store.get(kind, name, namespace)

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject:
        self._check()
        return await self._store.create(kind, body, namespace)

    async def replace(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject:
        self._check()
        return await self._store.replace(kind, body)

    def _check(self) -> None:
        if self.cut:
            raise ServerUnreachable("request", "no route to host", sent=False)
