"""A fault that comes and goes is confirmed, or an operator is alerted; a rare false alarm has no effect."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.agent.recent_faults import RecentFaults
from nodeagent.model import Action, HealthFinding, Level
from supervisor.quarantine import breaker, evidence
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import Hold, NodeFinding, NodeView, PoolView, Taint
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    alone,
    applied,
    bad,
    finding,
    pool,
    report,
    well,
)

FOUND = HealthFinding(
    "gpu/0", "pcie_replay", None, Level.UNHEALTHY, Action.CONTACT_SUPPORT, 0.0, 0.0, "it", (), "", ("nvml",)
)


def kinds(view: PoolView) -> list[str]:
    found = [each for each in decide(view, POLICY) if each.node == "a"]
    return [type(each).__name__ + ("!" if isinstance(each, Hold) and each.alert else "") for each in found]


def test_a_fault_that_has_recently_been_present_long_enough_is_confirmed() -> None:
    flap = alone(held_s=20.0, recent_s=evidence.FLAPS * POLICY.confirm_alone_s)
    assert kinds(pool(bad("a", flap))) == ["Taint"]
    assert kinds(pool(bad("a", replace(flap, recent_s=flap.recent_s - 1.0)))) == ["Hold"]
    sure = finding(held_s=5.0, recent_s=evidence.FLAPS * POLICY.confirm_s)
    assert kinds(pool(bad("a", sure))) == ["Taint"]


def test_an_older_agent_does_not_say_how_often_a_fault_was_present() -> None:
    assert kinds(pool(bad("a", alone(held_s=299.0)))) == ["Hold"]


@pytest.mark.parametrize("findings", [(), (alone(held_s=20.0),)])
def test_a_node_that_turns_bad_again_and_again_is_an_alert_whether_it_is_bad_now_or_not(
    findings: tuple[NodeFinding, ...],
) -> None:
    said = report(*findings, unsteady_s=evidence.UNSTEADY_S, calmed_s=0.0 if findings else 3000.0)
    assert "Hold!" in kinds(pool(well("a", report=said)))
    assert "Hold!" not in kinds(pool(well("a", report=replace(said, unsteady_s=evidence.UNSTEADY_S - 1.0))))
    assert kinds(pool(well("a", report=said, cordoned=True))) in ([], ["Hold"])


def test_what_came_and_went_before_a_release_is_no_alert_until_it_returns() -> None:
    said = report(unsteady_s=9000.0, calmed_s=3700.0)
    assert kinds(pool(well("a", report=said, released_at_s=NOW_S - 60.0))) == []
    again = replace(said, calmed_s=30.0)
    assert kinds(pool(well("a", report=again, released_at_s=NOW_S - 3600.0))) == ["Hold!"]
    assert kinds(pool(well("a", report=replace(said, calmed_s=2 * DAY_S)))) == []


def course(bad_s: float, well_s: float, days: float) -> dict[str, float]:
    """Return when each kind of decision about a node was first made, whose fault comes and goes.

    A decision is made at the end of each occasion, and in the middle of the time without a fault.
    """
    sums, node, first, t = RecentFaults(), well("a"), dict[str, float](), 0.0
    others = tuple(well(f"w{n}") for n in range(9))
    while t < days * DAY_S and "Taint" not in first:
        sums = sums.after(t, [FOUND]).after(t + bad_s, [FOUND])
        ended_s = t + bad_s
        flap = alone(held_s=bad_s, recent_s=sums.of_finding_s(FOUND, ended_s), entity="gpu/0")
        calm_s = well_s / 2
        for at_s, said in (
            (ended_s, report(flap)),
            (ended_s + calm_s, report(clean_s=calm_s, quiet_s=calm_s, calmed_s=calm_s)),
        ):
            sums = sums.after(at_s, [] if at_s > ended_s else [FOUND])
            node = replace(node, report=replace(said, unsteady_s=sums.of_node_s(at_s)))
            view = PoolView(NOW_S + at_s, (node, *others))
            for kind in kinds(view):
                first.setdefault(kind, at_s)
            node = applied(view, decide(view, POLICY), POLICY).nodes[0]
            assert breaker.is_tainted(node) == ("Taint" in first)
        t += bad_s + well_s
    return first


@settings(max_examples=15, deadline=None)
@given(st.floats(30.0, 290.0), st.floats(30.0, 2000.0))
def test_a_node_that_flaps_is_taken_out_or_an_alert_within_a_day(bad_s: float, well_s: float) -> None:
    share = bad_s / (bad_s + well_s)
    first = course(bad_s, well_s, 1.0)
    if share > 0.6:
        assert first["Taint"] < 3 * 3600.0
    if share > 0.08:
        assert {"Taint", "Hold!"} & first.keys()


def test_a_sensor_with_a_rare_false_alarm_is_neither_taken_out_nor_an_alert() -> None:
    assert {"Taint", "Hold!"} & course(200.0, 4 * 3600.0, 3.0).keys() == set()


def test_a_fault_that_flaps_counts_in_the_lemon_score_like_one_that_persists() -> None:
    confirmed = {
        "persists": alone(held_s=POLICY.confirm_alone_s),
        "flaps": alone(held_s=20.0, recent_s=evidence.FLAPS * POLICY.confirm_alone_s),
    }
    histories = {kind: _after_two_incidents(found).history for kind, found in confirmed.items()}
    assert [each.relapse for each in histories["flaps"]] == [False, True]
    assert histories["flaps"] == histories["persists"]


def _after_two_incidents(found: NodeFinding) -> NodeView:
    """Return the node after the fault, its release, and the same fault some minutes later."""
    node, now_s = bad("a", found), NOW_S
    for _ in range(2):
        view = PoolView(now_s, (replace(node, report=report(found)), well("b")))
        node = applied(view, decide(view, POLICY), POLICY).nodes[0]
        assert breaker.is_tainted(node)
        now_s += 1.5 * POLICY.max_clean_s
        calm = replace(node, report=report(clean_s=POLICY.max_clean_s, quiet_s=POLICY.max_clean_s))
        view = PoolView(now_s, (calm, well("b")))
        node = applied(view, decide(view, POLICY), POLICY).nodes[0]
        assert not breaker.is_tainted(node)
        now_s += 600.0
    return node


def test_a_taint_for_a_fault_that_flaps_names_it() -> None:
    node: NodeView = bad("a", alone(held_s=20.0, recent_s=2000.0))
    [taint] = [each for each in decide(pool(node), POLICY) if isinstance(each, Taint)]
    assert taint.evidence == ("port/0 down",)
    assert "recently present for 2000 s" in taint.why
