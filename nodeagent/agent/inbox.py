"""The bounded queue between the sensor threads and the agent. Delivers events first, and counts losses.

Sensors repeat samples but not events, so the two wait in separate queues: a flood of samples cannot push out
an event. Of identical waiting events, the inbox keeps only the first and the newest. Those in between make no
difference, but a reset may have come between the first and the newest. An event wakes the agent immediately.
The sensors share their schedule, so their samples arrive within milliseconds of each other, and one cycle
takes all of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from threading import Lock

from nodeagent.model import Observation
from nodeagent.policy.rules import HealthPolicy, RuleKind

MAX_EVENTS = 4096  # distinct events between two cycles, which are milliseconds apart
MAX_SAMPLES = 16384
GATHER_S = 0.05  # after the first sample: a sweep of all sensors takes about 10 ms


def _time(seen: Observation) -> float:
    return seen.at_s


class Inbox:
    """The queue. Any thread may call `put`; only one may call `drain`. Signal handlers may call `wake`."""

    def __init__(self, policy: HealthPolicy) -> None:
        self._policy = policy
        self._lock = Lock()
        self._events: OrderedDict[tuple[object, ...], Observation] = OrderedDict()
        self._samples: OrderedDict[tuple[object, ...], Observation] = OrderedDict()
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
        if count:
            self._bell.put(urgent)
        return count

    def _put(self, each: Observation, is_event: bool) -> None:
        if is_event:
            key: tuple[object, ...] = (each.check, each.entity, each.value, each.variant, each.source)
            line, most = self._events, MAX_EVENTS
            if key in line and line[key] != each:
                newest = (*key, "newest")
                first, last = line[key], line.get(newest, line[key])
                line[newest] = max(last, each, key=_time)
                each = min(first, each, key=_time)
        else:
            key = (each.check, each.entity, each.at_s)
            line, most = self._samples, MAX_SAMPLES
        line[key] = each
        if len(line) > most:
            line.popitem(last=False)
            self.dropped += 1

    def _is_event(self, each: Observation) -> bool:
        rule = self._policy.rules.get(each.check)
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
        """Return all waiting observations, events first."""
        with self._lock:
            found = [*self._events.values(), *self._samples.values()]
            self._events.clear()
            self._samples.clear()
        return found
