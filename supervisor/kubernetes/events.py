"""Write Kubernetes Events about objects, for `kubectl describe` and `kubectl get events`.

The events use the core API, because every version of kubectl shows the count of such events. If a reason
recurs for the same object within `SAME_S`, the existing event gets a higher count and the newest message. A
recurring fault therefore does not fill the server with events.

Users can cause many events, for example with thousands of pods. The namespaces therefore take turns. If too
many events wait, the recorder drops events of the namespace that has the most of them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Literal, NoReturn, Protocol, TypeAlias

from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import AlreadyThere, ApiError, NotFound

log = logging.getLogger(__name__)

EVENTS = ResourceKind("", "v1", "events")
EventType = Literal["Normal", "Warning"]
SAME_S = 600.0
WAITING = 1000  # the maximum number of waiting events; each additional one displaces another
REMEMBERED = 4096  # the maximum number of written events whose count may still grow
RETRY_S = 5.0
MESSAGE_CHARS = 1024  # the API's limit
_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """The object that an event is about. `namespace` is "" for cluster-scoped objects."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    @staticmethod
    def of(found: KubernetesObject) -> ObjectReference:
        metadata = found["metadata"]
        namespace = metadata.get("namespace", "")
        return ObjectReference(
            found["apiVersion"], found["kind"], namespace, metadata["name"], metadata.get("uid", "")
        )


class EventSink(Protocol):
    """The methods of `ApiServer` that a recorder needs."""

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject: ...

    async def patch(
        self, kind: ResourceKind, name: str, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject: ...


@dataclass(frozen=True, slots=True)
class _Series:
    """One event: its content, how often it occurred, and the count that the server has."""

    name: str
    reference: ObjectReference
    reason: str
    type: EventType
    message: str
    count: int
    written: int  # the count on the server; 0 if the server has no such event
    first: datetime
    last: datetime
    last_s: float  # on the loop's clock


_Key: TypeAlias = tuple[str, ...]  # identifies an event; the namespace is first


class EventQueue:
    """The events that wait to be written. Namespaces take turns, and the oldest event of each goes first."""

    def __init__(self) -> None:
        self._by_namespace: OrderedDict[str, OrderedDict[_Key, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: _Key) -> bool:
        return key in self._by_namespace.get(key[0], ())

    def add(self, key: _Key) -> None:
        """Append an event, unless it is already waiting."""
        if key not in self:
            self._by_namespace.setdefault(key[0], OrderedDict())[key] = None
            self._count += 1

    def remove(self, key: _Key) -> None:
        """Remove an event. Does nothing if it is not waiting."""
        if key in self:
            found = self._by_namespace[key[0]]
            del found[key]
            self._count -= 1
            if not found:
                del self._by_namespace[key[0]]

    def next(self) -> _Key:
        """Return the next event to write, and put its namespace behind the others. There must be an event."""
        namespace = next(iter(self._by_namespace))
        self._by_namespace.move_to_end(namespace)
        return next(iter(self._by_namespace[namespace]))

    def postpone(self, key: _Key) -> None:
        """Put an event behind the others of its namespace, if it is waiting."""
        if key in self:
            self._by_namespace[key[0]].move_to_end(key)

    def displace(self) -> _Key:
        """Remove and return the oldest event of the namespace that has the most. There must be an event."""
        largest = max(self._by_namespace.values(), key=len)
        oldest = next(iter(largest))
        self.remove(oldest)
        return oldest


class EventRecorder:
    """Records events from any code in the event loop; `run` writes them.

    `component` and `instance` name the source of the events: the program and the pod.
    """

    def __init__(
        self,
        server: EventSink,
        component: str,
        instance: str,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self.dropped = 0  # events that will never be written
        self._server, self._component, self._instance, self._now = server, component, instance, now
        self._series: OrderedDict[_Key, _Series] = OrderedDict()  # both written and waiting
        self._waiting = EventQueue()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._problem = ""

    def record(
        self, reference: ObjectReference, reason: str, message: str, type: EventType = "Normal"
    ) -> None:
        """Queue an event. Never blocks or raises; if too many events wait, one is dropped.

        `reason` is one CamelCase word, which all events of the same kind share.
        """
        key = (reference.namespace, reference.uid or reference.name, reference.kind, reason, type)
        now, now_s = self._now(), asyncio.get_running_loop().time()
        text = message if len(message) <= MESSAGE_CHARS else message[: MESSAGE_CHARS - 3] + "..."
        known = self._series.get(key)
        if known is not None and (not known.written or now_s - known.last_s < SAME_S):
            series = replace(known, message=text, count=known.count + 1, last=now, last_s=now_s)
        else:
            name = f"{reference.name[:_NAME_CHARS].rstrip('.-')}.{uuid.uuid4().hex[:16]}"
            series = _Series(name, reference, reason, type, text, 1, 0, now, now, now_s)
        self._series[key] = series
        self._series.move_to_end(key)
        self._waiting.add(key)
        self._bound()
        self._idle.clear()
        self._wake.set()

    async def run(self) -> NoReturn:
        """Write recorded events. They wait while the API server is unreachable. Never returns.

        An event that cannot be written for any other reason is dropped.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                key = self._waiting.next()
                try:
                    await self._write(key)
                except OSError as error:
                    self._note(error)
                    self._waiting.postpone(key)  # this event may be the cause of the error, so try others
                    await asyncio.sleep(RETRY_S)
                except Exception as error:  # such as an object name that no request can contain
                    self._note(error)  # one event must not end the recorder, and with it the process
                    self._waiting.remove(key)
                    self._series.pop(key, None)
                    self.dropped += 1
            self._idle.set()

    async def flush(self, limit_s: float) -> bool:
        """Wait up to `limit_s` until all recorded events are written. Return True if they are."""
        try:
            await asyncio.wait_for(self._idle.wait(), limit_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def _write(self, key: _Key) -> None:
        """Create or update the event on the server; safe to repeat. Raises `ServerUnreachable`."""
        series = self._series[key]
        try:
            if series.written:
                await self._count_up(series)
            else:
                await self._create(series)
            self._problem = ""
        except ApiError as error:  # the object's namespace is being deleted, or the account lacks the right
            self._note(error)
            self.dropped += 1
        self._mark_written(key, series)

    def _mark_written(self, key: _Key, series: _Series) -> None:
        current = self._series.get(key)
        if current is None or current.name != series.name:
            return
        self._series[key] = replace(current, written=series.count)
        if current.count == series.count:
            self._waiting.remove(key)

    async def _create(self, series: _Series) -> None:
        namespace = series.reference.namespace or "default"
        try:
            await self._server.create(EVENTS, self._body(series, namespace), namespace)
        except AlreadyThere:  # an earlier attempt succeeded, but its response was lost
            await self._count_up(series)

    async def _count_up(self, series: _Series) -> None:
        namespace = series.reference.namespace or "default"
        change = {"count": series.count, "lastTimestamp": api_time(series.last), "message": series.message}
        try:
            await self._server.patch(EVENTS, series.name, change, namespace)
        except NotFound:  # the server deletes events after an hour
            await self._server.create(EVENTS, self._body(series, namespace), namespace)

    def _body(self, series: _Series, namespace: str) -> KubernetesObject:
        about = series.reference
        involved = {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "namespace": about.namespace,
            "name": about.name,
            "uid": about.uid,
        }
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": series.name, "namespace": namespace},
            "involvedObject": {key: value for key, value in involved.items() if value},
            "reason": series.reason,
            "message": series.message,
            "type": series.type,
            "count": series.count,
            "firstTimestamp": api_time(series.first),
            "lastTimestamp": api_time(series.last),
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }

    def _bound(self) -> None:
        if len(self._waiting) > WAITING:
            del self._series[self._waiting.displace()]
            self.dropped += 1
        if len(self._series) > REMEMBERED:
            del self._series[next(each for each in self._series if each not in self._waiting)]

    def _note(self, error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]
        if problem != self._problem:
            log.warning("event not written", extra={"error": problem})
        self._problem = problem


def api_time(now: datetime) -> str:
    """Return a time in UTC as the API server writes it in objects, to the second."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
