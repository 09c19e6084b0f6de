"""One step of the sensors that read files: determine which checks are due, and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from nodeagent.model import Observation
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.sensor import Omission

LIST_S = 60.0  # the longest time until a new device is detected
T = TypeVar("T")


class Periods:
    """Determines the checks due at each step of a sensor, each by its own period. Pure."""

    def __init__(self, periods_s: Mapping[str, float], known: Iterable[str], step_s: float) -> None:
        """Take the periods of the `known` checks; a check without a period, or with 0, is never due."""
        self._periods_s = {each: periods_s[each] for each in known if periods_s.get(each, 0.0) > 0}
        self._slack_s = step_s / 2  # a slightly early step must not skip a period
        self._last_s: dict[str, float] = {}

    @property
    def checks(self) -> frozenset[str]:
        """Return the checks that have a period."""
        return frozenset(self._periods_s)

    def due(self, now_s: float) -> frozenset[str]:
        """Return the checks due at `now_s` (all of them at the first call) and count them as read."""
        found = frozenset(each for each in self._periods_s if self._is_due(each, now_s))
        self._last_s.update(dict.fromkeys(found, now_s))
        return found

    def _is_due(self, check: str, now_s: float) -> bool:
        last_s = self._last_s.get(check)
        return last_s is None or now_s - last_s >= self._periods_s[check] - self._slack_s


class CachedList(Generic[T]):
    """The result of `find`, at most `LIST_S` old, because finding devices costs more than reading them."""

    def __init__(self, find: Callable[[], tuple[T, ...]]) -> None:
        self._find = find
        self._found: tuple[T, ...] = ()
        self._at_s = float("-inf")

    @property
    def last(self) -> tuple[T, ...]:
        return self._found

    @property
    def listed_s(self) -> float:
        """When `last` was found."""
        return self._at_s

    def at(self, now_s: float) -> tuple[T, ...]:
        if now_s - self._at_s >= LIST_S:
            self._found, self._at_s = self._find(), now_s
        return self._found


class CheckGroup(Protocol):
    """Checks that are read together."""

    checks: frozenset[str]

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        """Return the readings of the checks in `due` that can be read. Never raises OSError."""

    def left_out(self) -> tuple[Omission, ...]:
        """Return the omissions of the last `read`."""


class Sweep:
    """Reads the groups of one sensor, each check at its own period."""

    def __init__(
        self,
        source: str,
        step_s: float,
        clock: Clock,
        periods_s: Mapping[str, float],
        groups: Sequence[CheckGroup],
    ) -> None:
        """Take the groups; a check without a period in `periods_s` is not read."""
        self._source = source
        self._clock = clock
        known = frozenset[str]().union(*(each.checks for each in groups))
        self._periods = Periods(periods_s, known, step_s)
        self._groups = tuple(each for each in groups if each.checks & self._periods.checks)
        self._left_out: tuple[Omission, ...] = ()

    def read(self) -> tuple[Observation, ...]:
        """Return the readings of all checks that are due now."""
        due = self._periods.due(self._clock.now_s())
        found: list[Observation] = []
        for group in self._groups:
            if wanted := due & group.checks:
                found += self._observed(group, wanted)
        self._left_out = tuple(each for group in self._groups for each in group.left_out())
        return tuple(found)

    def left_out(self) -> tuple[Omission, ...]:
        """Return the omissions of the last `read`. May be called from another thread."""
        return self._left_out

    def _observed(self, group: CheckGroup, due: frozenset[str]) -> Iterable[Observation]:
        now_s = self._clock.now_s()  # read the clock for each group: the previous group may have taken long
        for each in group.read(due, now_s):
            yield Observation(now_s, each.check, each.entity, self._source, each.value, text=each.text)


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one check of one entity: an observation without its time and source."""

    check: str
    entity: str
    value: float
    text: str = ""
