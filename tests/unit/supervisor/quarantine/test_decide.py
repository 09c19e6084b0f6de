from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.quarantine.model import (
    MAX_EVIDENCE,
    NO_NEW_WORK,
    PREFER_NOT,
    Drain,
    Forget,
    NodePolicy,
    Release,
    Taint,
)
from supervisor.quarantine.transition import released_by_operator
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    alone,
    applied,
    asked,
    at,
    bad,
    finding,
    node_of,
    pool,
    recovered,
    report,
    settled,
    well,
    why,
)


def test_a_healthy_pool_needs_no_action() -> None:
    assert asked(pool()) == []


def test_a_bad_node_is_tainted_then_drained_then_left_alone() -> None:
    seen = pool(bad("a"))
    [taint] = asked(seen)
    assert isinstance(taint, Taint)
    assert (taint.node, taint.effect, taint.version) == ("a", NO_NEW_WORK, "7")
    assert (taint.evidence, taint.action) == (("gpu/0 xid 79",), "reboot_node")
    assert "gpu/0 xid 79 (reboot_node) for 90 s, reported by kmsg, nvml_events" in taint.why
    seen = applied(seen, [taint])
    [drain] = asked(seen)
    assert isinstance(drain, Drain)
    assert asked(applied(seen, [drain])) == []


def test_a_node_is_not_bad_before_a_second_report_has_confirmed_it() -> None:
    seen = pool(bad("a", finding(held_s=59.0)))
    assert asked(seen) == []
    assert "not confirmed yet" in why(seen, "a")


def test_a_finding_of_a_single_sensor_must_last_longer() -> None:
    assert asked(pool(bad("a", alone(held_s=299.0)))) == []
    assert len(asked(pool(bad("a", alone(held_s=300.0))))) == 1


def test_a_single_sensor_never_ends_work_however_long_it_reports() -> None:
    seen = settled(pool(bad("a", alone(action="reset_gpu", lasting=True, held_s=5 * DAY_S))))
    held = node_of(seen, "a").quarantine
    assert held is not None
    assert held.drain_at_s is None
    assert "one witness" in why(seen, "a")


def test_the_drivers_verdict_is_a_second_source() -> None:
    seen = settled(pool(bad("a", finding(sources=("kmsg",), verdict_by="driver"))))
    assert node_of(seen, "a").quarantine.drain_at_s == NOW_S  # type: ignore[union-attr]


def test_a_fault_that_passes_without_a_remedy_ends_no_work() -> None:
    seen = settled(pool(bad("a", finding(lasting=False, held_s=DAY_S))))
    assert node_of(seen, "a").quarantine.drain_at_s is None  # type: ignore[union-attr]


def test_a_node_without_work_needs_no_drain() -> None:
    seen = settled(pool(bad("a", busy=False)))
    assert node_of(seen, "a").quarantine.drain_at_s is None  # type: ignore[union-attr]


@pytest.mark.parametrize("silent_s", [120.1, 1e6])
def test_a_node_with_a_silent_agent_is_unknown_whatever_its_last_report(silent_s: float) -> None:
    seen = pool(bad("a", silent_s=silent_s))
    assert asked(seen) == []
    assert why(seen, "a").startswith("unknown: its agent has not reported")
    out = settled(pool(bad("a")))
    later = at(out, NOW_S + DAY_S, replace(recovered(node_of(out, "a"), DAY_S), silent_s=silent_s))
    assert asked(later) == []


def test_a_node_that_has_never_reported_is_unknown() -> None:
    assert why(pool(well("a", report=None)), "a") == "unknown: no agent has reported"


def test_a_degraded_node_keeps_its_work() -> None:
    seen = pool(bad("a", finding(level="degraded")))
    assert asked(seen) == []


def test_degraded_nodes_are_avoided_where_the_operator_wants_it() -> None:
    policy = NodePolicy(prefer_away=True)
    seen = pool(bad("a", alone(level="degraded")))
    [taint] = asked(seen, policy)
    assert isinstance(taint, Taint)
    assert taint.effect == PREFER_NOT
    seen = settled(seen, policy)
    assert node_of(seen, "a").history == (), "it was never out"
    [release] = asked(at(seen, NOW_S + 9999, recovered(node_of(seen, "a"), 3600.0)), policy)
    assert isinstance(release, Release)
    [release] = asked(seen, POLICY)
    assert "no longer avoided" in release.why


def test_an_avoided_node_that_becomes_bad_is_taken_out() -> None:
    policy = NodePolicy(prefer_away=True)
    seen = settled(pool(bad("a", alone(level="degraded"))), policy)
    worse = replace(node_of(seen, "a"), report=report(finding()))
    seen = settled(at(seen, NOW_S + 600, worse), policy)
    assert node_of(seen, "a").quarantine.effect == NO_NEW_WORK  # type: ignore[union-attr]
    assert len(node_of(seen, "a").history) == 1


def test_with_little_room_the_worst_nodes_are_taken_out_first() -> None:
    """Sure comes before unsure, lasting before passing, costly before cheap, then older, then by name."""
    nodes = [
        bad("alone", alone(action="replace", lasting=True, held_s=3 * DAY_S)),
        bad("passing", finding(lasting=False, held_s=4 * DAY_S)),
        bad("cheap", finding(action="reset_gpu", held_s=5 * DAY_S)),
        bad("young", finding(held_s=6 * DAY_S)),
        bad("old-b", finding(held_s=7 * DAY_S)),
        bad("old-a", finding(held_s=7 * DAY_S)),
        bad("dear", finding(action="replace", held_s=8 * DAY_S)),
    ]
    order = ["dear", "old-a", "old-b", "young", "cheap", "passing", "alone"]
    for room in range(1, 8):
        taken = asked(pool(*nodes, size=100), NodePolicy(max_share=room / 100))
        assert [each.node for each in taken] == order[:room], room
    assert "at most 3 may be" in why(pool(*nodes, size=100), "alone", NodePolicy(max_share=0.03))


def test_a_release_makes_room_only_once_it_is_done() -> None:
    policy = NodePolicy(max_share=0.0)
    out = settled(pool(bad("a", busy=False)), policy)
    seen = at(out, NOW_S + DAY_S, recovered(node_of(out, "a"), DAY_S, boot_id="b2"))
    seen = replace(seen, nodes=(*seen.nodes, bad("b", finding(held_s=5000.0))))
    [release] = asked(seen, policy)
    assert isinstance(release, Release)
    [taint] = asked(applied(seen, [release]), policy)
    assert taint.node == "b"


def test_a_node_that_another_party_has_cordoned_is_left_alone() -> None:
    seen = pool(bad("a", cordoned=True))
    assert asked(seen) == []
    assert why(seen, "a") == "cordoned by someone else"
    out = applied(pool(bad("a")), asked(pool(bad("a"))))
    cordoned = at(out, NOW_S, replace(node_of(out, "a"), cordoned=True))
    assert asked(cordoned) == [], "not drained either"


def test_the_taint_is_removed_from_a_node_that_another_party_keeps_cordoned() -> None:
    out = settled(pool(bad("a")))
    node = replace(recovered(node_of(out, "a"), DAY_S, boot_id="b2"), cordoned=True)
    seen = settled(at(out, NOW_S + DAY_S, node))
    assert node_of(seen, "a").quarantine is None
    assert node_of(seen, "a").cordoned


def test_a_manual_release_is_respected_until_there_is_another_finding() -> None:
    out = settled(pool(bad("a")))
    node = released_by_operator(node_of(out, "a"), NOW_S + 60)
    again = replace(node, report=report(finding(held_s=6 * DAY_S)))
    seen = at(out, NOW_S + 6 * DAY_S, again)
    assert asked(seen) == []
    assert "an operator has released it" in why(seen, "a")
    worse = replace(node, report=report(finding(), finding("gpu/3 xid 95", held_s=70.0)))
    [taint] = asked(at(out, NOW_S + DAY_S, worse))
    assert isinstance(taint, Taint)
    assert taint.evidence == ("gpu/0 xid 79", "gpu/3 xid 95")
    seen = settled(at(out, NOW_S + DAY_S, worse))
    assert node_of(seen, "a").waiver is None


def test_a_waiver_ends_once_the_node_has_been_healthy_for_long_enough() -> None:
    out = settled(pool(bad("a")))
    node = released_by_operator(node_of(out, "a"), NOW_S)
    assert asked(at(out, NOW_S + 1000, recovered(node, 1000.0))) == []
    [forget] = asked(at(out, NOW_S + 4000, recovered(node, 3999.0)))
    assert isinstance(forget, Forget)
    seen = settled(at(out, NOW_S + 4000, recovered(node, 3999.0)))
    again = at(seen, NOW_S + 9999, replace(node_of(seen, "a"), report=report(finding())))
    assert isinstance(asked(again)[0], Taint)


def test_a_healthy_moment_does_not_end_a_waiver() -> None:
    out = settled(pool(bad("a", alone())))
    node = released_by_operator(node_of(out, "a"), NOW_S)
    for hour in range(1, 20):
        now_s = NOW_S + hour * 3600.0
        assert asked(at(out, now_s, recovered(node, 3000.0))) == []
        assert asked(at(out, now_s, replace(node, report=report(alone(held_s=hour * 3600.0 + 5))))) == []


def test_later_findings_are_recorded() -> None:
    seen = settled(pool(bad("a")))
    more = replace(node_of(seen, "a"), report=report(finding(), finding("gpu/1 row", action="replace")))
    [taint] = asked(at(seen, NOW_S + 60, more))
    assert isinstance(taint, Taint)
    assert (taint.evidence, taint.action) == (("gpu/0 xid 79", "gpu/1 row"), "replace")
    seen = settled(at(seen, NOW_S + 60, more))
    assert len(node_of(seen, "a").history) == 1, "the same incident"
    assert node_of(seen, "a").quarantine.at_s == NOW_S  # type: ignore[union-attr]


def test_thousands_of_findings_are_recorded_once() -> None:
    many = tuple(finding(f"gpu/{at} xid 79") for at in range(1000))
    seen = settled(pool(bad("a", *many)))
    assert len(node_of(seen, "a").quarantine.evidence) == MAX_EVIDENCE  # type: ignore[union-attr]
    other = tuple(finding(f"gpu/{at} xid 95") for at in range(1000))
    settled(at(seen, NOW_S + 60, replace(node_of(seen, "a"), report=report(*other))))


def test_a_storm_is_reported_once_for_the_pool() -> None:
    nodes = [bad(f"a{at}", finding(held_s=100.0)) for at in range(6)]
    assert why(pool(*nodes), "").startswith("a storm: 6 nodes of the pool")
