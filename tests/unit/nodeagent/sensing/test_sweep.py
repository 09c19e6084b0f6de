from __future__ import annotations

from collections.abc import Iterable

from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.sweep import Reading, Sweep
from tests.unit.nodeagent.ticking import Ticking


class Slow:
    """A group whose read takes seven seconds."""

    def __init__(self, clock: Ticking, *checks: str) -> None:
        self.checks = frozenset(checks)
        self._clock = clock

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        self._clock.at_s += 7
        return [Reading(each, "node", 1.0, "so it is") for each in sorted(due)]

    def left_out(self) -> tuple[Omission, ...]:
        return tuple(Omission(each, "why") for each in sorted(self.checks))


def test_each_group_is_stamped_with_the_time_when_its_read_began() -> None:
    clock = Ticking()
    sweep = Sweep("it", 5.0, clock, {"a": 5, "b": 5}, (Slow(clock, "a"), Slow(clock, "b")))
    found = sweep.read()
    assert [(each.check, each.at_s) for each in found] == [("a", 1000.0), ("b", 1007.0)]
    assert {each.source for each in found} == {"it"}


def test_a_group_without_a_period_is_neither_read_nor_reported_as_omitted() -> None:
    clock = Ticking()
    sweep = Sweep("it", 5.0, clock, {"a": 5}, (Slow(clock, "a"), Slow(clock, "b")))
    assert sweep.left_out() == ()
    assert [each.check for each in sweep.read()] == ["a"]
    assert [each.what for each in sweep.left_out()] == ["a"]
