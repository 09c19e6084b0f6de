"""Lead while this process holds a Kubernetes Lease.

A leader counts its term from when it sent the last successful renewal, so it considers the term over before
any other process does. Each renewal attempt times out when the term ends. If the API server does not respond,
leadership therefore ends on time. Another process's lease has expired once it has not changed for its whole
duration, by this process's monotonic clock. The timestamps in the lease come from different hosts' clocks and
are never compared.

Every write is conditional on the version that was read. At most one of two contenders succeeds, and a write
that arrives late changes nothing.

If the API server does not respond, no other process can be elected either, unless only this process is cut
off from the server. A leader that can ask the other contenders (see `rival` in `lead`) therefore continues
after its term without confirmation. Actions that the epoch in its orders protects may continue. All others
must wait until `Leadership.left_s` is positive again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol, TypeVar

from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import AlreadyThere, ApiError, Conflict, NotFound

log = logging.getLogger(__name__)

LEASES = ResourceKind("coordination.k8s.io", "v1", "leases")
MAX_EPOCH = (1 << 31) - 1  # the API's leaseTransitions has 32 bits
# A leader whose term ended while the API server did not respond continues for this long if the server then
# refuses its requests, because a server that has just started refuses all of them until it has read its
# permissions.
REFUSED_S = 60.0
UNWIND_S = 5.0  # a cancelled body that still runs after this time is logged and cancelled again

_T = TypeVar("_T")


class LeaseLost(Exception):
    """The term ran out before it could be renewed, or another process holds the lease."""


class HeldByAnother(Exception):
    """Another process is known to hold the lease. The message is the identity of that process."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Limits of leadership, in seconds.

    Another process may take over `duration_s` after it last saw a renewal. The leader stops `deadline_s`
    after it last sent one, and the difference is the time for the body to unwind. Attempts to renew are
    `retry_s` apart.
    """

    duration_s: int = 15
    deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.deadline_s / 2 or not self.deadline_s < self.duration_s:
            raise ValueError("lease terms must satisfy 0 < 2 x retry < deadline < duration")


class LeaseStore(Protocol):
    """The methods of `ApiServer` that a lock needs."""

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> KubernetesObject: ...

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject: ...

    async def replace(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject: ...


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
    ) -> None:
        """`identity` names this process among its contenders.

        With `pod_uid`, it names a pod, whose container restarts only after its process has ended. If an
        earlier process of the pod holds the lease, this one takes it over at once.
        """
        self.terms = terms or LeaseTerms()
        self._server, self._namespace, self._name = server, namespace, name
        self._identity = identity
        self._pod = f"{pod_uid}-" if pod_uid else ""
        self._now = now  # for the timestamps in the lease, which are only for users
        self._turn = asyncio.Lock()
        self._leader = ""
        self._seen: tuple[object, ...] = ()
        self._seen_s = 0.0  # when `_seen` was first read, on the loop's clock
        self.begin()

    def begin(self) -> None:
        """Begin a term with a unique holder name, to distinguish its lease from those of earlier terms."""
        self._holder = f"{self._identity}_{self._pod}{uuid.uuid4().hex[:8]}"
        # The lease after the last write; None if the outcome of that write is uncertain.
        self._mine: KubernetesObject | None = None
        self._may_hold = False
        self._least = 0  # the lowest `leaseTransitions` to write

    @property
    def leader(self) -> str:
        """The identity of the last known holder of the lease; "" if there is none."""
        return self._leader.rpartition("_")[0] or self._leader

    async def try_hold(self) -> int:
        """Create, take over or renew the lease; return the epoch of this term.

        The epoch is above the epochs of all earlier holders, and never 0. If the response to a write was
        lost, or if the lease has changed, this reads the lease to find out whether this process made the
        change.

        Raises:
            HeldByAnother: Another process holds the lease, and it has not expired.
            ApiError, ServerUnreachable: It is unknown whether this process holds the lease. Safe to repeat.
        """
        async with self._turn:
            try:
                return await self._hold(self._mine or await self._look())
            except (Conflict, AlreadyThere, NotFound):
                return await self._hold(await self._look())

    async def raise_above(self, known: int) -> int:
        """Renew the lease with an epoch above `known`, and return that epoch. Raises what `try_hold` raises.

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
                lease = self._mine or (await self._look() if self._may_hold else None)
                self._mine = None
                if lease is None or lease["spec"].get("holderIdentity") != self._holder:
                    return
                try:
                    await self._server.replace(LEASES, _with_spec(lease, self._released(lease["spec"])))
                except (Conflict, NotFound):
                    continue
                self._may_hold, self._leader = False, ""
                return

    async def _look(self) -> KubernetesObject | None:
        try:
            lease = await self._server.get(LEASES, self._name, self._namespace)
        except NotFound:
            return None
        spec = lease.get("spec") or {}
        seen = tuple(spec.get(each) for each in ("holderIdentity", "renewTime", "leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_s = seen, asyncio.get_running_loop().time()
        return _with_spec(lease, spec)

    async def _hold(self, lease: KubernetesObject | None) -> int:
        """Take or renew `lease`, and return the epoch. Raises `HeldByAnother` if another process holds it."""
        self._mine = None
        spec = {} if lease is None else lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._holder) and not self._is_earlier(holder) and not self._has_expired(spec):
            self._leader, self._may_hold = holder, False
            raise HeldByAnother(holder)
        self._may_hold = True
        if lease is None:
            written = await self._server.create(LEASES, self._new(), self._namespace)
        else:
            written = await self._server.replace(LEASES, _with_spec(lease, self._held(spec)))
        self._mine, self._leader = written, self._holder
        self._least = int(written["spec"]["leaseTransitions"])
        return self._least + 1

    def _is_earlier(self, holder: str) -> bool:
        """Return True if `holder` is a process of this pod that has ended."""
        return bool(self._pod) and holder.startswith(f"{self._identity}_{self._pod}")

    def _has_expired(self, spec: KubernetesObject) -> bool:
        duration = spec.get("leaseDurationSeconds")
        duration_s = duration if isinstance(duration, int) and duration > 0 else self.terms.duration_s
        return asyncio.get_running_loop().time() - self._seen_s >= duration_s

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
        if spec is None or spec.get("holderIdentity") != self._holder:
            transitions = self._least if spec is None else max(self._least, _transitions(spec) + 1)
            spec = {**(spec or {}), "acquireTime": now}
        else:
            transitions = max(self._least, _transitions(spec))
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


class Leadership:
    """One term as leader. Every order contains `epoch`, and members refuse earlier leaders' orders."""

    def __init__(self, lock: LeaseLock, epoch: int, expires_s: float) -> None:
        self.epoch = epoch
        self._lock = lock
        self._expires_s = expires_s

    @property
    def left_s(self) -> float:
        """Seconds until the term ends unless it is renewed; 0 or less once it has ended.

        A body that was suspended beyond the end of the term still runs briefly before it is cancelled. Check
        this before every action that the epoch does not protect.
        """
        return self._expires_s - asyncio.get_running_loop().time()

    def extend(self, epoch: int, expires_s: float) -> None:
        self.epoch, self._expires_s = epoch, max(self._expires_s, expires_s)

    async def raise_above(self, known: int) -> None:
        """Raise the epoch above `known`.

        Raises `LeaseLost`, `ApiError` or `ServerUnreachable`; safe to repeat.
        """
        if known < self.epoch:
            return
        sent_s = asyncio.get_running_loop().time()
        try:
            epoch = await _within(max(0.0, self.left_s), self._lock.raise_above(known))
        except HeldByAnother as error:
            raise LeaseLost(f"{error} holds the lease") from None
        self.extend(epoch, sent_s + self._lock.terms.deadline_s)


async def lead(
    lock: LeaseLock,
    body: Callable[[Leadership], Awaitable[None]],
    rival: Callable[[int], Awaitable[str]] | None = None,
) -> None:
    """Wait for the lease, run `body` while this process holds it, and then release it.

    `rival` returns the name of another leader whose epoch is known to be above the given one, or "". If
    `rival` is given and the API server does not respond when the term ends, the term continues without
    confirmation until the lease is renewed, another process holds it, or there is a rival.

    When this function returns or raises, `body` has ended. Until then, the lease is renewed if possible.
    `body` is cancelled once, even if this coroutine is cancelled several times, and again only if it does not
    end within `UNWIND_S`.

    Raises:
        LeaseLost: The term has ended, so this process must no longer act as the leader.
        Exception: Any exception that `body` raises.
    """
    whole = asyncio.ensure_future(_lead(lock, body, rival))
    try:
        await asyncio.shield(whole)
    except asyncio.CancelledError:
        whole.cancel()
        while not whole.done():
            try:
                await asyncio.wait({whole})
            except asyncio.CancelledError:
                continue
        if not whole.cancelled():
            whole.result()
        raise


async def _lead(
    lock: LeaseLock,
    body: Callable[[Leadership], Awaitable[None]],
    rival: Callable[[int], Awaitable[str]] | None,
) -> None:
    lock.begin()
    try:
        term = await _acquire(lock)
        log.info("leading", extra={"epoch": term.epoch})
        work: asyncio.Future[None] = asyncio.ensure_future(body(term))
        keeper = asyncio.ensure_future(_keep(lock, term, rival))
        try:
            await asyncio.wait({work, keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _unwind(work)
            keeper.cancel()
            await asyncio.wait({keeper})
    finally:
        await _try_release(lock)
    lost = None if keeper.cancelled() else keeper.exception()
    if work.cancelled() and lost is not None:
        raise lost
    work.result()


async def _acquire(lock: LeaseLock) -> Leadership:
    loop = asyncio.get_running_loop()
    terms = lock.terms
    last = ""
    while True:
        sent_s = loop.time()
        try:
            epoch = await _within(terms.deadline_s / 2, lock.try_hold())
            return Leadership(lock, epoch, sent_s + terms.deadline_s)
        except HeldByAnother as error:
            problem = f"held by {error}"
        except (ApiError, OSError) as error:
            problem = str(error)
        if problem != last:
            log.info("not leading", extra={"why": problem})
            last = problem
        await asyncio.sleep(terms.retry_s)


async def _keep(lock: LeaseLock, term: Leadership, rival: Callable[[int], Awaitable[str]] | None) -> None:
    """Renew the term until it is lost, then raise `LeaseLost`: without `rival`, by the end of the term."""
    loop = asyncio.get_running_loop()
    terms = lock.terms
    delay_s = terms.retry_s
    refused_s: float | None = None  # when the server began to refuse
    while True:
        await asyncio.sleep(min(delay_s, term.left_s) if term.left_s > 0 else delay_s)
        sent_s = loop.time()
        has_ended = term.left_s <= 0
        if has_ended and rival is None:
            raise LeaseLost(f"not renewed within {terms.deadline_s:g} s")
        # Limit each attempt to half of the term, to leave time for another on a new connection.
        limit_s = terms.deadline_s / 2 if has_ended else min(term.left_s, terms.deadline_s / 2)
        try:
            epoch = await _within(limit_s, lock.try_hold())
        except HeldByAnother as error:
            raise LeaseLost(f"{error} holds the lease") from None
        except (ApiError, OSError) as error:
            log.warning("lease not renewed", extra={"error": str(error), "left_s": round(term.left_s, 1)})
            if isinstance(error, ApiError):  # the server responds, so another process can be elected
                refused_s = sent_s if refused_s is None else refused_s
                if term.left_s <= 0 and (rival is None or loop.time() - refused_s >= REFUSED_S):
                    raise LeaseLost(f"not renewed within {terms.deadline_s:g} s: {error}") from None
            other = await rival(term.epoch) if term.left_s <= 0 and rival is not None else ""
            if other:
                raise LeaseLost(f"{other} leads with a higher epoch") from None
        else:
            refused_s = None
            if has_ended and epoch != term.epoch:
                raise LeaseLost("another process held the lease in the meantime")
            term.extend(epoch, sent_s + terms.deadline_s)
        delay_s = max(0.0, terms.retry_s - (loop.time() - sent_s))


async def _unwind(work: asyncio.Future[None]) -> None:
    """Cancel the body until it ends, because `asyncio.wait_for` in the body can lose a cancellation."""
    while not work.done():
        work.cancel()
        await asyncio.wait({work}, timeout=UNWIND_S)
        if not work.done():
            log.error("leader does not stop", extra={"limit_s": UNWIND_S})


async def _try_release(lock: LeaseLock) -> None:
    try:
        await _within(lock.terms.retry_s, lock.release())
    except (ApiError, OSError) as error:  # the next leader waits until the lease expires
        log.warning("lease not released", extra={"error": str(error)})


async def _within(limit_s: float, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`, or raise TimeoutError after `limit_s`.

    Unlike `asyncio.wait_for` before Python 3.12, it never loses a cancellation.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise TimeoutError(f"no answer within {limit_s:.1f} s")
    return task.result()


def _transitions(spec: KubernetesObject) -> int:
    found = spec.get("leaseTransitions")
    return found if isinstance(found, int) and found >= 0 else 0


def _with_spec(lease: KubernetesObject, spec: KubernetesObject) -> KubernetesObject:
    return {**lease, "spec": spec}


def _micro_time(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
