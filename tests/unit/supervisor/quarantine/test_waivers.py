from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.quarantine.model import MAX_EVIDENCE, Forget, NodeFinding, NodeView, Taint, Waiver
from supervisor.quarantine.transition import released_by_operator
from supervisor.quarantine.waivers import not_waived
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    alone,
    asked,
    at,
    bad,
    finding,
    node_of,
    pool,
    report,
    settled,
    well,
    why,
)

KEY = "GPU-1 xid 79"
OLD = finding(KEY, held_s=2 * DAY_S)
WAIVER = Waiver((KEY,), NOW_S - DAY_S, "b1")


def counts(found: NodeFinding, waiver: Waiver = WAIVER, **given: object) -> bool:
    node: NodeView = bad("a", found, waiver=waiver, **given)
    return bool(not_waived(node, (found,), NOW_S, POLICY))


def test_a_finding_that_the_operator_knew_is_covered() -> None:
    assert not counts(OLD)
    assert counts(replace(OLD, key="GPU-1 xid 95")), "another fault"
    assert bool(not_waived(bad("a", OLD), (OLD,), NOW_S, POLICY)), "no waiver"


@pytest.mark.parametrize("newer", [replace(OLD, held_s=DAY_S - 11.0), replace(OLD, sign_s=DAY_S - 11.0)])
def test_a_finding_that_began_or_has_a_sign_after_the_release_is_new(newer: NodeFinding) -> None:
    assert counts(newer)
    [taint] = asked(pool(bad("a", newer, waiver=WAIVER)))
    assert isinstance(taint, Taint)


def test_ages_are_counted_from_the_report() -> None:
    assert not counts(replace(OLD, sign_s=DAY_S - 10.0)), "the report is 10 s old"
    assert counts(replace(OLD, sign_s=DAY_S - 10.0), silent_s=9.0)


def test_a_finding_after_another_boot_is_new() -> None:
    assert counts(OLD, replace(WAIVER, boot_id="b0"))
    assert not counts(OLD, replace(WAIVER, boot_id="")), "an older version did not store the boot"


def test_an_event_that_the_boot_has_ended_is_not_new_while_it_is_still_reported() -> None:
    booted = replace(WAIVER, boot_id="b0")
    event = replace(OLD, sign_s=2 * DAY_S, lasting=False)
    assert not counts(event, booted)
    assert counts(replace(event, lasting=True), booted), "it has outlived the boot"
    assert counts(replace(event, sign_s=60.0), booted), "it has occurred again"
    assert counts(replace(event, sign_s=None), booted), "it is measured now"


def test_a_release_by_a_clock_that_was_ahead_covers_no_fault_that_begins_after_the_correction() -> None:
    ahead_s = NOW_S + 30 * DAY_S
    old = finding(KEY, held_s=2 * DAY_S, sign_s=DAY_S)
    out = settled(pool(bad("a", old), now_s=ahead_s))
    seen = at(out, NOW_S, released_by_operator(node_of(out, "a"), ahead_s + 60.0))
    seen = settled(seen)
    waiver = node_of(seen, "a").waiver
    assert waiver is not None
    assert waiver.at_s == NOW_S
    assert "an operator has released it" in why(seen, "a")
    for days in (0.1, 3.0, 6.9):
        again = replace(old, held_s=(2 + days) * DAY_S, sign_s=30.0)
        later = at(seen, NOW_S + days * DAY_S, replace(node_of(seen, "a"), report=report(again)))
        assert [type(each) for each in asked(later)] == [Taint]


def test_a_waiver_expires_after_a_week_even_if_the_node_was_never_healthy() -> None:
    aged = Waiver((KEY,), NOW_S - 7 * DAY_S + 1.0, "b1")
    found = replace(OLD, held_s=100 * DAY_S)
    assert asked(pool(bad("a", found, waiver=aged))) == []
    assert "an operator has released it" in why(pool(bad("a", found, waiver=aged)), "a")
    [taint] = asked(pool(bad("a", found, waiver=replace(aged, at_s=NOW_S - 7 * DAY_S))))
    assert isinstance(taint, Taint)


MANY = tuple(finding(f"GPU-{at} xid 79", 2 * DAY_S) for at in range(MAX_EVIDENCE))
ALL_WAIVED = replace(WAIVER, evidence=tuple(each.key for each in MANY))


def test_a_new_fault_counts_no_matter_how_many_older_and_worse_ones_are_waived() -> None:
    new = alone("disk/0 read-only", 3000.0)
    assert asked(pool(bad("a", *MANY, waiver=ALL_WAIVED))) == []
    [taint] = asked(pool(bad("a", *MANY, new, waiver=ALL_WAIVED)))
    assert isinstance(taint, Taint)
    assert new.key in taint.evidence
    assert len(taint.evidence) == MAX_EVIDENCE


def test_a_new_degraded_finding_is_avoided_no_matter_how_many_older_ones_are_waived() -> None:
    mild = tuple(replace(each, level="degraded") for each in MANY)
    new = alone("disk/0 slow", 3000.0, level="degraded")
    careful = replace(POLICY, prefer_away=True)
    assert asked(pool(bad("a", *mild, waiver=ALL_WAIVED)), careful) == []
    [taint] = asked(pool(bad("a", *mild, new, waiver=ALL_WAIVED)), careful)
    assert isinstance(taint, Taint)
    assert taint.evidence == (new.key,)


def test_a_node_that_an_operator_no_longer_wants_avoided_is_not_avoided_again_for_the_same_finding() -> None:
    careful = replace(POLICY, prefer_away=True)
    mild = replace(OLD, level="degraded")
    avoided = settled(pool(bad("a", mild)), careful)
    freed = released_by_operator(node_of(avoided, "a"), NOW_S)
    aged = replace(mild, held_s=mild.held_s + DAY_S, sign_s=None)
    later = replace(freed, report=report(aged))
    assert asked(at(avoided, NOW_S + DAY_S, later), careful) == []
    assert len(asked(at(avoided, NOW_S + DAY_S, replace(later, report=report())), careful)) == 1, "it is over"


def test_an_old_waived_finding_does_not_make_a_new_one_look_old() -> None:
    """Six nodes that fail together are a storm, even if each has had a waived fault for days."""
    nodes = [bad(f"a{at}", OLD, finding(held_s=90.0 + at), waiver=WAIVER) for at in range(6)]
    assert asked(pool(*nodes, size=100)) == []
    assert "a storm" in why(pool(*nodes, size=100), "a0")
    canary = bad("a", OLD, finding(), waiver=WAIVER)
    canary = replace(canary, report=report(OLD, finding(), agent="2"))
    assert "1 of 1 agents of version 2" in why(pool(canary), "a")


def test_an_expired_waiver_is_removed_from_a_node_that_is_not_unhealthy() -> None:
    flapping = replace(well("a").report, clean_s=60.0)  # type: ignore[type-var]
    seen = pool(well("a", report=flapping, waiver=Waiver((KEY,), NOW_S - 7 * DAY_S, "b1")))
    [forget] = asked(seen)
    assert isinstance(forget, Forget)
    assert asked(pool(well("a", report=flapping, waiver=WAIVER))) == []


def test_a_waiver_follows_the_gpu_and_not_its_slot() -> None:
    moved = replace(OLD, entity="gpu/1", device="GPU-1", place_key="gpu/1 xid 79")
    assert not counts(moved)
    exchanged = replace(OLD, key="GPU-2 xid 79", entity="gpu/0", device="GPU-2", place_key="gpu/0 xid 79")
    assert counts(exchanged)


def test_a_waiver_of_an_agent_without_devices_still_counts_after_its_upgrade() -> None:
    upgraded = replace(OLD, device="GPU-1", place_key="gpu/0 xid 79")
    assert not counts(upgraded, replace(WAIVER, evidence=("gpu/0 xid 79",)))


def test_a_waived_finding_backs_no_other() -> None:
    """Without it, the other one has a single witness."""
    waived = finding(KEY, entity="gpu/0", origins=("driver log",), held_s=2 * DAY_S)
    other = alone("gpu/0 lost", 90.0, entity="gpu/0", origins=("driver state",), action="reboot_node")
    assert len(asked(pool(bad("a", waived, other)))) == 1
    assert asked(pool(bad("a", waived, other, waiver=WAIVER))) == []
