"""Decide whose report is decoded next.

Namespaces get equal shares of the decoding time, and so do the jobs of each namespace.

Decoding blocks the event loop. After a fault, all members of a job, or of many jobs, report at once. asyncio
would serve all of their sockets before looking for other events, which takes more than a second with 1,000
members. If all members simply took turns, a namespace or a job with more members would make the reports of
its neighbours wait longer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from supervisor.controller.limits.owner import ReportOwner

TURN_S = 0.02  # the time spent on decoding before other work may run
COUNTED_S = TURN_S / 2  # below this, no callback resets the count: one would cost a tenth of a small report
SECONDS_PER_BYTE = 5e-8  # an estimate, used to put several small reports into one turn
LEAST_S = 5e-5  # the estimate for the smallest report
# A report that takes longer than a turn delays everyone, no matter whose turn it is, so this excess is
# limited for each namespace. Reports of a training member cause no excess, even with 512 ranks (4 ms).
EXCESS_RATE = 0.2  # seconds per second
EXCESS_BURST_S = 2.0


@dataclass(slots=True)
class ExcessBudget:
    """The time that one namespace's reports may take beyond `TURN_S` each."""

    left_s: float = EXCESS_BURST_S
    at_s: float = 0.0  # when `left_s` was computed

    def spend(self, excess_s: float, now_s: float) -> None:
        """Count the excess of one report."""
        self.left_s, self.at_s = self.left_at(now_s) - excess_s, now_s

    def left_at(self, now_s: float) -> float:
        return min(EXCESS_BURST_S, self.left_s + max(0.0, now_s - self.at_s) * EXCESS_RATE)

    def wait_s(self, now_s: float) -> float:
        """Return how long the namespace's next report must wait."""
        return max(0.0, -self.left_at(now_s) / EXCESS_RATE)


@dataclass(slots=True, eq=False)
class WaitingReport:
    """A report that waits for its turn. `let_go` is called when it may be decoded."""

    owner: ReportOwner
    expected_s: float
    let_go: Callable[[], None]
    is_gone: bool = False  # its connection has ended, so it needs no turn


@dataclass(slots=True)
class _Queue:
    """The waiting reports of one namespace or job, and how much time its reports have had."""

    had_s: float
    jobs: dict[str, _Queue] = field(default_factory=dict)  # of a namespace
    reports: deque[WaitingReport] = field(default_factory=deque)  # of a job, in order of arrival


class FairQueue:
    """The waiting reports, and the order of their turns. Pure."""

    def __init__(self) -> None:
        self._namespaces: dict[str, _Queue] = {}  # those with waiting reports
        self._excess: dict[str, ExcessBudget] = {}  # for the namespaces that have had excess recently
        self._had_s = 0.0  # the time counted for the namespace of the last turn

    def __bool__(self) -> bool:
        return bool(self._namespaces)

    def add(self, report: WaitingReport) -> None:
        """Add a report. A namespace or job that had none waiting starts level with the one served last."""
        owner = report.owner
        namespace = self._namespaces.setdefault(owner.namespace, _Queue(self._had_s))
        least_s = min((each.had_s for each in namespace.jobs.values()), default=0.0)
        namespace.jobs.setdefault(owner.job, _Queue(least_s)).reports.append(report)

    def take(self, now_s: float) -> WaitingReport | None:
        """Return the report whose turn it is; None if no report waits, or if excess delays all of them."""
        while True:
            ready = [name for name in self._namespaces if self.wait_s(name, now_s) <= 0]
            if not ready:
                return None
            found = self._take_from(min(ready, key=lambda name: self._namespaces[name].had_s))
            if not found.is_gone:
                return found

    def _take_from(self, name: str) -> WaitingReport:
        namespace = self._namespaces[name]
        job = min(namespace.jobs, key=lambda each: namespace.jobs[each].had_s)
        queue = namespace.jobs[job]
        found = queue.reports.popleft()
        self._had_s = max(self._had_s, namespace.had_s)
        if not found.is_gone:
            namespace.had_s += found.expected_s
            queue.had_s += found.expected_s
        if not queue.reports:
            del namespace.jobs[job]
        if not namespace.jobs:
            del self._namespaces[name]
        return found

    def charge(self, report_owner: ReportOwner, took_s: float, expected_s: float, now_s: float) -> None:
        """Count the time that a report took. `expected_s` of it was counted when the report got its turn."""
        namespace = self._namespaces.get(report_owner.namespace)
        if namespace is not None:
            namespace.had_s += took_s - expected_s
            job = namespace.jobs.get(report_owner.job)
            if job is not None:
                job.had_s += took_s - expected_s
        if took_s > TURN_S:
            budget = self._excess.setdefault(report_owner.namespace, ExcessBudget(at_s=now_s))
            budget.spend(took_s - TURN_S, now_s)

    def wait_s(self, namespace: str, now_s: float) -> float:
        """Return how long the reports of a namespace must wait because of its excess."""
        budget = self._excess.get(namespace)
        if budget is None:
            return 0.0
        if budget.left_at(now_s) >= EXCESS_BURST_S:
            del self._excess[namespace]
        return budget.wait_s(now_s)

    def soonest_s(self, now_s: float) -> float:
        """Return how long it takes until a waiting report may have its turn."""
        return min((self.wait_s(name, now_s) for name in self._namespaces), default=0.0)


class DecodingTurns:
    """Limits how long an event loop decodes reports before it runs other work."""

    def __init__(self) -> None:
        self._queue = FairQueue()
        # The time spent in the current iteration of the event loop, and up to `COUNTED_S` from earlier ones.
        self._spent_s = 0.0
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None  # set while only excess keeps reports waiting

    async def wait(self, owner: ReportOwner, size: int) -> float:
        """Wait until a report of `size` bytes may be decoded; return the time already counted for it.

        The caller then decodes the report without waiting for anything else, and calls `spend`.
        """
        expected_s = LEAST_S + size * SECONDS_PER_BYTE
        is_free = not self._queue and self._spent_s < TURN_S
        if is_free and self._queue.wait_s(owner.namespace, time.monotonic()) <= 0:
            return 0.0
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        report = WaitingReport(owner, expected_s, lambda: None if turn.done() else turn.set_result(None))
        self._queue.add(report)
        self._schedule()
        try:
            await turn
        finally:
            report.is_gone = True
        return expected_s

    def spend(self, owner: ReportOwner, took_s: float, expected_s: float = 0.0) -> None:
        """Count the time that a report of `owner` took. `wait` has already counted `expected_s` of it."""
        self._queue.charge(owner, took_s, expected_s, time.monotonic())
        self._spent_s += max(took_s, 1e-9)
        if self._queue or self._spent_s > COUNTED_S:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)  # in the next iteration

    def _begin(self) -> None:
        """Begin an iteration of the event loop: give turns to reports that together take `TURN_S`."""
        self._is_scheduled = False
        now_s = time.monotonic()
        self._spent_s = 0.0
        while self._spent_s < TURN_S and (report := self._queue.take(now_s)) is not None:
            self._spent_s += report.expected_s
            report.let_go()
        if self._spent_s:  # run again after these reports, which are decoded in the next iteration
            self._schedule()
        elif self._queue and self._timer is None:
            soonest_s = max(0.001, self._queue.soonest_s(now_s))
            self._timer = asyncio.get_running_loop().call_later(soonest_s, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._schedule()
