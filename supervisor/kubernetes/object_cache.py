"""Cache objects that are looked up by name, and refresh them in the background.

A lookup never waits. It returns the content as last read, however old that is. If the content is unchanged,
it returns the same object as before. If the object is unknown or its content is old, the lookup also starts a
read. A failure never evicts an object: an API server that has just started refuses all requests until it has
loaded its access rules, and the API of a single kind can hang.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.process import event_loop
from supervisor.kubernetes.client import ApiServer, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import ApiError

log = logging.getLogger(__name__)

FRESH_S = 30.0  # after this time, an object is read again
RETRY_S = 5.0  # the pause after a failure, doubled for each subsequent failure, up to `FRESH_S`
UNUSED_S = 60.0  # an object that was not looked up for this long is dropped
PER_KIND = 4  # concurrent requests per kind, so that a kind whose API hangs does not delay the others
MAX_OBJECTS = 10_000
NAMESPACE_OBJECTS = 2_500  # so that one namespace leaves room for others
NAMESPACE_SIZE = 16 << 20  # the limit for all objects of one namespace, as `weigh` measures them


class ObjectIdentity(Protocol):
    """Identifies an object. Implementations must be hashable."""

    @property
    def api_version(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...


class _NoRoom(Exception):
    """The objects of a namespace take too much memory."""


@dataclass(slots=True)
class _Entry:
    content: KubernetesObject | None = None  # as last read
    size: int = 0  # the size of `content`
    refusal: str = ""  # why the API server refused the last read; "" if it did not
    failures: int = 0  # the number of failures in a row
    due_s: float = 0.0
    used_s: float = 0.0
    is_reading: bool = False


@dataclass(slots=True)
class _Kind:
    """The requests for one kind of object; all of them pause while its API is unreachable."""

    waiting: dict[ObjectIdentity, None] = field(default_factory=dict)  # an ordered set
    reading: int = 0
    failures: int = 0  # the number of failures in a row
    paused_until_s: float = 0.0


class ObjectCache:
    """Caches objects. Supports kinds whose plural is the kind's name in lower case followed by an s."""

    def __init__(
        self,
        server: ApiServer,
        now_s: Callable[[], float],
        changed: Callable[[], None] = lambda: None,
        prune: Callable[[KubernetesObject], KubernetesObject] = lambda found: found,
        weigh: Callable[[KubernetesObject], int] = lambda found: 0,
    ) -> None:
        """`changed` is called when a lookup or `refusal` returns something new.

        The cache keeps each object as `prune` returns it; `prune` must keep the uid. `weigh` returns
        the size of a kept object. The total size is limited for each namespace.
        """
        self._server, self._now_s, self._changed = server, now_s, changed
        self._prune, self._weigh = prune, weigh
        self._numbers: Counter[str] = Counter()  # the number of entries, by namespace
        self._sizes: Counter[str] = Counter()  # the size of all entries, by namespace
        self._entries: dict[ObjectIdentity, _Entry] = {}
        self._kinds: dict[tuple[str, str], _Kind] = {}  # by API group and kind, for all versions
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_full = False

    def find(self, identity: ObjectIdentity) -> KubernetesObject | None:
        """Return the object as last read, or None if it was never read. Start a read if one is due.

        An object with the same name but a different uid is returned only if the right object was never read.
        """
        now_s = self._now_s()
        entry = self._entries.get(identity)
        if entry is None:
            if len(self._entries) >= MAX_OBJECTS:
                if not self._is_full:
                    log.error("too many objects: the others are not read", extra={"most": MAX_OBJECTS})
                self._is_full = True
                return None
            self._is_full = False
            if self._numbers[identity.namespace] >= NAMESPACE_OBJECTS:
                return None
            self._numbers[identity.namespace] += 1
            entry = self._entries[identity] = _Entry()
        entry.used_s = now_s
        if now_s >= entry.due_s and not entry.is_reading:
            kind = self._kind(identity)
            kind.waiting[identity] = None
            self._begin(kind)
        return entry.content

    def refusal(self, identity: ObjectIdentity) -> str:
        """Return why the API server or a limit prevents the object from being read; "" if neither does."""
        entry = self._entries.get(identity)
        if entry is None and self._numbers[identity.namespace] >= NAMESPACE_OBJECTS:
            return f"the pods of its namespace have more than {NAMESPACE_OBJECTS} owners"
        return entry.refusal if entry is not None else ""

    def forget_unused(self) -> None:
        """Drop the objects that were not looked up for `UNUSED_S`."""
        least_s = self._now_s() - UNUSED_S
        self._entries = {key: each for key, each in self._entries.items() if each.used_s >= least_s}
        self._numbers, self._sizes = Counter(), Counter()
        for key, each in self._entries.items():
            self._numbers[key.namespace] += 1
            self._sizes[key.namespace] += each.size

    async def close(self) -> None:
        """Cancel all requests, and wait until they have ended."""
        for kind in self._kinds.values():
            kind.waiting.clear()
        await event_loop.end(self._tasks)

    def _kind(self, identity: ObjectIdentity) -> _Kind:
        group = identity.api_version.rpartition("/")[0]
        return self._kinds.setdefault((group, identity.kind), _Kind())

    def _begin(self, kind: _Kind) -> None:
        """Begin waiting requests, up to the kind's limit."""
        while kind.waiting and kind.reading < PER_KIND and self._now_s() >= kind.paused_until_s:
            identity = next(iter(kind.waiting))
            del kind.waiting[identity]
            entry = self._entries.get(identity)
            if entry is None or entry.is_reading:
                continue
            entry.is_reading = True
            kind.reading += 1
            task = asyncio.create_task(self._read(kind, identity, entry), name=f"read {identity}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(self, kind: _Kind, identity: ObjectIdentity, entry: _Entry) -> None:
        before = (entry.content, entry.refusal)
        group, _, version = identity.api_version.rpartition("/")
        resource = ResourceKind(group, version, f"{identity.kind.lower()}s")
        try:
            found = self._prune(await self._server.get(resource, identity.name, identity.namespace))
            size = self._weigh(found)
            self._check_room(identity.namespace, size, entry.size)
        except _NoRoom as error:
            kind.failures = 0
            self._failed(entry, identity, str(error))
            entry.refusal = str(error)
        except ApiError as error:
            kind.failures = 0
            self._failed(entry, identity, str(error))
            entry.refusal = str(error)
        except (OSError, ValueError) as error:
            self._failed(entry, identity, str(error))
            if self._now_s() >= kind.paused_until_s:  # concurrent failures count only once
                kind.failures += 1
                kind.paused_until_s = self._now_s() + _pause_s(kind.failures)
        else:
            kind.failures = entry.failures = 0
            entry.due_s = self._now_s() + FRESH_S
            entry.refusal = ""
            is_right = _uid(found) == identity.uid
            if is_right or entry.content is None or _uid(entry.content) != identity.uid:
                self._sizes[identity.namespace] += size - entry.size
                entry.size = size
                # What callers have derived from an equal object remains valid.
                if not _is_same(found, entry.content):
                    entry.content = found
        finally:
            entry.is_reading = False
            kind.reading -= 1
        self._begin(kind)
        if before != (entry.content, entry.refusal):
            self._changed()

    def _check_room(self, namespace: str, size: int, before: int) -> None:
        """Raise `_NoRoom` if an object that grows from `before` to `size` makes its namespace too large."""
        if size and self._sizes[namespace] - before + size > NAMESPACE_SIZE:
            raise _NoRoom(f"the owners of its namespace take more than {NAMESPACE_SIZE >> 20} MiB")

    def _failed(self, entry: _Entry, identity: ObjectIdentity, why: str) -> None:
        if not entry.failures:
            log.warning("object not read", extra={"object": str(identity), "error": why})
        entry.failures += 1
        entry.due_s = self._now_s() + _pause_s(entry.failures)


def _is_same(one: KubernetesObject, other: KubernetesObject | None) -> bool:
    """Return True if both are the same as JSON, where true is not 1."""
    return one == other and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _uid(found: KubernetesObject) -> object:
    metadata = found.get("metadata")
    return metadata.get("uid") if isinstance(metadata, Mapping) else None


def _pause_s(failures: int) -> float:
    pause_s: float = RETRY_S * 2.0 ** min(failures - 1, 8)
    return min(pause_s, FRESH_S)
