from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.quotas import MAX_EVENTS, MAX_VARIANTS
from nodeagent.model import Action, Level, Observation
from tests.unit.nodeagent.evaluation.world import (
    DAY_S,
    POLICY,
    REBOOT,
    RESET,
    evaluator,
    mark,
    of,
    said,
    sample,
    standing,
    xid,
)

# -- events


def test_reports_of_two_sensors_are_one_finding_that_names_both() -> None:
    seen = [xid(79, 1.0, source="nvml-events"), xid(79, 1.002, source="kmsg", text="NVRM: Xid 79")]
    [found] = standing(seen, 2.0)
    assert (found.level, found.action, found.sources) == (*REBOOT, ("kmsg", "nvml-events"))
    assert found.evidence == ("NVRM: Xid 79",)


def test_a_more_detailed_report_takes_precedence_over_a_less_detailed_one() -> None:
    seen = [xid(13, 1.0, source="nvml-events"), xid(13, 1.1, "GPC 1 TPC 2"), xid(13, 1000.0, "GPC 1 TPC 2")]
    [found] = standing(seen, 1001.0)
    assert (found.level, found.action) == (Level.DEGRADED, Action.CONTACT_SUPPORT)
    assert "2 times within 1 d" in found.why


def test_the_same_code_at_different_locations_is_not_a_recurrence() -> None:
    seen = [xid(13, 1.0, "GPC 1 TPC 2"), xid(13, 1000.0, "GPC 1 TPC 3")]
    assert said(seen, 1001.0) == (Level.HEALTHY, Action.RESTART_APP)


def test_a_storm_is_one_burst_and_not_a_recurrence() -> None:
    seen = [xid(79, at / 5) for at in range(3000)]
    assert said(seen, 601.0) == REBOOT
    assert said([*seen, xid(79, 5000.0)], 5001.0) == (Level.UNHEALTHY, Action.REPLACE)


@pytest.mark.parametrize(
    ("code", "ends", "does_not"),
    [
        (48, "gpu_reset", None),
        (48, "boot", None),
        (48, "replaced", None),
        (48, "cleared", None),
        (79, "boot", "gpu_reset"),
        (79, "replaced", "gpu_reset"),
        (79, "cleared", "gpu_reset"),
        (64, "replaced", "boot"),
        (64, "cleared", "gpu_reset"),
    ],
)
def test_a_finding_ends_only_by_its_clearing_condition_and_its_hold_time(
    code: int, ends: str, does_not: str | None
) -> None:
    seen = [xid(code, 100.0)]
    if does_not:
        assert said([*seen, mark(does_not, 200.0)], 100 * DAY_S)[0] is Level.UNHEALTHY
    assert said([*seen, mark(ends, 50.0)], 1000.0)[0] is Level.UNHEALTHY, "the mark is older than the fault"
    ended = [*seen, mark(ends, 200.0)]
    if ends != "cleared":
        assert said(ended, 799.0)[0] is Level.UNHEALTHY
    assert said(ended, 800.0) == (Level.HEALTHY, Action.NONE)
    assert said([*ended, xid(code, 700.0)], 800.0)[0] is Level.UNHEALTHY, "the fault came again"


def test_time_alone_does_not_end_a_hardware_fault() -> None:
    assert said([xid(79, 1.0)], 1000 * DAY_S) == REBOOT


def lasting(seen: Iterable[Observation], now_s: float) -> list[bool]:
    return [each.lasting for each in standing(seen, now_s)]


def test_a_finding_lasts_until_a_remedy_is_seen_and_then_only_for_its_hold_time() -> None:
    assert lasting([xid(79, 1.0)], 2.0) == [True]
    assert lasting([xid(79, 1.0), mark("boot", 5.0)], 6.0) == [False]
    assert lasting([xid(13, 1.0)], 2.0) == [False], "the finding clears after a time"
    assert lasting([sample("verdict", 0.0, 1)], 1.0) == [True]
    assert lasting([sample("verdict", 0.0, 1), sample("verdict", 10.0, 0)], 11.0) == [False]


# -- the driver's verdict


def test_the_drivers_verdict_takes_precedence_over_the_table() -> None:
    seen = [xid(48, 10.0), xid(154, 10.5, "reboot_node")]
    assert said(seen, 11.0) == REBOOT
    [first, *_] = standing(seen, 11.0)
    assert first.overridden == "driver"
    assert of(79, [xid(79, 10.0), xid(154, 10.5, "reset_gpu")], 11.0) == RESET
    assert of(79, [xid(79, 10.0), xid(154, 9.5, "reset_gpu")], 11.0) == REBOOT, "it may concern another fault"


def test_an_older_driver_sends_no_verdict() -> None:
    seen = [xid(48, 10.0), xid(154, 10.5, "reboot_node")]
    assert of(48, seen, 11.0, branch=550) == RESET


def test_a_verdict_about_another_code_is_not_used() -> None:
    assert of(48, [xid(48, 1000.0), xid(154, 10.0, "reboot_node")], 1001.0) == RESET


def test_the_drivers_newest_verdict_counts() -> None:
    assert said([xid(154, 10.0, "reboot_node"), xid(154, 500.0, "reset_gpu")], 501.0) == RESET


def test_the_operators_setting_takes_precedence_over_the_drivers_verdict() -> None:
    seen = [xid(95, 10.0), xid(154, 10.5, "reboot_node")]
    [found] = standing(seen, 11.0)
    assert (found.code, found.level, found.overridden) == (95, Level.DEGRADED, "operator")
    assert said([*seen, xid(46, 11.0)], 12.0) == REBOOT, "the verdict may concern the other fault"
    assert said([*seen, xid(154, 500.0, "reset_gpu")], 501.0) == RESET, "the verdict has another cause"


def test_a_later_driver_verdict_of_none_ends_the_finding() -> None:
    seen = [xid(48, 10.0), xid(154, 11.0, "reset_gpu"), xid(154, 500.0, "none")]
    assert said(seen, 1099.0) == RESET
    assert said(seen, 1100.0) == (Level.HEALTHY, Action.NONE)


# -- samples


def test_a_level_needs_the_given_number_of_samples() -> None:
    hot = [sample("heat", at * 10.0, value) for at, value in enumerate((20, 4, 20, 4))]
    assert said(hot, 40.0)[0] is Level.HEALTHY
    assert said([*hot, sample("heat", 40.0, 4)], 41.0)[0] is Level.DEGRADED


def test_a_level_with_a_duration_needs_every_sample() -> None:
    hot = [sample("heat", at * 10.0, -1) for at in range(6)]
    assert said(hot, 51.0)[0] is Level.DEGRADED
    assert said([*hot, sample("heat", 60.0, -1)], 61.0) == (Level.UNHEALTHY, Action.CONTACT_SUPPORT)


def test_a_level_falls_only_after_clean_samples() -> None:
    hot = [sample("heat", at * 10.0, 4) for at in range(3)]
    assert said(hot, 10 * DAY_S)[0] is Level.DEGRADED, "a sensor that sees nothing proves nothing"
    between = [*hot, *(sample("heat", 30 + at * 10.0, 8) for at in range(60))]
    assert said(between, 700.0)[0] is Level.DEGRADED, "8 is neither bad nor clean"
    cool = [*hot, *(sample("heat", 30 + at * 10.0, 11) for at in range(11))]
    assert said(cool, 131.0)[0] is Level.DEGRADED
    assert said([*cool, sample("heat", 140.0, 11)], 141.0)[0] is Level.HEALTHY


def test_a_counter_that_falls_is_a_new_baseline_and_not_a_fault() -> None:
    assert (
        said([sample("errors", 0.0, 1e9), sample("errors", 10.0, 3), sample("errors", 20.0, 40)], 21.0)[0]
        is Level.HEALTHY
    )
    grown = [sample("errors", 0.0, 1e9), sample("errors", 10.0, 3), sample("errors", 20.0, 54)]
    assert said(grown, 21.0)[0] is Level.DEGRADED


def test_the_first_reading_of_a_counter_is_not_growth() -> None:
    assert said([sample("errors", 0.0, 1e9)], 1.0)[0] is Level.HEALTHY


def test_the_duration_of_a_state_counts_from_its_first_sample() -> None:
    slow = [sample("verdict", at * 10.0, 2) for at in range(6)]
    assert said(slow, 51.0)[0] is Level.HEALTHY
    assert said([*slow, sample("verdict", 60.0, 2)], 61.0)[0] is Level.DEGRADED
    assert said([sample("verdict", 0.0, 1)], 1.0) == RESET


def test_an_unnamed_state_is_neither_bad_nor_clean() -> None:
    assert said([sample("verdict", 0.0, 99)], 1.0)[0] is Level.HEALTHY
    bad = [sample("verdict", 0.0, 1), *(sample("verdict", 10.0 * at, 99) for at in range(1, 20))]
    assert said(bad, 200.0)[0] is Level.UNHEALTHY


# -- bounds


def test_stored_evidence_is_bounded() -> None:
    made = Evaluator(POLICY)
    for n in range(MAX_EVENTS + 20):
        made.add(Observation(float(n), "xid", f"nfs/{n}", "kmsg", 79.0))
    assert made.dropped == 20, "each refusal is counted"
    for n in range(2 * MAX_VARIANTS):
        made.add(xid(13, float(n), f"GPC {n} TPC 0"))
    assert len(made.dump()["events"]) <= MAX_EVENTS + MAX_VARIANTS
    for n in range(1_000):
        made.add(sample("heat", n * 10.0, float(n % 30)))
    [series] = made.dump()["series"]
    assert len(series[2][2]) < 100


def test_evidence_not_seen_for_long_is_forgotten_unless_it_stands() -> None:
    seen = [sample("verdict", 0.0, 1), sample("heat", 0.0, 50), xid(13, 0.0), xid(79, 0.0)]
    made = evaluator([*seen, xid(46, 1.0), mark("gpu_reset", 2.0)])
    made.forget(601.0)
    kept = made.dump()
    assert [(each[1], each[2]) for each in kept["events"]] == [
        ("xid", 79), ("xid", 46), ("gpu_reset", 0)
    ], "46 stands until 602, and without the reset it would stand again"  # fmt: skip
    assert [each[1] for each in kept["series"]] == ["verdict"]
    made.forget(603.0)
    assert [(each[1], each[2]) for each in made.dump()["events"]] == [("xid", 79), ("gpu_reset", 0)]
    assert [each.check for each in made.findings(1000 * DAY_S)] == ["xid", "verdict"]


def test_an_observation_that_is_not_a_finite_number_is_ignored() -> None:
    made = Evaluator(POLICY)
    for value in (float("nan"), float("inf")):
        assert not made.add(sample("verdict", 0.0, value))
        assert not made.add(sample("heat", value, 1.0))
    assert json.dumps(made.dump(), allow_nan=False)


def test_a_check_that_the_policy_does_not_have_is_ignored() -> None:
    assert not Evaluator(POLICY).add(sample("unheard_of", 0.0, 1.0))
