"""The complete finding of one event: its cause, its remedy, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf

import pytest

from nodeagent.evaluation.bursts import EventBursts, TimeOff
from nodeagent.evaluation.events import EndMarks, event_finding
from nodeagent.evaluation.samples import LATE_S
from nodeagent.model import Action, HealthFinding, Level
from nodeagent.policy.loading import shipped
from nodeagent.policy.rules import Clears, HealthPolicy, Recurs, Rule, RuleKind
from tests.unit.nodeagent.evaluation.world import DAY_S, POLICY, REBOOT, RESET, meaning

WORLD = replace(
    POLICY,
    rules={
        **POLICY.rules,
        "oom": Rule(
            "oom", RuleKind.EVENT, "oom", "test",
            meaning=meaning(Level.DEGRADED, Action.RESTART_APP, hold_s=90.0),
        ),
    },
    sxids={5: meaning(Level.UNHEALTHY, Action.REBOOT_NODE, Clears.BOOT, hold_s=0.0)},
    xids={
        **POLICY.xids,
        31: meaning(
            Level.DEGRADED, Action.RESTART_APP, recurs=Recurs(3, 3600.0, Level.UNHEALTHY, Action.RESET_GPU),
        ),
        62: meaning(
            Level.DEGRADED, Action.NONE, Clears.RESET, 0.0, Recurs(2, DAY_S, Level.DEGRADED, Action.NONE),
        ),
    },
)  # fmt: skip
Finding = tuple[HealthFinding | None, float]


def event(
    code: int,
    at_s: list[float] | Mapping[str, list[float]],
    now_s: float,
    *,
    check: str = "xid",
    verdicts: Mapping[str, list[float]] | None = None,
    marks: EndMarks | None = None,
    branch: int | None = 575,
    policy: HealthPolicy = WORLD,
) -> Finding:
    by_variant = at_s if isinstance(at_s, Mapping) else {"": at_s}
    seen = {
        name: EventBursts(
            [(each, each) for each in times], [(times[-1], f"line {name}")], {"kmsg": times[-1]}
        )
        for name, times in by_variant.items()
    }
    said = {name: EventBursts([(each, each) for each in times]) for name, times in (verdicts or {}).items()}
    return event_finding("gpu/0", check, code, seen, said, marks or EndMarks(), policy, branch, now_s)


def expected(
    why: str,
    level: Level,
    action: Action,
    clears: str,
    *,
    check: str = "xid",
    code: int | None,
    since_s: float = 100.0,
    last_s: float = 100.0,
    evidence: tuple[str, ...] = ("line ",),
    lasting: bool = False,
    overridden: str = "",
) -> HealthFinding:
    return HealthFinding(
        entity="gpu/0",
        check=check,
        code=code,
        level=level,
        action=action,
        since_s=since_s,
        last_s=last_s,
        why=why,
        evidence=evidence,
        clears=clears,
        sources=("kmsg",),
        lasting=lasting,
        overridden=overridden,
        of_events=True,
        remedy=next(each for start, each in REMEDIES.items() if clears.startswith(start))
        if lasting
        else Action.NONE,
    )


REMEDIES = {
    "a reset": Action.RESET_GPU,
    "a reboot": Action.REBOOT_NODE,
    "holdfast node clear": Action.REPLACE,
}


BY_RESET = "a reset of the GPU or a reboot and 10 min without another"
BY_EXCHANGE = "holdfast node clear, or another GPU in its place and 10 min without another"
BY_BOOT = "a reboot and 10 min without another"
BY_TIME = "10 min without another"


@pytest.mark.parametrize(
    ("found", "finding", "ends_s"),
    [
        (
            partial(event, 48, [100], 101),
            expected("Xid 48: it", *RESET, BY_RESET, code=48, lasting=True),
            inf,
        ),
        (
            partial(event, 79, [100], 101),
            expected("Xid 79: it", *REBOOT, BY_BOOT, code=79, lasting=True),
            inf,
        ),
        (
            partial(event, 64, [100], 101),
            expected(
                "Xid 64: it", Level.UNHEALTHY, Action.REPLACE,
                BY_EXCHANGE,
                code=64, lasting=True,
            ),
            inf,
        ),
        (
            partial(event, 31, [100], 101),
            expected("Xid 31: it", Level.DEGRADED, Action.RESTART_APP, BY_TIME, code=31),
            700,
        ),
        (
            partial(event, 5, [100], 101, check="sxid"),
            expected("SXid 5: it", *REBOOT, "a reboot", check="sxid", code=5, lasting=True),
            inf,
        ),
        (
            partial(event, 0, [100], 101, check="oom"),
            expected(
                "it", Level.DEGRADED, Action.RESTART_APP, "90 s without another", check="oom", code=None
            ),
            190,
        ),
        (
            partial(event, 154, {"reboot_node": [50], "reset_gpu": [100]}, 101),
            expected(
                "Xid 154: it", *RESET, BY_RESET, code=154, evidence=("line reset_gpu",), lasting=True,
                since_s=50,
            ),
            inf,
        ),
        (
            partial(event, 154, {"reboot_node": [100], "reset_gpu": [100]}, 101),
            expected(
                "Xid 154: it", *RESET, BY_RESET, code=154, evidence=("line reset_gpu",), lasting=True
            ),
            inf,
        ),
    ],
)  # fmt: skip
def test_a_finding_names_the_event_its_remedy_and_its_clearing_condition(
    found: Callable[[], Finding], finding: HealthFinding, ends_s: float
) -> None:
    assert found() == (finding, ends_s)


@pytest.mark.parametrize(
    ("found", "finding"),
    [
        (
            partial(event, 48, [100], 101, verdicts={"reboot_node": [101]}),
            expected(
                "Xid 48: it; the driver recommends reboot_node", *REBOOT, BY_BOOT, code=48, lasting=True,
                overridden="driver",
            ),
        ),
        (  # a driver this old sends no verdict with this code
            partial(event, 48, [100], 101, verdicts={"reboot_node": [101]}, branch=564),
            expected("Xid 48: it", *RESET, BY_RESET, code=48, lasting=True),
        ),
        (  # no driver sends a verdict with this code
            partial(event, 31, [100], 101, verdicts={"reboot_node": [101]}, branch=None),
            expected("Xid 31: it", Level.DEGRADED, Action.RESTART_APP, BY_TIME, code=31),
        ),
        (  # the number of an SXid is not that of an Xid
            partial(event, 5, [100], 101, check="sxid", verdicts={"reset_gpu": [101]}),
            expected("SXid 5: it", *REBOOT, "a reboot", check="sxid", code=5, lasting=True),
        ),
        (
            partial(event, 95, [100], 101, verdicts={"reboot_node": [101]}),
            expected(
                "Xid 95: it", Level.DEGRADED, Action.NONE, BY_TIME, code=95, overridden="operator"
            ),
        ),
        (  # the recurrence is worse than the driver's verdict
            partial(
                event, 79, [100, 1000], 1001, verdicts={"reset_gpu": [1001]}, marks=EndMarks(boots=[500])
            ),
            expected(
                "Xid 79: it; the driver recommends reset_gpu; 2 times within 7 d",
                Level.UNHEALTHY, Action.REPLACE, BY_EXCHANGE, code=79, last_s=1000, lasting=True,
                overridden="driver",
            ),
        ),
    ],
)  # fmt: skip
def test_the_operator_takes_precedence_over_the_driver_and_the_driver_over_the_table(
    found: Callable[[], Finding], finding: HealthFinding
) -> None:
    assert found()[0] == finding


@pytest.mark.parametrize(
    ("found", "finding", "ends_s"),
    [
        (
            partial(event, 31, [100, 1900, 3700], 3701),
            expected(
                "Xid 31: it; 3 times within 1 h", *RESET, BY_RESET, code=31, since_s=3700, last_s=3700,
                lasting=True,
            ),
            inf,
        ),
        (  # the first is no longer within the hour
            partial(event, 31, [99, 1900, 3700], 3701),
            expected(
                "Xid 31: it", Level.DEGRADED, Action.RESTART_APP, BY_TIME, code=31, since_s=3700, last_s=3700
            ),
            4300,
        ),
        (  # bursts of all variants count
            partial(event, 79, {"a": [100], "b": [1000]}, 1001, marks=EndMarks(boots=[500])),
            expected(
                "Xid 79: it; 2 times within 7 d", Level.UNHEALTHY, Action.REPLACE, BY_EXCHANGE, code=79,
                last_s=1000, evidence=("line a", "line b"), lasting=True,
            ),
            inf,  # the second variant came in the quiet time after the boot, so the boot has remedied nothing
        ),
        (  # bursts of another variant do not count
            partial(event, 13, {"a": [100], "b": [1000]}, 1001),
            expected(
                "Xid 13: it", Level.HEALTHY, Action.RESTART_APP, BY_TIME, code=13,
                since_s=1000, last_s=1000, evidence=("line a", "line b"),
            ),
            1600,
        ),
        (
            partial(event, 13, {"a": [100, 1000], "b": [400]}, 1001),
            expected(
                "Xid 13: it; 2 times within 1 d", Level.DEGRADED, Action.CONTACT_SUPPORT,
                "1 d without another", code=13,
                since_s=1000, last_s=1000, evidence=("line b", "line a"),
            ),
            1000 + DAY_S,
        ),
        (  # the recurrence changes nothing, so it is not mentioned
            partial(event, 62, [100, 1000], 1001),
            expected(
                "Xid 62: it", Level.DEGRADED, Action.NONE, "a reset of the GPU or a reboot", code=62,
                last_s=1000, lasting=True,
            ),
            inf,
        ),
    ],
)  # fmt: skip
def test_a_recurring_event_is_judged_by_its_recurrence_and_lasts_as_long_as_the_window(
    found: Callable[[], Finding], finding: HealthFinding, ends_s: float
) -> None:
    assert found() == (finding, ends_s)


@pytest.mark.parametrize(
    ("code", "marks", "ends_s"),
    [
        (31, EndMarks(resets=[150], boots=[150], replaced=[150]), 700),
        (31, EndMarks(cleared=[150]), -inf),
        (48, EndMarks(resets=[50, 100, 150, 160]), 750),
        (48, EndMarks(boots=[150]), 750),
        (48, EndMarks(replaced=[150]), 750),
        (48, EndMarks(resets=[170], boots=[160], replaced=[150]), 750),
        (48, EndMarks(cleared=[100]), inf),
        (48, EndMarks(cleared=[100.5]), -inf),
        (79, EndMarks(resets=[150]), inf),
        (79, EndMarks(boots=[150], replaced=[160]), 750),
        (79, EndMarks(replaced=[150]), 750),
        (64, EndMarks(resets=[150], boots=[150]), inf),
        (64, EndMarks(replaced=[150]), 750),
        (62, EndMarks(resets=[150]), 150),
    ],
)
def test_a_finding_ends_at_its_first_clearing_mark_plus_the_hold_time(
    code: int, marks: EndMarks, ends_s: float
) -> None:
    before = min(max(ends_s - 0.5, 100.0), 1e9)
    found, until_s = event(code, [100], before, marks=marks)
    if ends_s == -inf:
        assert (found, until_s) == (None, inf)
        return
    assert found is not None
    assert (found.lasting, until_s) == (ends_s == inf, ends_s)
    if ends_s < inf:
        assert event(code, [100], ends_s, marks=marks) == (None, inf)


def test_the_worst_of_the_variants_that_have_not_ended_is_reported_until_the_first_of_them_ends() -> None:
    shown = replace(WORLD, xids={154: WORLD.xids[154], 31: meaning(Level.DEGRADED, Action.RESTART_APP)})
    both = {"a": [100.0], "b": [400.0]}
    found, ends_s = event(31, both, 401, policy=shown)
    assert (found is not None, ends_s) == (True, 700)
    found, ends_s = event(31, both, 700, policy=shown)
    assert (found is not None, ends_s) == (True, 1000)
    assert event(31, both, 1000, policy=shown) == (None, inf)


def test_the_evidence_is_the_newest_three_texts_and_the_sources_are_those_of_all_variants() -> None:
    seen = {
        "a": EventBursts([(100.0, 130.0)], [(100.0, "one"), (130.0, "four")], {"nvml": 130.0, "zoo": 130.0}),
        "b": EventBursts(
            [(110.0, 120.0)], [(110.0, "two"), (120.0, "three")], {"kmsg": 120.0, "nvml": 120.0}
        ),
    }
    found, _ = event_finding("gpu/0", "xid", 31, seen, {}, EndMarks(), WORLD, 575, 131.0)
    assert found is not None
    assert (found.since_s, found.last_s) == (100.0, 130.0)
    assert found.evidence == ("two", "three", "four")
    assert found.sources == ("kmsg", "nvml", "zoo")


HARMLESS = "0x00000001,0x00000000,0x00000000,0x00000000,0x00000000,0x00000000,0x00000000"


@pytest.mark.parametrize(
    ("variants", "level"),
    [
        ({"": [100.0]}, Level.DEGRADED),
        ({HARMLESS: [100.0]}, Level.HEALTHY),
        ({"": [101.0], HARMLESS: [100.0]}, Level.HEALTHY),
        ({"": [100.0, 900.0], HARMLESS: [100.0, 900.0]}, Level.HEALTHY),
        ({"": [100.0, 900.0], HARMLESS: [100.0]}, Level.DEGRADED),
    ],
)
def test_a_report_without_registers_counts_only_if_no_other_sensor_has_reported_them(
    variants: dict[str, list[float]], level: Level
) -> None:
    found, _ = event(74, variants, max(max(times) for times in variants.values()) + 1, policy=shipped())
    assert found is not None
    assert found.level is level


SEVERE = "0x00000010,0x00000000,0x00000000,0x00000000,0x00000000,0x00000000,0x00000000"
ALSO_HARMLESS = "0x00800000,0x00000000,0x00000000,0x00000000,0x00000000,0x00000000,0x00000000"


@pytest.mark.parametrize(("severe_s", "harmless_s"), [(100.0, 500.0), (500.0, 100.0)])
def test_the_worst_variant_counts_whatever_its_name_and_time(severe_s: float, harmless_s: float) -> None:
    found, _ = event(74, {SEVERE: [severe_s], ALSO_HARMLESS: [harmless_s]}, 501, policy=shipped())
    assert found is not None
    assert (found.level, found.action) == RESET


@pytest.mark.parametrize(("branch", "level"), [(570, Level.HEALTHY), (575, Level.UNHEALTHY)])
def test_a_report_is_decoded_in_the_layout_of_the_drivers_branch(branch: int, level: Level) -> None:
    of_the_new_layout = {"SAW_MVB Nonfatal 0x00000001 0x00000002": [100.0]}
    found, _ = event(144, of_the_new_layout, 101, branch=branch, policy=shipped())
    assert found is not None
    assert found.level is level


REPLACE = (Level.UNHEALTHY, Action.REPLACE)


@pytest.mark.parametrize(
    ("at_s", "marks", "level_and_action"),
    [
        ([100, 1000], EndMarks(), REBOOT),  # an agent that was restarted has missed the signs in between
        ([100.0 + 240 * n for n in range(60)], EndMarks(), REBOOT),
        ([100, 1000], EndMarks(resets=[500]), REBOOT),  # a reset is not its remedy
        ([100, 1000], EndMarks(boots=[50, 1001]), REBOOT),
        ([100, 1000], EndMarks(boots=[500]), REPLACE),
        ([100, 1000], EndMarks(over=[500]), REPLACE),
        ([100, 3699], EndMarks(), REBOOT),
        ([100, 3700], EndMarks(), REPLACE),  # what ended it was not seen
        ([100, 1000, 9000], EndMarks(), REPLACE),
        ([100, 9 * DAY_S], EndMarks(boots=[8 * DAY_S]), REBOOT),
        ([100, 9 * DAY_S], EndMarks(boots=[8 * DAY_S], off=TimeOff([(160, 8 * DAY_S)])), REPLACE),
        (
            [100, 3000 + DAY_S],
            EndMarks(off=TimeOff([(500, 500 + DAY_S)])),
            REBOOT,
        ),  # no long silence while it ran
    ],
)
def test_a_fault_recurs_only_after_its_remedy_or_a_long_silence(
    at_s: list[float], marks: EndMarks, level_and_action: tuple[Level, Action]
) -> None:
    found, _ = event(79, at_s, at_s[-1] + LATE_S, marks=marks)
    assert found is not None
    assert (found.level, found.action) == level_and_action


def test_each_burst_of_a_fault_that_time_ends_is_an_occurrence() -> None:
    found, _ = event(13, {"a": [100, 400]}, 401)
    assert found is not None
    assert (found.level, found.action) == (Level.DEGRADED, Action.CONTACT_SUPPORT)
