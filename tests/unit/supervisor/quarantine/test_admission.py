"""A full breaker: alerts, and nodes that only prove their health make room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import Hold, NodeView, PastQuarantine, PoolView, Quarantine, Release
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    alone,
    asked,
    bad,
    finding,
    node_of,
    pool,
    recovered,
    settled,
    well,
)

HELD = Quarantine(("gpu/0 xid 79",), "reboot_node", ("kmsg",), "b1", NOW_S - 5 * DAY_S)
LEMON = tuple(PastQuarantine(NOW_S - each * DAY_S, "reboot_node") for each in range(10, 4, -1))


def proving(name: str = "p", clean_s: float = 3600.0, **given: object) -> NodeView:
    """Return a node that has been out for days, and still has to prove its health for more than 3 h."""
    node = recovered(well(name, quarantine=HELD, history=LEMON), clean_s, boot_id="b2")
    return replace(node, **given)  # type: ignore[arg-type]


def names(view: PoolView) -> list[tuple[type, str]]:
    return [(type(each), each.node) for each in asked(view)]


def hold_of(view: PoolView, name: str) -> Hold:
    [hold] = [each for each in decide(view, POLICY) if isinstance(each, Hold) and each.node == name]
    return hold


@pytest.mark.parametrize("size", range(3, 20))
def test_a_sure_fault_changes_places_with_a_node_that_only_proves_its_health(size: int) -> None:
    seen = pool(proving(), bad("x"), size=size)
    [release] = asked(seen)
    assert isinstance(release, Release)
    assert release.why == "healthy for 3600 s, and the breaker has no room for a node with a proven fault"
    seen = settled(seen)
    assert node_of(seen, "p").quarantine is None
    assert node_of(seen, "x").quarantine is not None


@pytest.mark.parametrize(
    "node",
    [
        proving(clean_s=3599.0),
        proving(cordoned=True),
        proving(ready=False),
        proving(silent_s=121.0),
        proving(report=recovered(well("p"), 9000.0, boot_id="b1").report),  # not rebooted
        proving(
            report=recovered(well("p"), 9000.0, boot_id="b2", blind=("kmsg",), clean_needs=("kmsg",)).report
        ),
        bad("p", finding(held_s=5 * DAY_S), quarantine=HELD, busy=False),
    ],
    ids=["clean briefly", "cordoned", "not ready", "silent", "not remedied", "blind", "bad"],
)
def test_a_node_whose_health_is_not_plausible_makes_no_room(node: NodeView) -> None:
    seen = pool(node, replace(HELD_BY_US, name="q"), bad("x"), size=9)
    assert names(seen) == []
    assert "2 of 9 nodes are out" in hold_of(seen, "x").why


HELD_BY_US = bad(
    "q", finding(held_s=5 * DAY_S), quarantine=HELD, busy=False
)  # a second node, which waits for its repair


@pytest.mark.parametrize("fault", [alone(held_s=9000.0), finding(lasting=False)])
def test_only_a_sure_fault_makes_a_node_return_early(fault: object) -> None:
    assert names(pool(proving(), bad("x", fault), size=9)) == []  # type: ignore[arg-type]


def test_the_nodes_that_were_healthy_longest_return_first_and_no_more_than_needed() -> None:
    out = [proving("p", 9000.0), proving("q", 5000.0), proving("r", 7000.0)]
    faults = [bad("x"), bad("y", finding(held_s=95.0))]
    seen = pool(*out, *faults, size=39)
    assert names(seen) == [(Release, "p"), (Release, "r")]
    over = pool(*out, HELD_BY_US, replace(HELD_BY_US, name="s"), *faults, size=39)  # 5 out, 3 allowed
    assert names(over) == [(Release, "p"), (Release, "q"), (Release, "r")], "3 returns, to take 1 out"
    none = pool(proving("p"), *(replace(HELD_BY_US, name=f"s{at}") for at in range(4)), *faults, size=39)
    assert names(none) == [], "one return would not make room"


def test_a_release_that_is_due_anyway_makes_the_room() -> None:
    due = proving("d", 5 * DAY_S, history=())
    seen = pool(due, proving("p"), proving("q"), bad("x"), size=30)
    assert names(seen) == [(Release, "d")]
    seen = settled(seen)
    assert node_of(seen, "p").quarantine is not None


def test_a_node_that_waits_for_room_is_an_alert_after_hours() -> None:
    full = [replace(HELD_BY_US, name=f"q{at}") for at in range(4)]
    young = hold_of(pool(*full, bad("x", finding(held_s=6 * 3600.0 - 11.0))), "x")
    assert (young.until_s, young.alert) == (NOW_S + 1.0, False)
    old = hold_of(pool(*full, bad("x", finding(held_s=6 * 3600.0 - 10.0))), "x")
    assert old.alert
    assert old.why.endswith("4 of 40 nodes are out; at most 4 may be; for 6 h")


def test_the_only_node_of_a_pool_stays_and_becomes_an_alert() -> None:
    assert hold_of(pool(bad("x", finding(held_s=DAY_S)), size=1), "x").alert


@pytest.mark.parametrize("size", range(3, 20))
def test_a_forgotten_cordon_does_not_keep_a_bad_node_in_service(size: int) -> None:
    for gone in (well("c", cordoned=True), well("c", ready=False, silent_s=30 * DAY_S)):
        seen = settled(pool(gone, bad("x"), size=size))
        assert node_of(seen, "x").quarantine is not None
