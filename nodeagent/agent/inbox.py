"""The bounded queue between the sensor threads and the agent. Delivers events first, and counts losses.

Sensors repeat samples but not events, so the two wait in separate queues, and a flood of samples cannot push
out an event. Events are queued by the worst level that they may lead to. If there are too many, the oldest of
the least severe events is dropped, so a flood of harmless events cannot push out a fault, or an event that
ends one.

Of identical waiting events, the inbox keeps only the first and the newest. The events in between make no
difference, but a reset may have occurred between the first and the newest. An event wakes the agent
immediately. The sensors share their schedule, so their samples arrive within milliseconds of each other, and
one cycle handles them all.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from math import isfinite
from queue import Empty, SimpleQueue
from threading import Lock

from nodeagent.evaluation.evidence import MARKS
from nodeagent.model import VERDICT_XID, Level, Observation
from nodeagent.policy.rules import HealthPolicy, RuleKind

MAX_EVENTS = 4096  # distinct events between two cycles, which are milliseconds apart
MAX_SAMPLES = 16384
GATHER_S = 0.05  # after the first sample: a sweep of all sensors takes about 10 ms
_Line = OrderedDict[tuple[object, ...], Observation]


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


class Inbox:
    """The queue. Any thread may call `put`; only one may call `drain`. Signal handlers may call `wake`."""

    def __init__(self, policy: HealthPolicy) -> None:
        self.policy = policy  # may be replaced at any time
        self._lock = Lock()
        self._events: dict[Level, _Line] = {each: OrderedDict() for each in sorted(Level, reverse=True)}
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
        self._samples[each.check, each.entity, each.at_s] = each
        if len(self._samples) > MAX_SAMPLES:
            self._drop_oldest(self._samples)

    def _put_event(self, each: Observation) -> None:
        key: tuple[object, ...] = (each.check, each.entity, each.value, each.variant, each.source)
        line = self._events[gravity(self.policy, each)]
        if key in line and line[key] != each:
            newest = (*key, "newest")
            first, last = line[key], line.get(newest, line[key])
            line[newest] = max(last, each, key=_time)
            each = min(first, each, key=_time)
        line[key] = each
        if sum(map(len, self._events.values())) > MAX_EVENTS:
            self._drop_oldest(next(found for level, found in sorted(self._events.items()) if found))

    def _drop_oldest(self, line: _Line) -> None:
        line.popitem(last=False)
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
            self._has_rung = False
            lines = (*self._events.values(), self._samples)
            found = [each for line in lines for each in line.values()]
            for line in lines:
                line.clear()
        return found
