"""Mirror a collection of the API server, despite lost connections and lost history.

A list returns the collection at one version, and a watch delivers the changes after that version. When a
watch ends, the next one resumes at the last version delivered. If the server no longer has that version, or
stops sending, the mirror lists the collection again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import NamedTuple, NoReturn, Protocol

from supervisor.kubernetes.client import KubernetesObject, Listing, ResourceKind, WatchEvent
from supervisor.kubernetes.errors import ApiError, Gone, ServerUnreachable, WatchStalled

log = logging.getLogger(__name__)

# the pause after the second failure in a row, doubled after each later one, up to `MAX_BACKOFF_S`
BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
# If the server ends a watch without events sooner than this, the watch is treated as a failure, so retries do
# not spin.
SHORT_S = 5.0


class ObjectName(NamedTuple):
    """The name of an object. `namespace` is "" for cluster-scoped objects."""

    namespace: str
    name: str


Changed = Callable[[ObjectName, KubernetesObject | None, KubernetesObject | None], None]


class Watchable(Protocol):
    """The methods of `ApiServer` that a mirror needs."""

    async def list(
        self,
        kind: ResourceKind,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        prune: Callable[[KubernetesObject], KubernetesObject] = ...,
    ) -> Listing: ...

    def watch(
        self, kind: ResourceKind, since: str, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]: ...


def drop_bookkeeping(found: KubernetesObject) -> KubernetesObject:
    """Return the object without fields that only the API server and kubectl need, often half of its size."""
    metadata = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations and _LAST_APPLIED in annotations:
        metadata["annotations"] = {key: value for key, value in annotations.items() if key != _LAST_APPLIED}
    return {**found, "metadata": metadata}


_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def name_of(found: KubernetesObject) -> ObjectName:
    metadata = found["metadata"]
    return ObjectName(metadata.get("namespace", ""), metadata["name"])


class Mirror:
    """Mirrors the objects of one kind that match the selectors, in one namespace or in all.

    `changed(name, old, new)` is called for each change, after `objects` reflects it. `old` is None for a new
    object, and `new` is None for a deleted one. `changed` must not block or raise. `objects` contains each
    object as `prune` returned it. Do not modify these objects. `listing` is called before each list. The
    objects of the list replace all earlier ones.
    """

    def __init__(
        self,
        server: Watchable,
        kind: ResourceKind,
        changed: Changed = lambda name, old, new: None,
        *,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        prune: Callable[[KubernetesObject], KubernetesObject] = drop_bookkeeping,
        listing: Callable[[], None] = lambda: None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.synced = asyncio.Event()  # set when `objects` is complete for the first time
        self.problem = ""  # why the mirror may be out of date; "" while it is up to date
        self._server, self._kind, self._namespace = server, kind, namespace
        self._labels, self._fields = labels, fields
        self._changed, self._prune, self._listing, self._jitter = changed, prune, listing, jitter
        self._objects: dict[ObjectName, KubernetesObject] = {}
        self.objects: Mapping[ObjectName, KubernetesObject] = MappingProxyType(self._objects)
        self._since: str | None = None
        self._failures = 0
        self._heard_s = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the server last sent anything. The mirror is not older than this.

        Without changes, the server sends a bookmark every minute, so values up to a minute are normal.
        """
        return asyncio.get_running_loop().time() - self._heard_s if self.synced.is_set() else float("inf")

    async def run(self) -> NoReturn:
        """Keep the mirror up to date. Never returns. Raises only what `changed` or `prune` raises."""
        while True:
            try:
                await self._follow()
            except (Gone, WatchStalled) as error:
                self._since = None
                self._note(error)
            except (ApiError, ServerUnreachable) as error:
                self._note(error)
            await self._back_off()

    async def _follow(self) -> None:
        """List if necessary, then apply the events of one watch. Raises what `list` and `watch` raise."""
        if self._since is None:
            self._listing()
            listing = await self._server.list(
                self._kind, self._namespace, labels=self._labels, fields=self._fields, prune=self._prune
            )
            self._replace(listing)
        assert self._since is not None
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        watch = self._server.watch(
            self._kind, self._since, self._namespace, labels=self._labels, fields=self._fields
        )
        async with watch as events:
            self._heard(self._failures)
            async for event in events:
                self._heard()
                self._apply(event)
        if loop.time() - begun_s >= SHORT_S:
            self._heard()
        else:
            self._failures += 1

    def _replace(self, listing: Listing) -> None:
        """Replace the contents. The list's version can be lower, as after a restore from a backup."""
        found = {name_of(each): each for each in listing.objects}
        before = dict(self._objects)
        self._objects.clear()
        self._objects.update(found)
        self._since = listing.version
        self._heard(self._failures)
        for name in before.keys() - found.keys():
            self._changed(name, before[name], None)
        for name, new in found.items():
            old = before.get(name)
            if old is None or _version(old) != _version(new):
                self._changed(name, old, new)
        self.synced.set()

    def _apply(self, event: WatchEvent) -> None:
        version = _version(event.object)
        if not version or _is_known(version, self._since or ""):
            return
        self._since = version
        if event.verb == "BOOKMARK":
            return
        name = name_of(event.object)
        old = self._objects.get(name)
        if event.verb == "DELETED":
            if self._objects.pop(name, None) is not None:
                self._changed(name, old, None)
            return
        new = self._prune(event.object)
        self._objects[name] = new
        self._changed(name, old, new)

    def _heard(self, failures: int = 0) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._failures = failures
        self.problem = ""

    def _note(self, error: Exception) -> None:
        """Log an error unless it equals the previous one, because an error can recur for hours."""
        self._failures += 1
        if str(error) != self.problem:
            level = logging.INFO if isinstance(error, Gone) else logging.WARNING
            log.log(level, "watch interrupted", extra={"kind": self._kind.plural, "error": str(error)})
        self.problem = str(error)

    async def _back_off(self) -> None:
        """Wait before the next attempt, unless the last attempt succeeded or was the first to fail."""
        if self._failures <= 1:
            return
        delay_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(self._failures - 2, 10))
        await asyncio.sleep(delay_s * (0.5 + self._jitter() / 2))


def _version(found: KubernetesObject) -> str:
    return str(found["metadata"].get("resourceVersion", ""))


def _is_known(version: str, since: str) -> bool:
    """Return True if a mirror at version `since` already contains the write with this `version`.

    All objects of a kind share one counter of writes, and a watch delivers writes in the order of this
    counter.
    """
    return version.isdecimal() and since.isdecimal() and int(version) <= int(since)
