"""Between the sensors' threads and the one that judges: bounded, events before samples, losses counted.

Samples come again; events do not. So they wait in lines of their own: a flood of samples pushes out no event.
Of an event that waits already, no second one is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from threading import Lock

from nodeagent.observation import Observation
from nodeagent.policy.rules import Kind, Policy

MAX_EVENTS = 4096  # different ones, between two looks that are milliseconds apart
MAX_SAMPLES = 16384


class Inbox:
    """Many may `put`; one takes. `wake` may be called by a signal handler."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lock = Lock()
        self._events: OrderedDict[tuple[object, ...], Observation] = OrderedDict()
        self._samples: OrderedDict[tuple[object, ...], Observation] = OrderedDict()
        self._bell: SimpleQueue[None] = SimpleQueue()  # its put is safe in a signal handler
        self.dropped = 0  # since the start

    def put(self, seen: Iterable[Observation]) -> int:
        """Take in observations; return how many there were. Never blocks for long, never raises."""
        count = 0
        with self._lock:
            for each in seen:
                count += 1
                self._put(each)
        if count:
            self.wake()
        return count

    def _put(self, each: Observation) -> None:
        if self._is_event(each):
            key: tuple[object, ...] = (each.check, each.entity, each.value, each.variant, each.source)
            line, most = self._events, MAX_EVENTS
            if key in line and line[key].at_s <= each.at_s:
                return  # the same burst: its first and, at the next look, its newest are what counts
        else:
            key = (each.check, each.entity, each.at_s)
            line, most = self._samples, MAX_SAMPLES
        line[key] = each
        if len(line) > most:
            line.popitem(last=False)
            self.dropped += 1

    def _is_event(self, each: Observation) -> bool:
        rule = self._policy.rules.get(each.check)
        return rule is None or rule.kind is Kind.EVENT

    def wake(self) -> None:
        self._bell.put(None)

    def wait(self, timeout_s: float) -> None:
        """Return when something came or somebody called `wake`, at the latest after `timeout_s`."""
        try:
            self._bell.get(timeout=timeout_s)
            while True:  # one look is for all that has come
                self._bell.get_nowait()
        except Empty:
            return

    def take(self) -> list[Observation]:
        """Return all that waits, events first."""
        with self._lock:
            found = [*self._events.values(), *self._samples.values()]
            self._events.clear()
            self._samples.clear()
        return found
