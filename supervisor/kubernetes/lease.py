"""Hold a Kubernetes Lease in the name of one process.

This process treats another process's lease as expired only after it has watched the lease for the whole
duration, by its own clock, without seeing a change. The time between two reads counts only if the reads
follow each other closely. Without this rule, all contenders would consider every lease expired after an
outage of the API server, or after they were suspended, and a healthy leader would lose its lease. The
timestamps in the lease come from different hosts' clocks and are never compared.

A deleted lease is treated as unchanged since its deletion. Its holder creates it again at its next renewal,
and the other contenders wait as if the holder were silent.

A lease is taken over before it expires in two cases. The first is that its holder is known to have ended. The
next process of the holder's pod knows this, and other contenders can learn it (`LeaseLock.note_ended`).

The second case is that the holder's host does not answer (see `EarlyTakeover`). The holder permits this in
the lease, separately for each renewal. If a renewal permits it, the holder considers itself the only leader
for a shorter time after this renewal (`LeaseLock.sole_until_s`) than any other process waits. It permits this
only while the API server responds quickly, because this time would otherwise end before the next renewal.

Every write is conditional on the version that was read. At most one of two contenders succeeds, and a write
that arrives late changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import AlreadyThere, Conflict, NotFound

LEASES = ResourceKind("coordination.k8s.io", "v1", "leases")
# The holder name of a process that knows its pod: see `LeaseLock.begin`.
_OF_POD = re.compile(
    r"(?P<name>[a-z0-9]([a-z0-9.-]*[a-z0-9])?)"
    r"_(?P<uid>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})-[0-9a-f]{8}"
)
# The annotation with which a holder permits an early takeover. Its value consists of `EarlyTakeover.sole_s`,
# the holder and the time of the renewal. It applies only to this renewal, because other programs and earlier
# versions keep the annotation when they write the lease.
SOLE = "holdfast.dev/sole-leader-seconds"
_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6})?")
MAX_EPOCH = (1 << 31) - 1  # the API's leaseTransitions has 32 bits


class LeaseLost(Exception):
    """The term ran out before it could be renewed, or another process holds the lease."""


class HeldByAnother(Exception):
    """Another process is known to hold the lease. The message is the identity of that process."""


@dataclass(frozen=True, slots=True)
class EarlyTakeover:
    """When a lease may be taken over before it expires because its holder's host does not answer, in seconds.

    Another process takes over `silent_s` after it last saw a renewal, if the host has not answered since
    `suspect_s` after the same renewal. The holder considers itself the only leader for `sole_s` after it sent
    a renewal that permits this. The difference is the time for requests that are under way.
    """

    sole_s: float = 2.5
    suspect_s: float = 1.5  # a renewal is late: probe the holder's host
    silent_s: float = 3.0
    poll_s: float = 0.5  # between two reads of the lease, because `silent_s` begins when a renewal is seen
    quick_s: float = 0.5  # a renewal permits this only if the previous one took no longer
    probe_s: float = 0.7  # the limit for one probe; a network answers within milliseconds
    probes: int = 2  # that lack an answer before the host counts as silent, because a packet can be lost

    def __post_init__(self) -> None:
        if not 0 < self.sole_s < self.silent_s:
            raise ValueError("an early takeover must satisfy 0 < sole < silent")
        if not self.suspect_s + self.probes * self.probe_s <= self.silent_s:
            raise ValueError("an early takeover must satisfy suspect + probes x probe <= silent")


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Limits of leadership, in seconds.

    Another process may take over `duration_s` after it last saw a renewal. The leader stops `deadline_s`
    after it last sent one. The difference is the time that the body has to unwind. Attempts to renew are
    `retry_s` apart.
    """

    duration_s: int = 8
    deadline_s: float = 5.0
    retry_s: float = 1.0
    early: EarlyTakeover | None = None  # None: the lease of a silent holder must expire

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.deadline_s / 2 or not self.deadline_s < self.duration_s:
            raise ValueError("lease terms must satisfy 0 < 2 x retry < deadline < duration")
        if self.early is not None and not (
            2 * self.retry_s < self.early.sole_s <= self.deadline_s
            and self.early.silent_s < self.duration_s
            and self.retry_s + self.early.quick_s <= self.early.suspect_s
        ):
            raise ValueError("an early takeover must satisfy 2 x retry < sole <= deadline, silent < duration")

    @property
    def poll_s(self) -> float:
        """The time between two reads of a lease that another process holds."""
        return self.retry_s if self.early is None else min(self.retry_s, self.early.poll_s)


class LeaseStore(Protocol):
    """The methods of `ApiServer` that a lock needs."""

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> KubernetesObject: ...

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject: ...

    async def replace(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject: ...


def boot_s() -> float:
    """Return a clock that also counts the time during which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseLock:
    """Acquires, renews and releases a Lease for one process. All methods are safe to repeat."""

    def __init__(
        self,
        server: LeaseStore,
        namespace: str,
        name: str,
        identity: str,
        terms: LeaseTerms | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        *,
        pod_uid: str = "",
        clock: Callable[[], float] = boot_s,
    ) -> None:
        """`identity` names this process among the contenders. `clock` measures the terms.

        With `pod_uid`, `identity` names a pod, whose container restarts only after its process has ended. If
        an earlier process of the pod holds the lease, this process takes it over immediately.
        """
        self.clock = clock
        self.terms = terms or LeaseTerms()
        self._server, self._namespace, self._name = server, namespace, name
        self._identity = identity
        self._pod = f"{pod_uid}-" if pod_uid else ""
        self._now = now  # for the timestamps in the lease, which are only for users
        self._turn = asyncio.Lock()
        self._leader = ""
        self._seen: tuple[object, ...] = ()
        self._seen_s = 0.0  # since when `_seen` is known to be unchanged
        self._read_s = 0.0  # when the lease was last read
        self._unrenewed_s = 0.0  # the same as `_seen_s`, but without any gap between the reads
        self._ended = ""  # the last holder that is known to have ended
        self._last_holder = ""  # as last seen in the lease, which may have been deleted since then
        self._highest = -1  # the highest `leaseTransitions` seen in the lease
        self.begin()

    def begin(self) -> None:
        """Begin a term with a unique holder name, which distinguishes its lease from earlier terms."""
        self._holder = f"{self._identity}_{self._pod}{uuid.uuid4().hex[:8]}"
        # The lease after the last write; None if the outcome of that write is uncertain.
        self._mine: KubernetesObject | None = None
        self._may_hold = False
        self._least = 0  # the lowest `leaseTransitions` to write
        self._was_quick = False  # whether the last write was answered quickly
        # Until then, no other process takes over early from this one. The lease's duration limits the term as
        # well, so this may be infinite.
        self.sole_until_s = math.inf

    @property
    def holder(self) -> str:
        """The holder's name in the lease while this process holds it, different in each term."""
        return self._holder

    def note_ended(self, holder: str) -> None:
        """Take over the lease at the next attempt if `holder`, which has ended, still holds it."""
        self._ended = holder

    @property
    def leader(self) -> str:
        """The identity of the last known holder of the lease; "" if there is none."""
        return self._leader.rpartition("_")[0] or self._leader

    @property
    def unrenewed_s(self) -> float:
        """How long the last reads of the lease have shown no renewal; 0 if one of them failed or was late."""
        return self._read_s - self._unrenewed_s

    async def try_hold(self, silent: str = "") -> int:
        """Create, take over or renew the lease; return the epoch of this term.

        `silent` is a holder whose host does not answer now. See `EarlyTakeover`.

        The epoch is above the epochs of all earlier holders, and never 0. If the response to a write was
        lost, or if the lease has changed, this reads the lease to find out whether this process made the
        change.

        Raises:
            HeldByAnother: Another process holds the lease, and it has not expired.
            ApiError, ServerUnreachable: It is unknown whether this process holds the lease. Safe to repeat.
        """
        async with self._turn:
            try:
                return await self._hold(self._mine or await self._read(), silent)
            except (Conflict, AlreadyThere, NotFound):
                return await self._hold(await self._read(), silent)

    async def raise_above(self, known: int) -> int:
        """Renew the lease with an epoch above `known`, and return it. Raises the exceptions of `try_hold`.

        Members can know a higher epoch than the lease contains, for example after the lease was deleted.
        """
        if not 0 <= known < MAX_EPOCH:
            raise ValueError(f"no epoch is above {known}: a lease has room for {MAX_EPOCH}")
        self._least = max(self._least, known)
        return await self.try_hold()

    async def release(self) -> None:
        """Release the lease if this process holds it.

        Raises `ApiError` or `ServerUnreachable`; safe to repeat.
        """
        async with self._turn:
            for _ in range(2):
                lease = self._mine or (await self._read() if self._may_hold else None)
                self._mine = None
                if lease is None or lease["spec"].get("holderIdentity") != self._holder:
                    return
                try:
                    await self._server.replace(LEASES, _written(lease, self._released(lease["spec"])))
                except (Conflict, NotFound):
                    continue
                self._may_hold, self._leader, self._last_holder = False, "", ""
                return

    async def _read(self) -> KubernetesObject | None:
        try:
            lease = await self._server.get(LEASES, self._name, self._namespace)
        except NotFound:
            self._note_content(())
            return None
        spec = lease.get("spec") or {}
        self._note_content(
            tuple(spec.get(each) for each in ("holderIdentity", "renewTime", "leaseTransitions"))
        )
        self._note_spec(spec)
        return _with_spec(lease, spec)

    def _note_content(self, seen: tuple[object, ...]) -> None:
        """Record what the lease contains now; () if it does not exist."""
        now_s = self.clock()
        gap_s = now_s - self._read_s
        if seen != self._seen or gap_s > self.terms.deadline_s:
            self._seen, self._seen_s = seen, now_s
        # A read that failed, or took long, may show an outage of the API server, and not one of the holder.
        if self._seen_s == now_s or gap_s > 3 * self.terms.poll_s:
            self._unrenewed_s = now_s
        self._read_s = now_s

    def _note_spec(self, spec: KubernetesObject) -> None:
        self._last_holder = spec.get("holderIdentity") or ""
        self._highest = max(self._highest, _transitions(spec))

    async def _hold(self, lease: KubernetesObject | None, silent: str) -> int:
        """Take or renew `lease`, and return the epoch. Raises `HeldByAnother` if another process holds it."""
        self._mine = None
        spec = {} if lease is None else lease["spec"]
        # A deleted lease still belongs to its last holder, which creates it again if it is healthy.
        holder = self._last_holder if lease is None else spec.get("holderIdentity") or ""
        is_free = holder in ("", self._holder) or self._is_gone(holder) or self._has_expired(spec)
        if not is_free and not (holder == silent and self._may_take_early(lease)):
            self._leader, self._may_hold = holder, False
            raise HeldByAnother(holder)
        self._may_hold = True
        written = await self._write(lease, spec)
        self._mine, self._leader = written, self._holder
        self._note_spec(written["spec"])
        self._least = int(written["spec"]["leaseTransitions"])
        return self._least + 1

    async def _write(self, lease: KubernetesObject | None, spec: KubernetesObject) -> KubernetesObject:
        """Write the lease as held by this process, and return what the API server has stored.

        A write that is not answered may have permitted an early takeover, so it shortens `sole_until_s`.
        """
        early = self.terms.early if self._was_quick and lease is not None else None
        self._was_quick = False
        sent_s = self.clock()
        until_s = math.inf if early is None else sent_s + early.sole_s
        self.sole_until_s = min(self.sole_until_s, until_s)
        if lease is None:
            written = await self._server.create(LEASES, self._new(), self._namespace)
        else:
            written = await self._server.replace(LEASES, _written(lease, self._held(spec), early))
        self.sole_until_s = until_s
        limit = self.terms.early
        self._was_quick = limit is not None and self.clock() - sent_s <= limit.quick_s
        return written

    def _may_take_early(self, lease: KubernetesObject | None) -> bool:
        """Return True if the holder permits an early takeover and has not renewed `lease` for long enough."""
        early = self.terms.early
        if early is None or lease is None:
            return False
        sole_s = _sole_s(lease)
        return 0 < sole_s <= early.sole_s and self.unrenewed_s >= early.silent_s

    def _is_gone(self, holder: str) -> bool:
        """Return True if `holder` is a process that has ended."""
        is_ours = bool(self._pod) and holder.startswith(f"{self._identity}_{self._pod}")
        return is_ours or holder == self._ended

    def _has_expired(self, spec: KubernetesObject) -> bool:
        duration = spec.get("leaseDurationSeconds")
        duration_s = duration if isinstance(duration, int) and duration > 0 else self.terms.duration_s
        return self.clock() - self._seen_s >= duration_s

    def _new(self) -> KubernetesObject:
        metadata = {"name": self._name, "namespace": self._namespace}
        return {
            "apiVersion": LEASES.api_version,
            "kind": "Lease",
            "metadata": metadata,
            "spec": self._held(None),
        }

    def _held(self, spec: KubernetesObject | None) -> KubernetesObject:
        """Return a spec with this process as the holder. `spec` is the current one, if there is one."""
        now = _micro_time(self._now())
        held = self._last_holder if spec is None else spec.get("holderIdentity")
        highest = max(self._highest, -1 if spec is None else _transitions(spec))
        is_new = held != self._holder
        transitions = max(self._least, highest + 1 if is_new else highest)
        if spec is None or is_new:
            spec = {**(spec or {}), "acquireTime": now}
        return {
            **spec,
            "holderIdentity": self._holder,
            "leaseDurationSeconds": self.terms.duration_s,
            "leaseTransitions": transitions,
            "renewTime": now,
        }

    def _released(self, spec: KubernetesObject) -> KubernetesObject:
        left = {key: value for key, value in spec.items() if key != "holderIdentity"}
        return {**left, "leaseDurationSeconds": 1, "renewTime": _micro_time(self._now())}


def pod_of(holder: str) -> tuple[str, str]:
    """Return the name and uid of the pod in a holder's name; both are "" if the format is not ours.

    A user or another program may have written any text into the lease.
    """
    found = _OF_POD.fullmatch(holder)
    return (found["name"], found["uid"]) if found is not None else ("", "")


def _transitions(spec: KubernetesObject) -> int:
    found = spec.get("leaseTransitions")
    return found if isinstance(found, int) and found >= 0 else 0


def _written(
    lease: KubernetesObject, spec: KubernetesObject, early: EarlyTakeover | None = None
) -> KubernetesObject:
    """Return `lease` with a new `spec`, which permits an early takeover only with `early`."""
    metadata = lease["metadata"]
    annotations = {name: each for name, each in (metadata.get("annotations") or {}).items() if name != SOLE}
    if early is not None:
        annotations[SOLE] = f"{early.sole_s:g} {_renewal(spec)}"
    return {**lease, "metadata": {**metadata, "annotations": annotations}, "spec": spec}


def _sole_s(lease: KubernetesObject) -> float:
    """Return how long after its last renewal the holder is the only leader; 0 without its permission.

    Only a value for exactly this renewal counts.
    """
    value = (lease["metadata"].get("annotations") or {}).get(SOLE)
    seconds, _, renewal = value.partition(" ") if isinstance(value, str) else ("", "", "")
    is_meant = _SECONDS.fullmatch(seconds) is not None and renewal == _renewal(lease["spec"])
    return float(seconds) if is_meant else 0.0


def _renewal(spec: KubernetesObject) -> str:
    """Return the holder and time of a renewal, which no other renewal has."""
    return f"{spec.get('holderIdentity')} {spec.get('renewTime')}"


def _with_spec(lease: KubernetesObject, spec: KubernetesObject) -> KubernetesObject:
    return {**lease, "spec": spec}


def _micro_time(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
