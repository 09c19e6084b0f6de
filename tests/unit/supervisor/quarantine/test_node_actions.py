"""Each node has exactly this action, with its evidence, reason and time limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.node_report import cost_rank
from supervisor.quarantine import decide, evidence
from supervisor.quarantine.cohorts import Reason
from supervisor.quarantine.model import (
    MAX_EVIDENCE,
    NO_NEW_WORK,
    PREFER_NOT,
    Drain,
    Forget,
    Hold,
    NodeFinding,
    NodePolicy,
    NodeView,
    PastQuarantine,
    Quarantine,
    QuarantineAction,
    Refresh,
    Release,
    Taint,
    Waiver,
)
from supervisor.quarantine.storms import StormState
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    WELL,
    alone,
    bad,
    finding,
    pool,
    recovered,
    report,
    well,
)

AVOIDING = NodePolicy(prefer_away=True)
STORM = StormState(nodes={"a": Reason(NOW_S + 700.0, "a storm")})
XID, PORT = "gpu/0 xid 79", "port/0 down"
XID_WHY = f"{XID} (reboot_node) for 90 s, reported by kmsg, nvml_events"
PORT_WHY = f"{PORT} (contact_support) for 400 s, reported by sysfs"
HELD = Quarantine((XID,), "reboot_node", ("kmsg",), "b1", NOW_S - DAY_S)
WEAK = Quarantine((PORT,), "contact_support", ("sysfs",), "b1", NOW_S - DAY_S, PREFER_NOT)
WAIVED = Waiver((XID,), NOW_S - DAY_S)
AGED = PastQuarantine(NOW_S - 14 * DAY_S, "reboot_node")  # counts half


def out(*findings: NodeFinding, **given: Any) -> NodeView:
    """Return a tainted node with these findings. Without any, it has just recovered."""
    held = replace(HELD, **{key: given.pop(key) for key in ("action", "drain_at_s") if key in given})
    node = bad("a", *findings) if findings else well("a", report=replace(WELL, boot_id="b2"))
    return replace(node, **{"quarantine": held, **given})


def degraded(*findings: NodeFinding, **given: Any) -> NodeView:
    worse = tuple(replace(each, level="degraded") for each in findings or (alone(),))
    return replace(bad("a", *worse), **given)


def taint(why: str, *keys: str, **given: Any) -> Taint:
    made = Taint("a", NO_NEW_WORK, keys, "reboot_node", ("kmsg", "nvml_events"), "b1", why, "7")
    return replace(made, **given)


def hold(why: str, more_s: float) -> Hold:
    return Hold("a", why, NOW_S + more_s)


def alert(why: str) -> Hold:
    return Hold("a", why, alert=True)


AVOID: dict[str, Any] = {"effect": PREFER_NOT, "action": "contact_support", "sources": ("sysfs",)}
WIDE: dict[str, Any] = {"action": "replace", "sources": ("kmsg", "nvml_events", "sysfs")}
CALM = StormState()

NO_POLICY_OR_STORM: dict[str, tuple[NodeView, QuarantineAction | None]] = {
    "well": (well("a"), None),
    "never reported": (well("a", report=None), alert("unknown: no agent has reported")),
    "refused": (well("a", report=None, refused="two machines"), alert("unknown: two machines")),
    "as silent as it may be": (well("a", silent_s=120.0), None),
    "silent": (
        well("a", silent_s=150.4),
        hold("unknown: its agent has not reported for 150 s", 6 * 3600.0 - 150.4),
    ),
    "silent for long": (
        well("a", silent_s=6 * 3600.0),
        alert("unknown: its agent has not reported for 21600 s; for 6 h"),
    ),
    "degraded": (degraded(), None),
    "unhealthy": (bad("a"), taint(XID_WHY, XID)),
    "unhealthy and cordoned": (
        bad("a", cordoned=True),
        hold("cordoned by someone else", 3 * DAY_S - 100.0),
    ),
    "unhealthy and cordoned for long": (
        bad("a", finding(held_s=3 * DAY_S), cordoned=True),
        alert("cordoned by someone else; for 72 h"),
    ),
    "unhealthy, not confirmed": (
        bad("a", finding(held_s=59.0), alone(held_s=100.0)),
        hold(
            f"{XID} (reboot_node) for 59 s, reported by kmsg, nvml_events, and 1 more: not confirmed yet", 1.0
        ),
    ),
    "unhealthy, one finding confirmed": (
        bad("a", finding(), alone(held_s=299.0)),
        taint(XID_WHY, XID),
    ),
    "unhealthy, all findings confirmed": (
        bad("a", finding(), alone(action="replace")),
        taint(f"{XID_WHY}, and 1 more", XID, PORT, **WIDE),
    ),
    "unhealthy, waived": (
        bad("a", finding(held_s=2 * DAY_S), waiver=WAIVED),
        hold("an operator has released it, and no other fault has been found since", 6 * DAY_S),
    ),
    "unhealthy, one of two findings waived": (
        bad("a", finding(held_s=2 * DAY_S), alone(held_s=300.0), waiver=WAIVED),
        taint(
            f"{XID_WHY.replace('90', '172800')}, and 1 more",
            *(XID, PORT),
            **{**WIDE, "action": "reboot_node"},
        ),
    ),
    "avoided, and now unhealthy": (bad("a", quarantine=WEAK), taint(XID_WHY, XID)),
    "avoided, which the operator no longer wants": (
        degraded(quarantine=WEAK),
        Release("a", "degraded nodes are no longer avoided", "7"),
    ),
    "waived, and well for long enough": (
        recovered(well("a", waiver=WAIVED), 3600.0),
        Forget("a", "healthy for long enough, and the waived findings have ended", "7"),
    ),
    "waived, and not well for long enough": (recovered(well("a", waiver=WAIVED), 3599.0), None),
    "out, and nobody works on it": (out(finding(), busy=False), hold(f"out: {XID_WHY}", 2 * DAY_S)),
    "out for longer than a repair takes": (
        out(finding(), busy=False, quarantine=replace(HELD, at_s=NOW_S - 3 * DAY_S)),
        alert(f"out: {XID_WHY}; for 72 h"),
    ),
    "out, and its fault may pass": (
        out(finding(lasting=False)),
        hold(f"out: {XID_WHY}", 2 * DAY_S),
    ),
    "out, and its work has to end": (out(finding()), Drain("a", XID_WHY, "7")),
    "out, and confirmed just now": (
        out(finding(held_s=60.0)),
        Drain("a", XID_WHY.replace("90", "60"), "7"),
    ),
    "out, and one of its faults may pass": (
        out(finding(), finding("gpu/1", lasting=False)),
        taint(f"{XID_WHY}, and 1 more", XID, "gpu/1"),
    ),
    "out, and its work is ending": (
        out(finding(), drain_at_s=NOW_S),
        hold("its work is being ended", 6 * 3600.0),
    ),
    "out, and its work does not end": (
        out(finding(), drain_at_s=NOW_S - 6 * 3600.0),
        alert("its work is being ended; for 6 h"),
    ),
    "out, and cordoned": (
        out(finding(), cordoned=True),
        hold("cordoned by someone else, so its work is left alone", 2 * DAY_S),
    ),
    "out, and its fault is not confirmed": (
        out(finding(held_s=20.0)),
        hold(f"{XID_WHY.replace('90', '20')}: not confirmed yet", 40.0),
    ),
    "out, and one sensor says so": (
        out(finding(sources=("kmsg",), held_s=9000.0)),
        hold(
            f"{XID} (reboot_node) for 9000 s, reported by kmsg: one witness does not justify a drain",
            6 * 3600.0 - 9010.0,
        ),
    ),
    "out, and another fault was found": (
        out(finding(), alone()),
        taint(f"{XID_WHY}, and 1 more", XID, PORT, sources=WIDE["sources"]),
    ),
    "out, and a cheaper fault was found": (
        out(finding("gpu/1", action="reset_gpu")),
        taint(XID_WHY.replace(XID, "gpu/1").replace("reboot_node", "reset_gpu"), XID, "gpu/1"),
    ),
    "out, and the fault needs a costlier remedy": (
        out(finding(action="replace")),
        taint(XID_WHY.replace("reboot_node", "replace"), XID, action="replace"),
    ),
    "out, and healthy for long enough": (
        recovered(out(), 3600.0, boot_id="b2"),
        Release("a", "healthy for 3600 s; lemon score 0.0", "7"),
    ),
    "out, and healthy after two incidents": (
        recovered(out(history=(AGED, replace(AGED, relapse=True))), DAY_S, boot_id="b2"),
        Release("a", "healthy for 86400 s; lemon score 1.5", "7"),
    ),
    "out, and healthy for a while": (
        recovered(out(), 3000.0, boot_id="b2"),
        hold("healthy for 3000 of 3600 s", 600.0),
    ),
    "out, and healthy without a reboot": (
        recovered(out(), 3000.0),
        hold("healthy for 3000 of 14400 s, without a sign of the remedy (reboot_node)", 11400.0),
    ),
    "out, and healthy without a reboot that is not its remedy": (
        recovered(out(action="reset_gpu"), 3000.0),
        hold("healthy for 3000 of 3600 s", 600.0),
    ),
    "out, and healthy for longer than it is out": (
        recovered(out(quarantine=replace(HELD, at_s=NOW_S - 100.0)), DAY_S, boot_id="b2"),
        hold("healthy for 100 of 3600 s", 3500.0),
    ),
    "out, by a clock that was ahead": (
        recovered(out(quarantine=replace(HELD, at_s=NOW_S + 100.0)), DAY_S, boot_id="b2"),
        Refresh("a", "it has a stored time that is later than now: the clock was ahead", "7"),
    ),
    "out, and a sensor cannot measure although its agent counts the time": (
        recovered(out(), DAY_S, blind=("kmsg",)),
        Refresh("a", "its proof of health is counted differently: kmsg cannot measure", "7"),
    ),
    "out, and its sensors can measure again": (
        recovered(out(quarantine=replace(HELD, blind_at_s=NOW_S - 60.0)), DAY_S),
        Refresh("a", "its proof of health is counted differently: its sensors can measure again", "7"),
    ),
    "out, and its health has restarted": (
        recovered(out(quarantine=replace(HELD, blind_s=60.0)), 5.0),
        Refresh("a", "its proof of health is counted differently: its healthy time has restarted", "7"),
    ),
    "out, and its sensors cannot measure": (
        recovered(
            out(quarantine=replace(HELD, sources=("kmsg", "sysfs"))),
            *(DAY_S,),
            blind=("sysfs", "ecc", "kmsg"),
            clean_needs=("kmsg", "sysfs"),
        ),
        alert("its agent reports no fault, but kmsg, sysfs cannot measure; for 24 h"),
    ),
}


@pytest.mark.parametrize("name", NO_POLICY_OR_STORM)
def test_each_node_has_exactly_the_expected_action(name: str) -> None:
    node, expected = NO_POLICY_OR_STORM[name]
    assert decide.node_action(node, NOW_S, CALM, POLICY) == expected


WAIVED_REPORT = report(alone(level="degraded"), clean_s=100.0)
AVOIDED: dict[str, tuple[NodeView, QuarantineAction | None]] = {
    "well": (well("a"), None),
    "for longer than a repair takes": (
        degraded(alone(held_s=3 * DAY_S), quarantine=WEAK),
        alert(f"avoided: {PORT_WHY.replace('400', '259200')}; for 72 h"),
    ),
    "confirmed": (degraded(alone(held_s=300.0)), taint(PORT_WHY.replace("400", "300"), PORT, **AVOID)),
    "cordoned": (degraded(cordoned=True), None),
    "waived": (degraded(waiver=Waiver((PORT,), NOW_S), report=WAIVED_REPORT), None),
    "not confirmed": (
        degraded(alone(held_s=100.0), alone("b", held_s=30.0)),
        hold(f"{PORT_WHY.replace('400', '100')}, and 1 more: not confirmed yet", 200.0),
    ),
    "avoided, and still degraded": (
        degraded(quarantine=WEAK),
        hold(f"avoided: {PORT_WHY}", 3 * DAY_S - 410.0),
    ),
    "avoided, and well for long enough": (
        recovered(well("a", quarantine=WEAK), 3600.0),
        Release("a", "healthy for 3600 s", "7"),
    ),
    "avoided, and not well for long enough": (
        recovered(well("a", quarantine=WEAK), 3000.0),
        hold("healthy for 3000 of 3600 s", 600.0),
    ),
}


@pytest.mark.parametrize("name", AVOIDED)
def test_each_node_has_exactly_the_expected_action_if_degraded_ones_are_avoided(name: str) -> None:
    node, expected = AVOIDED[name]
    assert decide.node_action(node, NOW_S, CALM, AVOIDING) == expected


@pytest.mark.parametrize(
    "node",
    [bad("a"), degraded(), out(finding())],
    ids=["unhealthy", "degraded", "out"],
)
def test_in_a_storm_a_node_is_held_for_the_reason_and_the_time_of_the_storm(node: NodeView) -> None:
    assert decide.node_action(node, NOW_S, STORM, AVOIDING) == hold("a storm", 700.0)


def test_in_a_storm_findings_on_nodes_that_are_out_are_not_recorded() -> None:
    assert decide.node_action(out(finding(), alone(), busy=False), NOW_S, STORM, POLICY) == hold(
        f"out: {XID_WHY}, and 1 more", 2 * DAY_S
    )


def test_a_node_that_a_storm_holds_for_long_is_an_alert_although_the_storm_has_an_end() -> None:
    for node in (bad("a", finding(held_s=6 * 3600.0)), out(finding(held_s=6 * 3600.0))):
        held = decide.node_action(node, NOW_S, STORM, POLICY)
        assert held == Hold("a", "a storm; for 6 h", NOW_S + 700.0, alert=True)


@pytest.mark.parametrize(
    ("node", "waiting"),
    [
        (bad("a"), True),
        (bad("a", quarantine=WEAK), True),
        (bad("a", waiver=Waiver((PORT,), 0.0)), True),
        (bad("a", waiver=WAIVED), True),  # the fault is newer than the waiver
        (bad("a", finding(held_s=2 * DAY_S), waiver=WAIVED), False),
        (bad("a", cordoned=True), False),
        (bad("a", quarantine=HELD), False),
        (well("a", report=None), False),
        (well("a"), False),
        (degraded(), False),
    ],
)
def test_a_bad_node_that_can_still_be_taken_out_waits_for_the_breaker(node: NodeView, waiting: bool) -> None:
    assert decide.is_waiting(node, NOW_S, POLICY) is waiting


def test_a_pool_returns_its_actions_first_and_then_each_hold_with_its_reason() -> None:
    room = NodePolicy(max_share=0.05)
    crowd = [bad(f"b{at}", finding(held_s=90.0 + at)) for at in range(2)]
    seen = pool(well("z", report=None), *crowd, bad("c", alone()), size=40)
    assert decide.decide(seen, room) == (
        replace(taint(XID_WHY.replace("90", "91"), XID), node="b1"),
        replace(taint(XID_WHY, XID), node="b0"),
        Hold("z", "unknown: no agent has reported", alert=True),
        Hold("c", f"{PORT_WHY}; 0 of 40 nodes are out; at most 2 may be", NOW_S + 6 * 3600.0 - 410.0),
    )


def test_a_crowd_without_room_is_held_and_every_other_node_is_taken_out() -> None:
    crowd = [bad(f"b{at}", finding(held_s=3000.0 + at)) for at in range(5)]
    seen = pool(*crowd, bad("c", finding(held_s=90000.0)), size=50)
    held = "5 nodes became unhealthy together, too many for the breaker: an operator must investigate"
    assert decide.decide(seen, POLICY) == (
        replace(taint(XID_WHY.replace("90 s", "90000 s"), XID), node="c"),
        *(Hold(f"b{at}", held, alert=True) for at in (4, 3, 2, 1, 0)),
    )
    assert [
        each.node for each in decide.decide(replace(seen, nodes=pool(*crowd, size=50).nodes), POLICY)
    ] == [f"b{at}" for at in (4, 3, 2, 1, 0)]


def test_a_storm_is_a_hold_of_the_whole_pool_until_it_has_calmed_down() -> None:
    seen = pool(*(bad(f"b{at}", finding(held_s=90.0 + at)) for at in range(5)))
    why = "a storm: 5 nodes of the pool had trouble within 600 s of each other"
    until_s = NOW_S + 1800.0 - 100.0  # the newest finding was 90 s before the report, which is 10 s old
    names = [f"b{at}" for at in range(5)]
    assert decide.decide(seen, POLICY) == tuple(Hold(name, why, until_s) for name in [*names, ""])


def test_the_evidence_of_a_node_is_bounded_and_old_findings_are_dropped_first() -> None:
    old = tuple(f"old {at:03d}" for at in range(MAX_EVIDENCE))
    new = tuple(finding(f"new {at}") for at in range(3))
    node = out(*new, quarantine=replace(HELD, evidence=old))
    found = decide.node_action(node, NOW_S, CALM, POLICY)
    assert isinstance(found, Taint)
    assert found.evidence == ("new 0", "new 1", "new 2", *old[:-3])


@pytest.mark.parametrize(
    ("findings", "line"),
    [
        ((finding(),), XID_WHY),
        ((finding(verdict_by="driver"),), f"{XID} (reboot_node) for 90 s, reported by the driver"),
        ((finding(verdict_by="operator"),), XID_WHY),
        ((finding(sources=()),), f"{XID} (reboot_node) for 90 s, reported by an unnamed sensor"),
        ((finding(), finding("gpu/1"), alone()), f"{XID_WHY}, and 2 more".replace(XID, "gpu/1")),
    ],
)
def test_findings_are_described_by_the_worst_one_and_the_number_of_the_others(
    findings: tuple[NodeFinding, ...], line: str
) -> None:
    assert evidence.describe(findings) == line


def test_a_finding_that_lasts_long_enough_justifies_a_drain() -> None:
    assert evidence.may_drain(finding(held_s=60.0), POLICY)
    assert not evidence.may_drain(finding(held_s=59.9), POLICY)
    assert [cost_rank(each) for each in ("none", "restart_app", "contact_support", "sing")] == [*(0, 1, 2, 0)]
    assert evidence.severity((alone(), finding(), finding(lasting=False))) == (True, True, 4, 90.0)
