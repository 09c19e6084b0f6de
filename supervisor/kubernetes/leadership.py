"""Lead while this process holds a Kubernetes Lease (`lease.LeaseLock`).

A leader counts its term from when it sent the last successful renewal, so it considers the term over before
any other process does. The clock also counts the time for which the process or the machine was suspended.
Each renewal attempt times out when the term ends. If the API server does not respond, leadership therefore
ends on time.

If the API server does not respond, no other process can be elected either, unless only this process is cut
off from the server. A leader that can ask the other contenders (see `rival` in `lead`) therefore continues
after its term without confirmation. Actions that the epoch in its orders protects may continue
(`Leadership.may_order`). All other actions must wait until `Leadership.left_s` is positive again
(`sent_within`).

A process that waits for the lease also probes the leader's host once a renewal is late (`LeaderProbes`). If
the host does not answer, this process takes over before the lease expires, if the leader permits it in the
lease (see `lease.EarlyTakeover`). For this reason, `Leadership.left_s` may end before the term does.

After a process was suspended, it takes neither kind of action until it has renewed its term or, if the API
server does not respond, has found no other leader. This works because both limits are times on a clock that
also runs while the process is suspended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from supervisor.kubernetes import client
from supervisor.kubernetes.errors import ApiError, ServerUnreachable
from supervisor.kubernetes.lease import HeldByAnother, LeaseLock, LeaseLost

log = logging.getLogger(__name__)

# The term may end while the API server does not respond. If the server then refuses the leader's requests,
# the leader continues for this long, because a server that has just started refuses all requests until it has
# read its permissions.
REFUSED_S = 60.0
UNWIND_S = 5.0  # a cancelled body that still runs after this time is logged and cancelled again

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SilentLeader:
    """A holder of the lease whose host has not answered any probe since `since_s`, by the lock's clock."""

    holder: str
    since_s: float


class LeaderProbes:
    """Probes the host of a leader whose renewal is late."""

    def __init__(
        self,
        lock: LeaseLock,
        ask: Callable[[str, float], Awaitable[bool | None]],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`ask` returns whether a holder's host answers within some seconds; None if this cannot be known.

        `changed` is called whenever `is_suspected` may have changed.
        """
        self._lock, self._ask, self._changed = lock, ask, changed
        self._since_s: float | None = None  # when the first of the last probes, all of them unanswered, began
        self._unanswered = 0
        self._probing: asyncio.Task[None] | None = None
        self._holder = ""
        self._is_read = False  # whether the last attempt to read the lease succeeded

    @property
    def is_suspected(self) -> bool:
        """True while this process will probably take over.

        The last probe of the leader's host has not been answered, and this process can read the lease.
        """
        return self._since_s is not None and self._is_read

    @property
    def silent(self) -> SilentLeader | None:
        """The holder of the lease, if enough probes in a row have not been answered."""
        early = self._lock.terms.early
        if early is None or self._since_s is None or self._unanswered < early.probes:
            return None
        return SilentLeader(self._holder, self._since_s)

    async def observe(self, holder: str) -> None:
        """Begin or end the probes, according to the lease as it was just read, held by `holder`."""
        early = self._lock.terms.early
        is_late = early is not None and self._lock.unrenewed_s >= early.suspect_s
        if not is_late or holder != self._holder:
            await self.end()
        if is_late and self._probing is None:
            self._holder = holder
            self._probing = asyncio.ensure_future(self._probe(holder))
        self._is_read = True
        self._changed()

    def note_unread(self) -> None:
        """Record that the lease could not be read. The probes continue, because they do not depend on it."""
        self._is_read = False
        self._changed()

    async def end(self) -> None:
        await _end(self._probing)
        self._probing, self._since_s, self._unanswered = None, None, 0
        self._changed()

    async def _probe(self, holder: str) -> None:
        early, clock = self._lock.terms.early, self._lock.clock
        assert early is not None
        while True:
            began_s = clock()
            answers = await self._ask(holder, early.probe_s)
            if answers is False:
                self._unanswered += 1
                self._since_s = began_s if self._since_s is None else self._since_s
            else:
                self._since_s, self._unanswered = None, 0
            self._changed()
            await asyncio.sleep(max(0.0, began_s + early.probe_s - clock()))


class Leadership:
    """One term as leader. Every order contains `epoch`, and members refuse earlier leaders' orders."""

    def __init__(
        self, lock: LeaseLock, epoch: int, expires_s: float, replaced: SilentLeader | None = None
    ) -> None:
        """`replaced` is the previous leader, if its host did not answer when this term began."""
        self.epoch = epoch
        self.replaced = replaced
        self._lock = lock
        self._expires_s = expires_s
        self._alone_s = expires_s  # until then, assume without confirmation that there is no other leader

    @property
    def holder(self) -> str:
        """The holder's name in the lease during this term."""
        return self._lock.holder

    @property
    def left_s(self) -> float:
        """Seconds for which this process is certain to be the only leader without a renewal; 0 or less: none.

        This may end before the term does, because another process may take over early (`EarlyTakeover`).

        A body that was suspended beyond the end of the term still runs briefly before it is cancelled. Check
        this before every action that the epoch does not protect.
        """
        return min(self.term_left_s, self._lock.sole_until_s - self._lock.clock())

    @property
    def term_left_s(self) -> float:
        """Seconds until the term ends unless it is renewed; 0 or less after it has ended."""
        return self._expires_s - self._lock.clock()

    @property
    def silent_for_s(self) -> float:
        """How long the previous leader's host has not answered; 0 if it may still answer."""
        return self._lock.clock() - self.replaced.since_s if self.replaced is not None else 0.0

    @property
    def may_order(self) -> bool:
        """True if this process may take actions that the epoch protects: send orders, and write records.

        This is the case during the term. After the term, it is the case for a while each time this process
        has asked for another leader and found none.
        """
        return max(self._expires_s, self._alone_s) > self._lock.clock()

    def carry_on(self, asked_s: float) -> None:
        """Record that no other leader was found at `asked_s`, although the term could not be renewed."""
        self._alone_s = asked_s + self._lock.terms.deadline_s

    def extend(self, epoch: int, expires_s: float) -> None:
        self.epoch, self._expires_s = epoch, max(self._expires_s, expires_s)

    async def raise_above(self, known: int) -> None:
        """Raise the epoch above `known`.

        Raises `LeaseLost`, `ApiError` or `ServerUnreachable`; safe to repeat.
        """
        if known < self.epoch:
            return
        sent_s = self._lock.clock()
        try:
            epoch = await _within(max(0.0, self.left_s), self._lock.raise_above(known))
        except HeldByAnother as error:
            raise LeaseLost(f"{error} holds the lease") from None
        self.extend(epoch, sent_s + self._lock.terms.deadline_s)


async def lead(
    lock: LeaseLock,
    body: Callable[[Leadership], Awaitable[None]],
    rival: Callable[[int], Awaitable[str]] | None = None,
    end_of: Callable[[str], Awaitable[str]] | None = None,
    probes: LeaderProbes | None = None,
) -> None:
    """Wait for the lease, run `body` while this process holds it, and then release it.

    `end_of` waits until the process that holds the lease under the given name is known to have ended, and
    returns how this is known. This process then takes over without waiting until the lease expires. With
    `probes`, it also takes over early from a leader whose host does not answer. In this case, `body` begins
    before the suspicion ends.

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
    whole = asyncio.ensure_future(_lead(lock, body, rival, end_of, probes))
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
    end_of: Callable[[str], Awaitable[str]] | None,
    probes: LeaderProbes | None,
) -> None:
    lock.begin()
    try:
        term = await _acquire(lock, end_of, probes)
        log.info("leading", extra={"epoch": term.epoch})
        work: asyncio.Future[None] = asyncio.ensure_future(body(term))
        keeper = asyncio.ensure_future(_keep(lock, term, rival))
        try:
            if probes is not None:
                await asyncio.sleep(0)  # `body` begins
                await probes.end()
            await asyncio.wait({work, keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _unwind(work)
            keeper.cancel()
            await asyncio.wait({keeper})
    finally:
        try:
            if probes is not None:
                await probes.end()
        finally:
            await _try_release(lock)
    lost = None if keeper.cancelled() else keeper.exception()
    if work.cancelled() and lost is not None:
        raise lost
    work.result()


async def _acquire(
    lock: LeaseLock, end_of: Callable[[str], Awaitable[str]] | None, probes: LeaderProbes | None
) -> Leadership:
    """Return the term once this process holds the lease. The caller must end the probes."""
    terms = lock.terms
    last = ""
    watched, watch = "", None  # a holder of the lease, and the task that waits for its end
    try:
        while True:
            sent_s = lock.clock()
            silent = probes.silent if probes is not None else None
            try:
                epoch = await _within(terms.deadline_s / 2, lock.try_hold(silent.holder if silent else ""))
                return Leadership(lock, epoch, sent_s + terms.deadline_s, silent)
            except HeldByAnother as error:
                problem = f"held by {error}"
                if probes is not None:
                    await probes.observe(str(error))
                if end_of is not None and watched != str(error):
                    await _end(watch)
                    watched, watch = str(error), asyncio.ensure_future(end_of(str(error)))
            except (ApiError, OSError) as error:
                problem = str(error)
                if probes is not None:
                    probes.note_unread()
            if problem != last:
                log.info("not leading", extra={"why": problem})
                last = problem
            if watch is None:
                await asyncio.sleep(terms.poll_s)
                continue
            await asyncio.wait({watch}, timeout=terms.poll_s)
            if watch.done():
                why, watch = watch.result(), None
                log.info("the leader has ended", extra={"leader": watched, "why": why})
                lock.note_ended(watched)
    finally:
        await _end(watch)


async def _keep(lock: LeaseLock, term: Leadership, rival: Callable[[int], Awaitable[str]] | None) -> None:
    """Renew the term until it is lost, then raise `LeaseLost`. Without `rival`, it is lost when it ends."""
    terms = lock.terms
    delay_s = terms.retry_s
    refused_s: float | None = None  # when the server began to refuse
    while True:
        await asyncio.sleep(min(delay_s, term.term_left_s) if term.term_left_s > 0 else delay_s)
        sent_s = lock.clock()
        has_ended = term.term_left_s <= 0
        if has_ended and rival is None:
            raise LeaseLost(f"not renewed within {terms.deadline_s:g} s")
        # Limit each attempt to half of the term, to leave time for another on a new connection.
        limit_s = terms.deadline_s / 2 if has_ended else min(term.term_left_s, terms.deadline_s / 2)
        try:
            epoch = await _within(limit_s, lock.try_hold())
        except HeldByAnother as error:
            raise LeaseLost(f"{error} holds the lease") from None
        except (ApiError, OSError) as error:
            log.warning(
                "lease not renewed", extra={"error": str(error), "left_s": round(term.term_left_s, 1)}
            )
            if isinstance(error, ApiError):  # the server responds, so another process can be elected
                refused_s = sent_s if refused_s is None else refused_s
                if term.term_left_s <= 0 and (rival is None or lock.clock() - refused_s >= REFUSED_S):
                    raise LeaseLost(f"not renewed within {terms.deadline_s:g} s: {error}") from None
            if rival is not None:  # even before the term ends, so that no order has to wait for the answers
                asked_s = lock.clock()
                other = await rival(term.epoch)
                if other:
                    raise LeaseLost(f"{other} leads with a higher epoch") from None
                term.carry_on(asked_s)
        else:
            refused_s = None
            if has_ended and epoch != term.epoch:
                raise LeaseLost("another process held the lease in the meantime")
            term.extend(epoch, sent_s + terms.deadline_s)
        delay_s = max(0.0, terms.retry_s - (lock.clock() - sent_s))


async def _unwind(work: asyncio.Future[None]) -> None:
    """Cancel the body until it ends, as often as `asyncio.wait_for` in the body loses a cancellation."""
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


async def _end(task: asyncio.Future[Any] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


async def sent_within(left_s: Callable[[], float], work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of requests that no epoch protects. None of them is sent after the term has ended.

    `left_s` returns how long the term will certainly last. It is called just before each request is written
    to its connection, because this process may be suspended while it connects. After the term has ended, this
    does not wait for the result any longer.

    Raises `ServerUnreachable` if the term has ended. Requests that had been sent may have been carried out.
    """

    with client.checked(lambda: "" if left_s() > 0 else "the term as leader has ended"):
        task = asyncio.ensure_future(work)
    try:
        while not task.done() and (limit_s := left_s()) > 0:
            await asyncio.wait({task}, timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise ServerUnreachable("a request", "the term as leader has ended before the response")
    return task.result()


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
