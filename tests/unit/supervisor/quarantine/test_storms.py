from __future__ import annotations

import math
from dataclasses import replace

import pytest

from supervisor.quarantine.cohorts import Reason
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import Hold, NodePolicy, NodeView, PoolView
from supervisor.quarantine.storms import StormState, detect
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    WELL,
    alone,
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


def crowd(count: int, held_s: float, **given: object) -> list[NodeView]:
    return [bad(f"a{each:03d}", finding(held_s=held_s + each), **given) for each in range(count)]


def test_a_few_bad_nodes_are_not_a_storm() -> None:
    assert len(asked(pool(*crowd(4, 90.0)))) == 4


def test_many_simultaneous_faults_are_held_for_the_cool_down_and_then_taken_out_if_all_fit() -> None:
    assert asked(pool(*crowd(6, 90.0), size=100)) == []
    assert asked(pool(*crowd(6, 1780.0), size=100)) == []
    assert len(asked(pool(*crowd(6, 1795.0), size=100))) == 6


def test_a_new_fault_restarts_the_cool_down_for_the_pool() -> None:
    nodes = [*crowd(6, 1900.0), bad("late", finding(held_s=1400.0))]
    assert asked(pool(*nodes, size=100)) == []


def test_nodes_that_exceed_the_breaker_are_taken_out_all_or_none() -> None:
    seen = pool(*crowd(11, 5 * DAY_S), size=100)
    assert asked(seen) == []
    assert "an operator must investigate" in why(seen, "a003")
    assert len(asked(pool(*crowd(10, 5 * DAY_S), size=100))) == 10


def test_a_single_bad_node_is_not_held_by_an_earlier_crowd() -> None:
    seen = pool(bad("alone", finding(held_s=DAY_S)), *crowd(11, 5 * DAY_S), size=100)
    assert [each.node for each in asked(seen)] == ["alone"]


def test_brief_simultaneous_faults_of_many_nodes_are_a_storm_even_when_over() -> None:
    blips = [recovered(well(f"b{each}"), 300.0) for each in range(5)]
    seen = pool(bad("a"), *blips)
    assert asked(seen) == []
    assert "a storm" in why(seen, "a")
    assert len(asked(pool(bad("a"), *[recovered(each, 2000.0) for each in blips]))) == 1


def test_nodes_whose_agents_have_just_started_are_not_a_storm() -> None:
    fresh = [well(f"b{each}", report=replace(WELL, clean_s=5.0, quiet_s=5.0)) for each in range(20)]
    assert len(asked(pool(bad("a"), *fresh))) == 1


def test_nodes_that_return_from_repair_are_not_a_storm() -> None:
    out = settled(pool(*crowd(6, 1900.0, busy=False), size=100))
    back = [recovered(node_of(out, f"a{each:03d}"), 60.0, boot_id="b2") for each in range(6)]
    later = at(out, NOW_S + DAY_S, *back, bad("well1"))
    assert [each.node for each in asked(later)] == ["well1"]


def test_a_rack_with_a_storm_is_held_and_the_others_are_not() -> None:
    rack = crowd(3, 400.0, rack="r1")
    seen = pool(*rack, bad("b", rack="r2"), bad("c"), size=200)
    assert [each.node for each in asked(seen)] == ["b", "c"]
    assert "nodes of rack r1" in why(seen, "a001")


def test_a_storm_of_racks_is_one_of_the_pool() -> None:
    racks = [bad(f"r{r}{at}", finding(held_s=400.0), rack=f"r{r}") for r in range(5) for at in range(3)]
    assert len(asked(pool(*racks[:9], bad("b"), size=300))) == 1
    assert asked(pool(*racks, bad("b"), size=300)) == []


def test_a_storm_also_ends_no_work() -> None:
    taken = settled(pool(bad("a"), size=100), NodePolicy(drain_for=frozenset()))
    stormy = at(taken, NOW_S, *[replace(each, name=f"well{at}") for at, each in enumerate(crowd(6, 90.0))])
    assert asked(stormy) == []


def test_an_agent_version_that_mostly_reports_unhealthy_is_not_trusted() -> None:
    new = [bad(f"n{at}", finding(held_s=4000.0 * (at + 1))) for at in range(3)]
    new = [replace(node, report=report(*node.report.findings, agent="2")) for node in new if node.report]
    fine = [well(f"m{at}", report=replace(WELL, agent="2")) for at in range(8)]
    seen = pool(*new, *fine, bad("old", finding(held_s=90.0)))
    assert [each.node for each in asked(seen)] == ["old"]
    assert "3 of 11 agents of version 2 report unhealthy" in why(seen, "n0")
    more = [well(f"k{at}", report=replace(WELL, agent="2")) for at in range(2)]
    assert len(asked(pool(*new, *fine, *more, size=100))) == 3, "3 of 13 are not"


def canary(version: str, held_s: float) -> NodeView:
    return bad("c", report=report(finding(held_s=held_s), agent=version))


@pytest.mark.parametrize("version", ["2", "1.0.1", "1.dev3", ""])
def test_a_canary_is_held_for_a_day_while_no_other_agent_of_its_version_is_healthy(version: str) -> None:
    seen = pool(canary(version, 90.0))
    assert asked(seen) == []
    assert f"1 of 1 agents of version {version or 'unknown'}" in why(seen, "c")
    assert asked(pool(canary(version, DAY_S - 11.0))) == []
    assert len(asked(pool(canary(version, DAY_S - 10.0)))) == 1
    assert len(asked(pool(canary(version, 90.0), well("d", report=replace(WELL, agent=version))))) == 1


@pytest.mark.parametrize("version", ["0.9", "0.9.12", "0"])
def test_the_last_node_of_an_old_version_is_taken_out_like_any_other(version: str) -> None:
    """A node is often the last one of an old version because it is broken."""
    for size in (2, 9, 1000):
        driven = finding(sources=("kmsg",), verdict_by="driver")
        assert len(asked(pool(canary(version, 90.0), size=size))) == 1
        straggler = bad("c", report=report(driven, agent=version))
        assert len(asked(pool(straggler, size=size))) == 1


def test_a_small_pool_of_one_version_says_nothing_about_the_version() -> None:
    for size in range(2, 8):
        seen = settled(pool(bad("a", finding(held_s=DAY_S / 2)), bad("b", finding(held_s=90.0)), size=size))
        assert node_of(seen, "a").quarantine is not None
        assert "may be" in why(seen, "b") or "must be left" in why(seen, "b")


def test_a_node_out_for_long_says_nothing_about_agents_whatever_it_has_found_since() -> None:
    flapping = bad("a", finding(held_s=5 * DAY_S), alone("port/1 down", held_s=20.0), ready=False)
    fresh = [bad(f"b{at}", finding(held_s=5000.0 * (at + 1))) for at in range(2)]
    seen = pool(flapping, *fresh, size=8)
    assert detect(seen, seen.nodes, POLICY) == StormState()
    third = replace(flapping, report=report(finding(held_s=DAY_S / 2)))
    seen = pool(third, *fresh, size=8)
    assert "3 of 8 agents of version 1" in detect(seen, seen.nodes, POLICY).nodes["b0"].why


FLAPPING = [bad(f"f{at}", alone(f"port/{at} down", held_s=20.0 + at), rack="r1") for at in range(3)]


def own(held_s: float, **given: object) -> NodeView:
    """Return a node of the flapping nodes' rack with a sure fault of its own."""
    return bad("x", finding("gpu/0 xid 79", held_s=held_s, sources=("kmsg",), verdict_by="driver"), rack="r1")


def test_flapping_nodes_delay_a_sure_fault_in_their_rack_for_one_cool_down_only() -> None:
    assert asked(pool(*FLAPPING, own(1789.0))) == []
    assert [each.node for each in asked(pool(*FLAPPING, own(1790.0)))] == ["x"]
    seen = settled(pool(*FLAPPING, own(1790.0)))
    assert node_of(seen, "x").quarantine.drain_at_s == NOW_S  # type: ignore[union-attr]


def test_flapping_nodes_of_the_pool_delay_a_sure_fault_for_one_cool_down_only() -> None:
    loose = [replace(bad(f"f{at}", alone(f"port/{at} down", held_s=20.0 + at))) for at in range(9)]
    assert asked(pool(*loose, own(1789.0))) == []
    assert [each.node for each in asked(pool(*loose, own(1790.0)))] == ["x"]
    doubted = replace(own(9000.0), report=report(alone("port/9 down", held_s=9000.0)))
    assert asked(pool(*loose, doubted)) == [], "one sensor"
    passing = replace(own(9000.0), report=report(finding(held_s=9000.0, lasting=False)))
    assert asked(pool(*loose, passing)) == [], "it may pass when the storm does"


def test_a_fault_that_others_of_the_storm_have_too_is_not_a_nodes_own() -> None:
    alike = [
        bad(f"f{at}", finding(f"gpu/{at} 79", signature="79", held_s=90.0), rack="r1") for at in range(3)
    ]
    mine = bad("x", finding("gpu/7 79", signature="79", held_s=DAY_S / 8), rack="r1")
    assert asked(pool(*alike, mine)) == []
    other = bad("x", finding("gpu/7 95", signature="95", held_s=DAY_S / 8), rack="r1")
    assert [each.node for each in asked(pool(*alike, other))] == ["x"]


def test_a_storm_of_more_nodes_than_flap_holds_every_node_and_becomes_an_alert() -> None:
    many = [bad(f"f{at:02d}", alone(f"port/{at} down", held_s=20.0 + at)) for at in range(11)]
    assert asked(pool(*many, own(9000.0), size=60)) == []
    [hold] = [each for each in decide(pool(*many, own(6 * 3600.0), size=60), POLICY) if each.node == "x"]
    assert isinstance(hold, Hold)
    assert hold.alert
    assert hold.why.startswith("a storm")


def test_a_node_that_waits_long_for_repair_says_nothing_about_agents() -> None:
    """In a pool of four, one node has waited for a part for days, and another one fails."""
    policy = NodePolicy(max_share=0.5)
    out = settled(pool(bad("a"), size=4), policy)
    waiting = replace(node_of(out, "a"), report=report(finding(held_s=3 * DAY_S)))
    later = at(out, NOW_S + 3 * DAY_S, waiting, bad("well0"))
    assert [each.node for each in asked(later, policy)] == ["well0"]


def test_a_pool_in_which_every_node_is_bad_is_never_acted_on() -> None:
    for held_s in (90.0, 3600.0, 40 * DAY_S):
        seen = PoolView(NOW_S, tuple(bad(f"a{each}", finding(held_s=held_s)) for each in range(50)))
        assert asked(seen) == []


def test_nodes_that_others_work_on_are_not_a_storm() -> None:
    seen = pool(*crowd(9, 90.0, cordoned=True), bad("z"), size=200)
    assert [each.node for each in asked(seen)] == ["z"]


def test_single_sensors_of_many_nodes_one_after_the_other_are_not_a_storm() -> None:
    nodes = [bad(f"a{each}", alone(held_s=400.0 + 700.0 * each)) for each in range(8)]
    assert len(asked(pool(*nodes, size=100))) == 8


def storm(count: int, until_s: float, where: str = "the pool") -> Reason:
    why = f"a storm: {count} nodes of {where} had trouble within 600 s of each other"
    return Reason(NOW_S + until_s, why)


def detected(*nodes: NodeView, size: int = 100) -> StormState:
    return detect(pool(*nodes, size=size), nodes, POLICY)


def named(*names: str) -> frozenset[str]:
    return frozenset(names)


FIVE = named("a000", "a001", "a002", "a003", "a004")


def test_a_pool_without_trouble_has_no_storm() -> None:
    ignored = (well("a"), bad("b", cordoned=True), bad("c", silent_s=121.0), well("d", report=None))
    assert detected(*ignored) == StormState()
    out = replace(recovered(well("a"), 60.0), ready=False)
    assert detected(*[replace(out, name=f"a{at}") for at in range(5)]) == StormState(), "under repair"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (crowd(4, 90.0), StormState()),
        (crowd(5, 90.0), StormState(storm(5, 1700.0), {}, FIVE)),
        (crowd(5, 1789.0), StormState(storm(5, 1.0), {}, FIVE)),
        (crowd(5, 1790.0), StormState(None, {}, FIVE)),
        ([*crowd(4, 90.0), bad("z", finding(held_s=690.0))],
         StormState(storm(5, 1700.0), {}, FIVE - {"a004"} | {"z"})),
        ([*crowd(4, 90.0), bad("z", finding(held_s=690.5))], StormState()),
        ([*crowd(4, 90.0), recovered(well("z"), 95.0)], StormState(storm(5, 1700.0), {}, FIVE - {"a004"})),
        ([*crowd(4, 590.0), recovered(well("z"), 2399.0)], StormState()),
        (
            [*crowd(5, 3000.0), bad("z", finding(held_s=4000.0)), bad("y", finding(held_s=500.0))],
            StormState(None, {}, FIVE),
        ),
    ],
)  # fmt: skip
def test_a_storm_of_the_pool_has_exactly_these_fields(nodes: list[NodeView], expected: StormState) -> None:
    assert detected(*nodes) == expected


def test_a_large_pool_needs_more_nodes_in_trouble_for_a_storm() -> None:
    assert detected(*crowd(6, 90.0), size=700) == StormState()
    assert detected(*crowd(6, 90.0), size=699) == StormState(storm(6, 1700.0), {}, FIVE | {"a005"})


def test_a_storm_of_a_rack_holds_its_troubled_nodes_only() -> None:
    """It holds every troubled node of the rack, and counts as one node of the pool."""
    rack = crowd(3, 90.0, rack="r1")
    other = [bad(f"b{at}", finding(held_s=90.0), rack="r2") for at in range(2)]
    reason = storm(3, 1700.0, "rack r1")
    held = dict.fromkeys(("a000", "a001", "a002", "late"), reason)
    crowded = named("a000", "a001", "a002")
    late = bad("late", finding(held_s=9000.0, lasting=False), rack="r1")
    assert detected(*rack, late, *other, bad("c")) == StormState(None, held, crowded)
    del held["late"]
    own_fault = bad("late", finding("gpu/0 xid 95", held_s=9000.0), rack="r1")
    assert detected(*rack, own_fault, *other, bad("c")) == StormState(None, held, crowded)
    five = detected(*rack, *other, bad("c"), bad("d"))
    assert five == StormState(storm(5, 1700.0), held, crowded | {"b0", "b1", "c", "d"})
    assert five.reason_for("late") == storm(5, 1700.0)
    assert detected(*rack).reason_for("a001") == reason
    assert detected(*rack).reason_for("late") is None


def test_the_nodes_of_a_suspect_agent_version_are_held_with_the_reason() -> None:
    def of(version: str, name: str, held_s: float = 90.0, **given: object) -> NodeView:
        return bad(name, report=report(finding(held_s=held_s), agent=version), **given)

    fine = [well(f"m{at}", report=replace(WELL, agent="2")) for at in range(2)]
    silent = well("s", report=replace(WELL, agent="2"), silent_s=121.0)
    suspects = [of("2", "p"), of("2", "q", 9000.0), of("", "r", 5000.0)]
    seen = pool(*suspects, *fine, silent, of("1", "t"), size=40)
    why = "{} agents of version {} report unhealthy: the version is suspect"

    def small(held_s: float, of_them: str = "2 of 4", version: str = "2") -> Reason:
        return Reason(NOW_S + DAY_S - held_s - 10.0, why.format(of_them, version))

    two, unknown = {"p": small(90.0), "q": small(9000.0)}, small(5000.0, "1 of 1", "unknown")
    assert detect(seen, seen.nodes, POLICY) == StormState(None, {**two, "r": unknown})
    more = [well(f"k{at}", report=replace(WELL, agent="2")) for at in range(4)]
    large = pool(*suspects, of("2", "s", 20000.0), *fine, *more, size=40)
    many = Reason(math.inf, why.format("3 of 9", "2"), alert=True)
    assert detect(large, large.nodes, POLICY) == StormState(
        None, {**dict.fromkeys("pqs", many), "r": unknown}
    )
    long_out = of("2", "q", DAY_S - 10.0, ready=False)
    young_out = of("2", "q", DAY_S - 11.0, ready=False)
    for node, held in ((long_out, {}), (young_out, {"p": small(90.0), "q": small(DAY_S - 11.0)})):
        seen = pool(of("2", "p"), node, *fine, size=40)
        assert detect(seen, seen.nodes, POLICY) == StormState(None, held)


def test_undecided_nodes_hide_no_others() -> None:
    ignored = (bad("x", cordoned=True), bad("y", silent_s=121.0), well("z", report=None))
    assert detected(*ignored, *crowd(5, 90.0)) == StormState(storm(5, 1700.0), {}, FIVE)
