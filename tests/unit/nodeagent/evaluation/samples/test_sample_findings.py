"""The complete finding of one series of samples, and the sentence about samples that do not decide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.evaluation.samples import (
    NEVER,
    LevelState,
    SampleSeries,
    TimedValue,
    sample_finding,
    why_undecided,
)
from nodeagent.model import Action, HealthFinding, Level
from nodeagent.policy.rules import CLEARED_BY, Bound, CheckState, Rule, RuleKind

MARGIN = Rule(
    "heat", RuleKind.LEVEL, "margin", "test", "°C", period_s=10, below=True,
    degraded=Bound(5, need=3, of=4), unhealthy=Bound(0, for_s=60), clear_at=10, clear_s=120,
    action=Action.CONTACT_SUPPORT, degraded_action=Action.RESTART_APP,
)  # fmt: skip
DISK = Rule("disk", RuleKind.LEVEL, "disk used", "test", "%", degraded=Bound(90), clear_s=60)
LOAD = Rule(
    "load", RuleKind.LEVEL, "load", "test", unhealthy=Bound(90), clear_at=10, clear_s=0,
    action=Action.REBOOT_NODE, degraded_action=Action.RESTART_APP,
)  # fmt: skip
LATE = replace(LOAD, clear_s=60)
ERRORS = Rule(
    "errors", RuleKind.RATE, "errors", "test", period_s=10, window_s=60, degraded=Bound(50),
    unhealthy=Bound(200), clear_at=20, clear_s=100, action=Action.RESET_GPU,
    degraded_action=Action.RESTART_APP,
)  # fmt: skip
REPLAYS = Rule("replays", RuleKind.RATE, "replays", "test", window_s=30, degraded=Bound(5), clear_s=0)
VERDICT = Rule(
    "verdict", RuleKind.STATE, "verdict", "test", period_s=10, clear_s=20,
    states={
        0: CheckState("none", Level.HEALTHY, Action.NONE),
        1: CheckState("reset", Level.UNHEALTHY, Action.RESET_GPU, why="so it says"),
        2: CheckState("slow", Level.DEGRADED, Action.RESTART_APP),
        3: CheckState("idle", Level.HEALTHY, Action.NONE),
        4: CheckState("lost", Level.DEGRADED, Action.REPLACE, for_s=60, why="not on the bus"),
        5: CheckState("hung", Level.DEGRADED, Action.NONE, for_s=60),
    },
)  # fmt: skip
OWN = Rule("recovery_action", RuleKind.STATE, "verdict", "test", clear_s=0, states=VERDICT.states)
HELD = Rule("held", RuleKind.LEVEL, "held", "test", period_s=10, degraded=Bound(5, need=2, of=3, for_s=30))
TWICE = Rule("twice", RuleKind.LEVEL, "twice", "test", degraded=Bound(5, need=2, of=3))
EVENT = Rule("event", RuleKind.EVENT, "event", "test")

DEGRADED, UNHEALTHY = Level.DEGRADED, Level.UNHEALTHY


def series(rule: Rule, seen: list[TimedValue]) -> SampleSeries:
    made = SampleSeries([])
    for each in seen:
        made.add(rule, each)
    return made


@pytest.mark.parametrize(
    ("rule", "seen", "level", "action", "since_s", "last_s", "why", "clears", "lasting"),
    [
        (
            MARGIN, [(0, 4), (10, 3), (20, 2), (30, 4)], DEGRADED, Action.RESTART_APP, 20, 30,
            "margin: 4 °C; the limit is 5 °C in 3 of 4 samples", "more than 10 °C for 120 s", False,
        ),
        (  # neither bad nor clean
            MARGIN, [(0, 4), (10, 3), (20, 2), (30, 8)], DEGRADED, Action.RESTART_APP, 20, 30,
            "margin: 8 °C; the limit is 5 °C in 3 of 4 samples", "more than 10 °C for 120 s", False,
        ),
        (  # clean, but not for long enough
            MARGIN, [(0, 4), (10, 3), (20, 2), (30, 11)], DEGRADED, Action.RESTART_APP, 20, 20,
            "margin: 11 °C; the limit is 5 °C in 3 of 4 samples", "more than 10 °C for 120 s", False,
        ),
        (
            MARGIN, [(0, -1), (30, -1), (60, -2)], UNHEALTHY, Action.CONTACT_SUPPORT, 60, 60,
            "margin: -2 °C; the limit is 0 °C for 60 s", "more than 0 °C for 120 s", False,
        ),
        (DISK, [(0, 90)], DEGRADED, Action.NONE, 0, 0,
         "disk used: 90 %; the limit is 90 %", "less than 90 % for 60 s", False),
        (TWICE, [(0, 7), (5, 8)], DEGRADED, Action.NONE, 5, 5,
         "twice: 8; the limit is 5 in 2 of 3 samples", "less than 5 for 120 s", False),
        (LOAD, [(5, 95)], UNHEALTHY, Action.REBOOT_NODE, 5, 5,
         "load: 95; the limit is 90", "less than 90", True),
        (LATE, [(5, 95), (15, 89)], UNHEALTHY, Action.REBOOT_NODE, 5, 5,
         "load: 89; the limit is 90", "less than 90 for 60 s", False),
        (LOAD, [(5, 95), (15, 89)], DEGRADED, Action.RESTART_APP, 5, 15,
         "load: 89; the limit is 90", "less than 10", False),
        (ERRORS, [(0, 7), (10, 67), (20, 68)], DEGRADED, Action.RESTART_APP, 10, 20,
         "61 errors in 60 s; the limit is 50", "no more than 20 for 100 s", False),
        (ERRORS, [(0, 7), (10, 208)], UNHEALTHY, Action.RESET_GPU, 10, 10,
         "201 errors in 60 s; the limit is 200", "no more than the limit for 100 s", False),
        (REPLAYS, [(0, 0), (10, 6)], DEGRADED, Action.NONE, 10, 10,
         "6 replays in 30 s; the limit is 5", "no more than the limit", False),
        (VERDICT, [(0, 0), (10, 1), (20, 1)], UNHEALTHY, Action.RESET_GPU, 10, 20,
         "verdict is reset: so it says", "none or slow or idle or lost or hung for 20 s", True),
        (VERDICT, [(0, 2)], DEGRADED, Action.RESTART_APP, 0, 0,
         "verdict is slow", "none or idle for 20 s", True),
        (VERDICT, [(0, 2), (10, 0)], DEGRADED, Action.RESTART_APP, 0, 0,
         "verdict was bad until recently and is now none", "none or idle for 20 s", False),
        (VERDICT, [(0, 1), (10, 2)], UNHEALTHY, Action.RESET_GPU, 0, 0,
         "verdict was bad until recently and is now slow",
         "none or slow or idle or lost or hung for 20 s", False),
        (VERDICT, [(0, 1), (10, 99)], UNHEALTHY, Action.RESET_GPU, 0, 10,
         "verdict was bad and is now unknown: 99",
         "none or slow or idle or lost or hung for 20 s", False),
    ],
)  # fmt: skip
def test_a_finding_states_the_value_the_limit_and_the_clearing_condition(
    rule: Rule,
    seen: list[TimedValue],
    level: Level,
    action: Action,
    since_s: float,
    last_s: float,
    why: str,
    clears: str,
    lasting: bool,
) -> None:
    found = sample_finding("gpu/0", rule, series(rule, seen), {"sysfs", "nvml", "kmsg"}, "as read")
    assert found == HealthFinding(
        entity="gpu/0",
        check=rule.check,
        code=None,
        level=level,
        action=action,
        since_s=since_s,
        last_s=last_s,
        why=why,
        evidence=("as read",),
        clears=clears,
        sources=("kmsg", "nvml", "sysfs"),
        lasting=lasting,
        overridden="",
        remedy=action if lasting and action in CLEARED_BY else Action.NONE,
    )


def test_a_finding_about_the_drivers_own_verdict_is_marked_so_and_has_evidence_only_with_a_text() -> None:
    assert sample_finding("gpu/0", OWN, series(OWN, [(3, 1)]), ["nvml"], "") == HealthFinding(
        entity="gpu/0",
        check="recovery_action",
        code=None,
        level=Level.UNHEALTHY,
        action=Action.RESET_GPU,
        since_s=3,
        last_s=3,
        why="verdict is reset: so it says",
        evidence=(),
        clears="none or slow or idle or lost or hung",
        sources=("nvml",),
        lasting=True,
        overridden="driver",
        remedy=Action.RESET_GPU,
    )


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        (MARGIN, []),
        (MARGIN, [(0, 4), (10, 3)]),
        (DISK, [(0, 89.9)]),
        (LOAD, [(0, 95), (10, 9)]),
        (ERRORS, [(0, 7), (10, 57)]),
        (VERDICT, [(0, 0)]),
        (VERDICT, [(0, 99)]),
        (VERDICT, [(0, 1), (20, 0)]),
    ],
)
def test_there_is_no_finding_below_the_limits_or_after_enough_clean_samples(
    rule: Rule, seen: list[TimedValue]
) -> None:
    assert sample_finding("gpu/0", rule, series(rule, seen), ["nvml"], "as read") is None


def test_the_action_of_a_state_is_the_costliest_at_its_level_among_the_samples() -> None:
    slow_and_lost = series(VERDICT, [(0, 4), (30, 4), (60, 4), (70, 2), (80, 1), (90, 99)])
    found = sample_finding("gpu/0", VERDICT, slow_and_lost, ["nvml"], "")
    assert found is not None
    assert (found.level, found.action) == (Level.UNHEALTHY, Action.RESET_GPU)
    only_degraded = series(VERDICT, [(0, 4), (30, 4), (60, 4), (70, 2)])
    found = sample_finding("gpu/0", VERDICT, only_degraded, ["nvml"], "")
    assert found is not None
    assert (found.level, found.action) == (Level.DEGRADED, Action.REPLACE)


@pytest.mark.parametrize(
    ("rule", "seen", "why"),
    [
        (MARGIN, [], ""),
        (EVENT, [(0, 1)], ""),
        (MARGIN, [(0, 6)], ""),
        (MARGIN, [(0, 5)], "margin: 5 °C (a fault in 3 of 4 samples, one every 10 s)"),
        (MARGIN, [(0, 4), (10, 4), (20, 4)], ""),
        (MARGIN, [(0, 4), (10, 4), (20, -1)], "margin: -1 °C (a fault for 60 s)"),
        (MARGIN, [(0, -1), (30, -1), (60, -1)], ""),
        (MARGIN, [(0, -1), (31, -1), (60, -1)], "margin: -1 °C (a fault for 60 s)"),
        (HELD, [(0, 4)], ""),
        (HELD, [(0, 5)], "held: 5 (a fault in 2 of 3 samples, one every 10 s and for 30 s)"),
        (HELD, [(0, 5), (29, 6)], "held: 6 (a fault in 2 of 3 samples, one every 10 s and for 30 s)"),
        (HELD, [(0, 5), (30, 6)], ""),
        (ERRORS, [(0, 7)], "errors: one reading of a counter does not show its growth"),
        (REPLAYS, [(0, 7)], ""),
        (ERRORS, [(0, 7), (0, 99)], ""),
        (ERRORS, [(0, 7), (30, 32)], ""),
        (ERRORS, [(0, 7), (30, 33)], "26 errors in 30 s (a fault above 50 in 60 s)"),
        (ERRORS, [(0, 7), (10, 107)], "100 errors in 10 s (a fault above 200 in 60 s)"),
        (ERRORS, [(1000, 7), (1030, 33)], "26 errors in 30 s (a fault above 50 in 60 s)"),
        (ERRORS, [(0, 7), (1, 8)], "1 error in 1 s (a fault above 50 in 60 s)"),
        (ERRORS, [(0, 7), (60, 57)], ""),
        (ERRORS, [(0, 0), (60, 0), (90, 40)], ""),
        (VERDICT, [(0, 0)], ""),
        (VERDICT, [(0, 99)], ""),
        (VERDICT, [(0, 1)], ""),
        (VERDICT, [(0, 4), (30, 4), (59, 4)], "verdict is lost: not on the bus (a fault after 60 s)"),
        (VERDICT, [(0, 4), (30, 4), (60, 4)], ""),
        (VERDICT, [(0, 4), (7200, 4)], "verdict is lost: not on the bus (a fault after 60 s)"),
        (VERDICT, [(0, 4), (30, 5), (60, 4)], ""),
        (VERDICT, [(0, 5)], "verdict is hung (a fault after 60 s)"),
    ],
)
def test_samples_that_may_still_become_a_fault_are_undecided_with_a_reason(
    rule: Rule, seen: list[TimedValue], why: str
) -> None:
    assert why_undecided(rule, seen) == why


def test_a_state_of_which_an_earlier_agent_stored_only_the_level_has_the_costliest_action_of_that_level() -> (
    None
):
    bad = LevelState(True, 50.0, 400.0)
    found = sample_finding("gpu/0", VERDICT, SampleSeries([(400.0, 99)], 100.0, (bad, NEVER)), [], "")
    assert found is not None
    assert (found.level, found.action, found.since_s, found.last_s) == (DEGRADED, Action.REPLACE, 50.0, 400.0)


def test_an_action_outlives_the_samples_that_asked_for_it_until_another_state_has_superseded_it() -> None:
    def action(*seen: TimedValue) -> Action:
        made = SampleSeries([])
        for each in seen:
            made.add(VERDICT, each)
            made.fold(VERDICT)
        found = sample_finding("gpu/0", VERDICT, made, [], "")
        assert found is not None
        return found.action

    lost: list[TimedValue] = [(10.0 * n, 4) for n in range(7)]
    unknown: list[TimedValue] = [(10.0 * n, 99) for n in range(7, 400)]
    assert action(*lost, *unknown) is Action.REPLACE
    slow: list[TimedValue] = [(4000.0 + 10.0 * n, 2) for n in range(60)]
    assert action(*lost, *unknown, *slow[:10]) is Action.REPLACE
    assert action(*lost, *unknown, *slow) is Action.RESTART_APP
    ended: list[TimedValue] = [(4000.0, 0), (4020.0, 0)]
    assert action(*lost, *unknown, *ended, (4030.0, 2)) is Action.RESTART_APP, "another finding"


@pytest.mark.parametrize("gap_s", [10.0, 29.0, 31.0, 130.0, 3600.0])
@pytest.mark.parametrize(("need", "of"), [(2, 2), (3, 3), (3, 4), (2, 5)])
def test_a_fault_that_stands_is_found_however_slowly_its_samples_come(
    gap_s: float, need: int, of: int
) -> None:
    rule = Rule("slow", RuleKind.LEVEL, "slow", "test", period_s=10, unhealthy=Bound(5, need=need, of=of))
    series, found = SampleSeries([]), []
    for n in range(2 * of + 3):
        series.add(rule, (gap_s * n, 9.0))
        series.fold(rule)
        found.append(series.levels(rule)[1].active)
    is_late = gap_s * (need - 1) > 2 * of * rule.period_s
    assert found.index(True) == need - 1 + is_late
    assert all(found[found.index(True) :])


def test_one_bad_sample_before_a_gap_and_one_after_it_are_not_enough() -> None:
    """A driver that is being loaded while the agent stops, and again when it starts."""
    rule = Rule("slow", RuleKind.LEVEL, "slow", "test", period_s=10, unhealthy=Bound(5, need=2, of=2))
    series = SampleSeries([])
    for at_s, value in ((0.0, 0.0), (10.0, 9.0), (3600.0, 9.0), (3610.0, 0.0), (3620.0, 9.0)):
        series.add(rule, (at_s, value))
        assert not series.levels(rule)[1].active
    series.add(rule, (3630.0, 9.0))
    assert series.levels(rule)[1].active
