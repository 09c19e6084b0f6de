"""The bounded queue between the sensor threads and the agent. Delivers events first, and counts losses.

Sensors repeat samples but not events, so the two wait in separate queues, and a flood of samples cannot push
out an event. Events are queued by the worst level that they may lead to. If there are too many, the oldest of
the least severe events is dropped, so a flood of harmless events cannot push out a fault, or an event that
ends one.

Identical waiting events are thinned: one is dropped if the ones before and after it are so close together
that the evaluator would merge them without it. So a backlog yields the same verdict as the same events one by
one. Beyond twice `MAX_EXACT` identical events, only the newest are as exact as the evaluator's moments, and
the older ones as exact as its bursts.

An event wakes the agent immediately. The sensors share their schedule, so their samples arrive within
milliseconds of each other, and one cycle handles them all.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from math import isfinite
from queue import Empty, SimpleQueue
from threading import Lock

from nodeagent.evaluation.bursts import GAP_S, MAX_BURSTS, MOMENT_S
from nodeagent.evaluation.evidence import MARKS
from nodeagent.model import VERDICT_XID, Level, Observation
from nodeagent.policy.rules import HealthPolicy, RuleKind

MAX_EVENTS = 4096  # distinct events between two cycles, which are milliseconds apart
MAX_SAMPLES = 16384
GATHER_S = 0.05  # after the first sample: a sweep of all sensors takes about 10 ms
MAX_EXACT = MAX_BURSTS  # the evaluator keeps as many moments
_Line = OrderedDict[tuple[object, ...], list[Observation]]  # identical events, or one sample; oldest first


def _time(seen: Observation) -> float:
    return seen.at_s


def gravity(policy: HealthPolicy, event: Observation) -> Level:
    """Return the worst level that an event may lead to, if it recurs or ends another one. Pure."""
    if event.check in MARKS or (event.check, event.value) == ("xid", VERDICT_XID):
        return Level.UNHEALTHY
    if not policy.is_event(event.check) or not isfinite(event.value):
        return Level.HEALTHY
    code = int(event.value)
    meaning = policy.meaning(event.check, code, event.variant)
    # The GPU's model and the driver's branch are not known here, so the worst meaning is used.
    meant = [meaning, *(each.meaning for each in policy.models if (event.check, code) == ("xid", each.code))]
    return max(max(each.level, each.recurs.level if each.recurs else each.level) for each in meant)


def _insert(waiting: list[Observation], new: Observation) -> None:
    """Insert an event in the order of time, and drop events that make no difference."""
    at = bisect_right(waiting, new.at_s, key=_time)
    if at and waiting[at - 1] == new:
        return
    waiting.insert(at, new)
    for n in (at + 1, at, at - 1):
        _thin(waiting, n, MOMENT_S)
    oldest_exact = len(waiting) - MAX_EXACT
    if oldest_exact == MAX_EXACT + 1:  # the older events are thinned for the first time
        for n in range(oldest_exact, 0, -1):
            _thin(waiting, n, GAP_S)
    elif oldest_exact > MAX_EXACT:  # already thinned, except around the new event and the last old one
        for n in sorted(
            {min(each, oldest_exact) for each in (at - 1, at, at + 1, oldest_exact)}, reverse=True
        ):
            _thin(waiting, n, GAP_S)


def _thin(waiting: list[Observation], n: int, gap_s: float) -> None:
    """Drop an event whose neighbours are merged without it."""
    if 0 < n < len(waiting) - 1 and waiting[n + 1].at_s - waiting[n - 1].at_s <= gap_s:
        del waiting[n]


class Inbox:
    """The queue. Any thread may call `put`; only one may call `drain`. Signal handlers may call `wake`."""

    def __init__(self, policy: HealthPolicy) -> None:
        self.policy = policy  # may be replaced at any time
        self._lock = Lock()
        self._events: dict[Level, _Line] = {each: OrderedDict() for each in sorted(Level, reverse=True)}
        self._waiting = 0  # events
        self._samples: _Line = OrderedDict()
        self._has_rung = False  # for samples, since the inbox was last emptied
        # True wakes the agent immediately. A SimpleQueue, because its `put` is safe in a signal handler.
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self.dropped = 0  # since the start

    def put(self, seen: Iterable[Observation]) -> int:
        """Queue observations and return their number. Never raises, and never blocks for long."""
        count, urgent = 0, False
        with self._lock:
            for each in seen:
                count += 1
                is_event = self._is_event(each)
                urgent = urgent or is_event
                self._put(each, is_event)
            # One ring is enough for all samples of a cycle; more would wake the agent for nothing.
            rings = urgent or (count > 0 and not self._has_rung)
            self._has_rung = self._has_rung or count > 0
        if rings:
            self._bell.put(urgent)
        return count

    def _put(self, each: Observation, is_event: bool) -> None:
        if is_event:
            self._put_event(each)
            return
        self._samples[each.check, each.entity, each.at_s] = [each]
        if len(self._samples) > MAX_SAMPLES:
            self._drop_oldest(self._samples)

    def _put_event(self, each: Observation) -> None:
        key: tuple[object, ...] = (each.check, each.entity, each.value, each.variant, each.source)
        line = self._events[gravity(self.policy, each)]
        waiting = line.setdefault(key, [])
        self._waiting -= len(waiting)
        _insert(waiting, each)
        self._waiting += len(waiting)
        if self._waiting > MAX_EVENTS:
            self._waiting -= 1
            self._drop_oldest(next(found for level, found in sorted(self._events.items()) if found))

    def _drop_oldest(self, line: _Line) -> None:
        """Drop the oldest event of the line that was queued first, or its only sample."""
        key, waiting = next(iter(line.items()))
        del waiting[0]
        if not waiting:
            del line[key]
        self.dropped += 1

    def _is_event(self, each: Observation) -> bool:
        rule = self.policy.rules.get(each.check)
        return rule is None or rule.kind is RuleKind.EVENT

    def wake(self) -> None:
        self._bell.put(True)

    def wait(self, timeout_s: float) -> None:
        """Return on an event or a `wake`, `GATHER_S` after the first sample, or after `timeout_s`."""
        try:
            if not self._bell.get(timeout=timeout_s):
                until = time.monotonic() + GATHER_S
                while not self._bell.get(timeout=max(0.0, until - time.monotonic())):
                    pass
            while True:  # one cycle takes everything that has arrived
                self._bell.get_nowait()
        except Empty:
            return

    def drain(self) -> list[Observation]:
        """Return all waiting observations: events first, and of these the most severe first."""
        with self._lock:
            self._has_rung, self._waiting = False, 0
            lines = (*self._events.values(), self._samples)
            found = [each for line in lines for waiting in line.values() for each in waiting]
            for line in lines:
                line.clear()
        return found
