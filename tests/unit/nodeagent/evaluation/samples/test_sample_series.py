"""The samples of one check reach levels, and are folded, dropped and stored."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from nodeagent.evaluation.samples import (
    LATE_S,
    MAX_SAMPLES,
    LevelState,
    SampleSeries,
    TimedValue,
    grown,
    reached,
)
from nodeagent.model import Action, Level
from nodeagent.policy.rules import Bound, CheckState, Rule, RuleKind

HOT = Rule("heat", RuleKind.LEVEL, "heat", "test", degraded=Bound(80), unhealthy=Bound(90), clear_s=20)
COLD = Rule("cold", RuleKind.LEVEL, "margin", "test", below=True, degraded=Bound(5), clear_at=10, clear_s=20)
ABOVE = Rule("above", RuleKind.LEVEL, "heat", "test", degraded=Bound(80), clear_at=70, clear_s=20)
COUNTER = Rule("errors", RuleKind.RATE, "errors", "test", window_s=60, degraded=Bound(50), clear_s=20)
QUIET = Rule(
    "errors", RuleKind.RATE, "errors", "test", window_s=60, degraded=Bound(50), clear_at=10, clear_s=20
)
STATES = {
    0: CheckState("ok", Level.HEALTHY, Action.NONE),
    1: CheckState("slow", Level.DEGRADED, Action.NONE, for_s=30),
    2: CheckState("lost", Level.UNHEALTHY, Action.NONE),
}
STATE = Rule("state", RuleKind.STATE, "state", "test", states=STATES, clear_s=20)

NEVER = LevelState(False, 0.0, -inf)


def series(rule: Rule, seen: list[TimedValue]) -> SampleSeries:
    made = SampleSeries([])
    for each in seen:
        made.add(rule, each)
    return made


@pytest.mark.parametrize(
    ("rule", "seen", "degraded", "unhealthy"),
    [
        (HOT, [], NEVER, NEVER),
        (HOT, [(5, 79)], NEVER, NEVER),
        (HOT, [(5, 80)], LevelState(True, 5, 5), NEVER),
        (HOT, [(5, 80), (15, 81)], LevelState(True, 5, 15), NEVER),
        (HOT, [(5, 90)], LevelState(True, 5, 5), LevelState(True, 5, 5)),
        (HOT, [(5, 90), (15, 85)], LevelState(True, 5, 15), LevelState(True, 5, 5)),
        (HOT, [(5, 90), (25, 85)], LevelState(True, 5, 25), LevelState(False, 5, 5)),
        (HOT, [(5, 80), (24, 79)], LevelState(True, 5, 5), NEVER),
        (HOT, [(5, 80), (25, 79)], LevelState(False, 5, 5), NEVER),
        (HOT, [(5, 80), (25, 79), (26, 80)], LevelState(True, 26, 26), NEVER),
        (COLD, [(5, 5), (15, 10)], LevelState(True, 5, 15), NEVER),
        (COLD, [(5, 5), (25, 10.1)], LevelState(False, 5, 5), NEVER),
        (COLD, [(5, 7)], LevelState(False, 0.0, 5), NEVER),
        (ABOVE, [(5, 80), (25, 71)], LevelState(True, 5, 25), NEVER),
        (ABOVE, [(5, 80), (25, 70)], LevelState(False, 5, 5), NEVER),
        (COUNTER, [(0, 0), (10, 51), (69, 51)], LevelState(True, 10, 69), NEVER),
        (COUNTER, [(0, 0), (10, 51), (70, 51)], LevelState(False, 10, 10), NEVER),
        (QUIET, [(0, 0), (10, 51), (65, 62), (70, 62)], LevelState(True, 10, 70), NEVER),
        (QUIET, [(0, 0), (10, 51), (65, 61), (70, 61)], LevelState(True, 10, 65), NEVER),
        (STATE, [(0, 1), (29, 1)], LevelState(False, 0.0, 29), NEVER),
        (STATE, [(0, 1), (30, 1)], LevelState(True, 30, 30, shown=1), NEVER),
        (STATE, [(0, 1), (20, 0), (40, 1)], LevelState(False, 0.0, 40), NEVER),
        (STATE, [(5, 2), (15, 0)], LevelState(True, 5, 5), LevelState(True, 5, 5, shown=2)),
        (STATE, [(5, 2), (25, 0)], LevelState(False, 5, 5), LevelState(False, 5, 5)),
        (STATE, [(5, 2), (25, 1)], LevelState(True, 5, 25, shown=1), LevelState(False, 5, 5)),
        (STATE, [(5, 2), (25, 7)], LevelState(True, 5, 25), LevelState(True, 5, 25, shown=2)),
    ],
)
def test_a_level_rises_with_the_sample_that_reaches_it_and_falls_after_clean_samples(
    rule: Rule, seen: list[TimedValue], degraded: LevelState, unhealthy: LevelState
) -> None:
    assert series(rule, seen).levels(rule) == (degraded, unhealthy)
    assert SampleSeries(seen).levels(rule) == (degraded, unhealthy), "the order of arrival must not matter"


WINDOW = Rule("w", RuleKind.LEVEL, "w", "test", degraded=Bound(5, need=2, of=3))
LASTING = Rule("l", RuleKind.LEVEL, "l", "test", degraded=Bound(5, for_s=30))
WORSE_ONLY = Rule("u", RuleKind.LEVEL, "u", "test", unhealthy=Bound(5))


@pytest.mark.parametrize(
    ("rule", "seen", "degraded", "unhealthy"),
    [
        (WINDOW, [(0, 5)], False, False),
        (WINDOW, [(0, 5), (10, 5)], True, False),
        (WINDOW, [(0, 5), (10, 4), (20, 5)], True, False),
        (WINDOW, [(0, 5), (10, 4), (20, 4), (30, 5)], False, False),
        (WINDOW, [(0, 5), (10, 5), (20, 4)], False, False),
        (Rule("s", RuleKind.LEVEL, "s", "test", degraded=Bound(5, for_s=1)), [(0, 5)], False, False),
        (LASTING, [(0, 5), (29, 5)], False, False),
        (LASTING, [(0, 5), (30, 5)], True, False),
        (LASTING, [(0, 5), (10, 4), (30, 5)], False, False),
        (LASTING, [(0, 4), (10, 5), (39, 5)], False, False),
        (LASTING, [(0, 4), (10, 5), (40, 5)], True, False),
        (WORSE_ONLY, [(0, 4)], False, False),
        (WORSE_ONLY, [(0, 5)], True, True),
        (COUNTER, [(0, 0), (10, 50)], False, False),
        (COUNTER, [(0, 0), (10, 51)], True, False),
        (STATE, [(0, 2)], True, True),
        (STATE, [(0, 0)], False, False),
        (STATE, [(0, 7)], False, False),
        (STATE, [(0, 1), (15, 1), (30, 1)], True, False),
        (STATE, [(0, 0), (10, 1), (30, 1)], False, False),
    ],
)
def test_a_bound_counts_exactly_the_samples_that_it_requires(
    rule: Rule, seen: list[TimedValue], degraded: bool, unhealthy: bool
) -> None:
    at = len(seen) - 1
    assert reached(rule, Level.DEGRADED, seen, at) is degraded
    assert reached(rule, Level.UNHEALTHY, seen, at) is unhealthy


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([(0, 100)], 0.0),
        ([(0, 100), (10, 107)], 7.0),
        ([(0, 100), (10, 107), (20, 107), (30, 110)], 10.0),
        ([(0, 100), (30, 200), (90, 207)], 7.0),
        ([(0, 100), (31, 200), (90, 207)], 107.0),
        ([(0, 100), (10, 3), (20, 5)], 5.0),
        ([(0, 100), (10, 101), (20, 3), (30, 5)], 6.0),
        ([(0, 1), (10, 0), (20, 1)], 1.0),
        ([(0, 3), (10, 0)], 0.0),
        ([(0, 100), (600, 300)], 20.0),
        ([(0, 100), (600, 0), (610, 6)], 6.0),
    ],
)
def test_the_growth_of_a_counter_is_the_sum_of_its_increments_within_the_window(
    readings: list[TimedValue], expected: float
) -> None:
    assert grown(readings, len(readings) - 1, 60.0) == expected
    later: list[TimedValue] = [*readings, (1000.0, 1e6)]
    assert grown(later, len(readings) - 1, 60.0) == expected, "later readings are not counted"


def test_a_sample_is_added_once_and_not_after_its_time_was_folded() -> None:
    made = SampleSeries([])
    assert made.add(HOT, (10.0, 1.0)) is True
    assert made.add(HOT, (10.0, 1.0)) is False
    assert made.add(HOT, (10.0, 2.0)) is True
    assert made.add(HOT, (5.0, 3.0)) is True
    assert made.samples == [(5.0, 3.0), (10.0, 1.0), (10.0, 2.0)]
    assert made.add(HOT, (400.0, 4.0)) is True
    made.fold(HOT)
    assert made.base_s == 400.0 - LATE_S
    assert made.add(HOT, (100.0, 1.0)) is False
    assert made.add(HOT, (100.5, 1.0)) is True
    assert made.samples == [(10.0, 2.0), (100.5, 1.0), (400.0, 4.0)]


def test_samples_are_folded_once_no_late_one_can_precede_them() -> None:
    made = SampleSeries([])
    made.fold(HOT)
    assert made == SampleSeries([])
    made = series(HOT, [(0, 85), (10, 95), (20, 85), (320, 85), (330, 1)])
    made.fold(HOT)
    assert made.base_s == 30.0
    assert made.base == (LevelState(True, 0, 20), LevelState(True, 10, 10))
    assert made.levels(HOT) == (LevelState(True, 0, 320), LevelState(False, 10, 10))
    before = made.dump()
    made.fold(HOT)
    assert made.dump() == before


def test_a_value_is_never_mistaken_for_a_time() -> None:
    hot = Rule("heat", RuleKind.LEVEL, "heat", "test", degraded=Bound(1e6), clear_s=20)
    made = series(hot, [(0, 1e6), (10, 1e6), (330, 2e6)])
    made.fold(hot)
    assert made.base == (LevelState(True, 0, 10), NEVER)


@pytest.mark.parametrize(
    ("rule", "oldest_s"),
    [
        (Rule("a", RuleKind.LEVEL, "a", "test", degraded=Bound(5), period_s=40, window_s=200), 630),
        (Rule("a", RuleKind.LEVEL, "a", "test", degraded=Bound(5, for_s=90)), 610),
        (Rule("a", RuleKind.LEVEL, "a", "test", unhealthy=Bound(5, for_s=90)), 610),
        (Rule("a", RuleKind.LEVEL, "a", "test", degraded=Bound(5, need=2, of=6), period_s=10), 630),
        (Rule("a", RuleKind.LEVEL, "a", "test", degraded=Bound(5, need=2, of=40)), 310),
        (Rule("a", RuleKind.LEVEL, "a", "test", degraded=Bound(5, need=2, of=2), period_s=40), 630),
        (Rule("a", RuleKind.LEVEL, "a", "test", degraded=Bound(5, for_s=90), period_s=3), 600),
        (Rule("a", RuleKind.RATE, "a", "test", degraded=Bound(5), window_s=90), 600),
        (Rule("a", RuleKind.RATE, "a", "test", degraded=Bound(5, for_s=90), window_s=90), 510),
        (
            Rule(
                "a", RuleKind.STATE, "a", "test", states={1: CheckState("b", Level.DEGRADED, Action.NONE, 90)}
            ),
            610,
        ),
        (STATE, 630),
    ],
)
def test_one_sample_is_kept_before_those_that_a_window_can_include(rule: Rule, oldest_s: float) -> None:
    made = SampleSeries([])
    for n in range(101):
        made.add(rule, (10.0 * n, n % 2))
        made.fold(rule)
    assert made.base_s == 700.0
    assert made.samples == [(10.0 * n, n % 2) for n in range(int(oldest_s) // 10, 101)]


@pytest.mark.parametrize(("newest", "oldest_s"), [(36, 0.0), (37, 0.0), (38, 10.0), (39, 20.0)])
def test_the_oldest_sample_is_dropped_when_a_newer_one_can_replace_it(newest: int, oldest_s: float) -> None:
    made = series(HOT, [(10.0 * n, n) for n in range(newest + 1)])
    made.fold(HOT)
    assert made.samples[0][0] == oldest_s


def test_equal_readings_are_thinned_once_settled_unless_the_rule_counts_samples_or_time() -> None:
    seen: list[TimedValue] = [
        (0, 6), (10, 5), (20, 5), (30, 5), (40, 6), (50, 5), (51, 5), (52, 5), (350, 5),
    ]  # fmt: skip
    made = SampleSeries(list(seen))
    made.fold(COUNTER)
    assert made.samples == [
        (0, 6), (10, 5), (30, 5), (40, 6), (50, 5), (51, 5), (52, 5), (350, 5),
    ]  # fmt: skip
    often = replace(COUNTER, degraded=Bound(50, need=2, of=3))
    long = replace(COUNTER, unhealthy=Bound(50, for_s=20))
    for rule in (HOT, STATE, often, long):
        made = SampleSeries(list(seen))
        made.fold(rule)
        assert made.samples == seen


def test_a_long_run_of_equal_readings_is_held_as_its_first_and_its_last() -> None:
    made = SampleSeries([])
    wide = replace(COUNTER, window_s=3600)
    for n in range(101):
        made.add(wide, (10.0 * n, 1))
        made.fold(wide)
    assert made.samples == [(0.0, 1), *((10.0 * n, 1) for n in range(70, 101))]


def test_only_the_newest_samples_are_held_however_fast_they_arrive() -> None:
    made = SampleSeries([])
    seen = [(n / 100, float(n % 7)) for n in range(MAX_SAMPLES + 3)]
    for each in seen:
        made.add(HOT, each)
        made.fold(HOT)
    assert made.samples == seen[3:]
    assert made.base_s == seen[3][0]


def test_a_series_is_stored_as_plain_json_and_restored_unchanged() -> None:
    fresh = series(HOT, [(5, 85)])
    assert fresh.dump() == [None, [[False, 0.0, None], [False, 0.0, None]], [[5, 85]]]
    folded = series(HOT, [(0, 85), (10, 95), (330, 85)])
    folded.fold(HOT)
    assert folded.dump() == [30, [[True, 0, 10], [True, 10, 10]], [[0, 85], [10, 95], [330, 85]]]
    for each in (fresh, folded):
        restored = SampleSeries.load(json.loads(json.dumps(each.dump())))
        assert restored == SampleSeries(each.samples, each.base_s, each.base)
        assert restored.levels(HOT) == each.levels(HOT)


def test_a_stored_series_is_sorted_and_bounded_when_it_is_read() -> None:
    flags = [[1, "2", "3"], [0, 4, None]]
    made = SampleSeries.load(["7", flags, [[9, "1"], ["8", 2]]])
    assert made == SampleSeries(
        [(8.0, 2.0), (9.0, 1.0)], 7.0, (LevelState(True, 2.0, 3.0), LevelState(False, 4.0, -inf))
    )
    assert [type(each) for state in made.base for each in (state.active, state.since_s)] == [bool, float] * 2
    many = [[n, 0] for n in range(MAX_SAMPLES + 1)]
    assert len(SampleSeries.load([None, flags, many]).samples) == MAX_SAMPLES


@pytest.mark.parametrize(
    "raw", [[None, []], [None, [], []], [None, [[True, 0.0]] * 2, []], [None, None, None]]
)
def test_a_malformed_stored_series_is_refused(raw: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        SampleSeries.load(raw)
