from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisor.quarantine.model import (
    MAX_EVIDENCE,
    MAX_RUNS,
    NO_NEW_WORK,
    OPERATOR,
    PREFER_NOT,
    Drain,
    Forget,
    Hold,
    PastQuarantine,
    Quarantine,
    Refresh,
    Release,
    RunFault,
    Taint,
    Waiver,
)
from supervisor.quarantine.transition import (
    RUNS_S,
    after,
    quarantined_by_operator,
    released_by_operator,
    with_run_faults,
)
from tests.unit.supervisor.node_views import DAY_S, NOW_S, POLICY, applied, asked, pool, well

TAINT = Taint("a", NO_NEW_WORK, ("k",), "replace", ("kmsg",), "b1", "why")


def test_every_action_is_idempotent() -> None:
    node = well("a", waiver=Waiver(("x",), 0.0))
    for action in (Forget("a", ""), TAINT, Drain("a", ""), Refresh("a", ""), Hold("a", ""), Release("a", "")):
        node = after(node, action, NOW_S, POLICY)
        assert after(node, action, NOW_S, POLICY) == node


def test_a_taint_is_an_incident_and_a_second_one_soon_after_a_release_is_a_relapse() -> None:
    node = after(well("a"), TAINT, NOW_S, POLICY)
    node = after(node, Release("a", ""), NOW_S + 3600, POLICY)
    node = after(node, TAINT, NOW_S + 7200, POLICY)
    node = after(node, Release("a", ""), NOW_S + 9000, POLICY)
    node = after(node, TAINT, NOW_S + 9 * DAY_S, POLICY)
    assert [each.relapse for each in node.history] == [False, True, False]


def test_a_node_keeps_sixteen_incidents() -> None:
    node = well("a")
    for day in range(40):
        node = after(node, TAINT, NOW_S + day * DAY_S, POLICY)
        node = after(node, Release("a", ""), NOW_S + day * DAY_S + 9, POLICY)
    assert len(node.history) == 16
    assert node.history[-1].at_s == NOW_S + 39 * DAY_S


def test_an_operator_who_releases_a_node_waives_its_known_findings() -> None:
    node = released_by_operator(after(well("a"), TAINT, NOW_S, POLICY), NOW_S + 60)
    assert node.quarantine is None
    assert node.waiver == Waiver(("k",), NOW_S + 60, "b1")
    assert released_by_operator(well("b"), NOW_S) == well("b")


def test_a_weak_taint_leaves_a_waiver_and_adds_no_incident() -> None:
    weak = Taint("a", PREFER_NOT, ("d",), "none", ("psutil",), "b1", "why")
    node = after(well("a", waiver=Waiver(("x",), 0.0)), weak, NOW_S, POLICY)
    assert (node.waiver, node.history) == (Waiver(("x",), 0.0), ())
    assert released_by_operator(node, NOW_S).waiver == Waiver(("d", "x"), NOW_S, "b1")


AHEAD_S = NOW_S + 30 * DAY_S


def test_each_stored_time_that_is_later_than_now_becomes_now_and_the_others_remain() -> None:
    held = Quarantine(
        ("k",), "replace", ("kmsg",), "b1", AHEAD_S, drain_at_s=AHEAD_S + 1.0, blind_at_s=AHEAD_S
    )
    past = PastQuarantine(1.0, "none", relapse=True)
    node = well(
        "a",
        report=None,
        quarantine=held,
        waiver=Waiver(("x",), AHEAD_S, "b1"),
        history=(past, PastQuarantine(AHEAD_S, "replace")),
        released_at_s=AHEAD_S,
    )
    expected = replace(
        node,
        quarantine=replace(held, at_s=NOW_S, drain_at_s=NOW_S, blind_at_s=NOW_S),
        waiver=Waiver(("x",), NOW_S, "b1"),
        history=(past, PastQuarantine(NOW_S, "replace")),
        released_at_s=NOW_S,
    )
    assert after(node, Refresh("a", ""), NOW_S, POLICY) == expected
    assert after(expected, Refresh("a", ""), NOW_S, POLICY) == expected
    assert after(node, Refresh("a", ""), AHEAD_S + 1.0, POLICY) == node


@pytest.mark.parametrize("silent_s", [10.0, 10 * DAY_S])
@pytest.mark.parametrize(
    "stored",
    [
        {"quarantine": Quarantine(("k",), "replace", ("kmsg",), "b1", AHEAD_S)},
        {"quarantine": Quarantine(("k",), "replace", ("kmsg",), "b1", NOW_S, drain_at_s=AHEAD_S)},
        {"quarantine": Quarantine(("k",), "replace", ("kmsg",), "b1", NOW_S, blind_at_s=AHEAD_S)},
        {"waiver": Waiver(("x",), AHEAD_S)},
        {"history": (PastQuarantine(AHEAD_S, "none"), PastQuarantine(1.0, "none"))},
        {"released_at_s": AHEAD_S},
    ],
)
def test_a_stored_time_that_is_later_than_now_is_corrected_first(
    stored: dict[str, Any], silent_s: float
) -> None:
    seen = pool(well("a", silent_s=silent_s, **stored))
    [found] = asked(seen)
    assert isinstance(found, Refresh)
    assert not any(isinstance(each, Refresh) for each in asked(applied(seen, [found])))


def test_each_action_changes_exactly_these_fields_of_a_node() -> None:
    waiver = Waiver(("x",), 0.0)
    node = well("a", waiver=waiver, released_at_s=NOW_S - 86400.0, history=(PastQuarantine(1.0, "none"),))
    held = Quarantine(("k",), "replace", ("kmsg",), "b1", NOW_S)
    history = (PastQuarantine(1.0, "none"), PastQuarantine(NOW_S, "replace"))
    out = replace(node, quarantine=held, waiver=None, history=history)
    assert after(node, TAINT, NOW_S, POLICY) == out
    soon = (PastQuarantine(1.0, "none"), PastQuarantine(NOW_S - 1.0, "replace", relapse=True))
    assert after(node, TAINT, NOW_S - 1.0, POLICY).history == soon
    blind = replace(out, quarantine=replace(held, blind_at_s=NOW_S, blind_s=7.0))
    assert after(blind, replace(TAINT, evidence=("k", "l")), NOW_S + 9.0, POLICY) == replace(
        blind, quarantine=replace(held, evidence=("k", "l"), blind_at_s=NOW_S, blind_s=7.0)
    )
    drained = replace(out, quarantine=replace(held, drain_at_s=NOW_S + 5.0))
    assert after(out, Drain("a", ""), NOW_S + 5.0, POLICY) == drained
    assert after(node, Drain("a", ""), NOW_S, POLICY) == node
    more = Taint("a", NO_NEW_WORK, ("k", "l"), "reboot_node", ("ecc", "kmsg"), "b2", "why")
    updated = Quarantine(("k", "l"), "reboot_node", ("ecc", "kmsg"), "b2", NOW_S, NO_NEW_WORK, NOW_S + 5.0)
    assert after(drained, more, NOW_S + 9.0, POLICY) == replace(drained, quarantine=updated)
    released = replace(out, quarantine=None, released_at_s=NOW_S + 9.0)
    assert after(out, Release("a", ""), NOW_S + 9.0, POLICY) == released
    assert after(node, Release("a", ""), NOW_S, POLICY) == node
    assert after(node, Forget("a", ""), NOW_S, POLICY) == replace(node, waiver=None)
    assert after(node, Hold("a", ""), NOW_S, POLICY) == node


def test_a_weak_taint_that_becomes_a_strong_one_counts_from_then_on() -> None:
    weak = replace(TAINT, effect=PREFER_NOT)
    avoided = after(well("a"), weak, NOW_S, POLICY)
    assert avoided.quarantine == Quarantine(("k",), "replace", ("kmsg",), "b1", NOW_S, PREFER_NOT)
    taken = after(avoided, TAINT, NOW_S + 9.0, POLICY)
    assert taken.quarantine == Quarantine(("k",), "replace", ("kmsg",), "b1", NOW_S + 9.0)
    assert taken.history == (PastQuarantine(NOW_S + 9.0, "replace"),)


def test_a_waiver_has_a_bounded_number_of_findings_in_order() -> None:
    keys = tuple(f"k{at:03d}" for at in range(MAX_EVIDENCE - 2))
    node = well("a", waiver=Waiver(("a", "k000", "b", "z"), 0.0))
    node = replace(node, quarantine=Quarantine(keys, "replace", ("kmsg",), "b1", 0.0))
    expected = replace(
        node, quarantine=None, waiver=Waiver(("a", "b", *keys), NOW_S, "b1"), released_at_s=NOW_S
    )
    assert released_by_operator(node, NOW_S) == expected


def test_a_full_waiver_does_not_leave_out_what_the_operator_has_just_released() -> None:
    full = Waiver(tuple(f"k{at:03d}" for at in range(MAX_EVIDENCE)), 0.0)
    node = replace(
        well("a", waiver=full), quarantine=Quarantine(("z",), "none", ("kmsg",), "b1", 0.0, PREFER_NOT)
    )
    waiver = released_by_operator(node, NOW_S).waiver
    assert waiver is not None
    assert waiver.evidence == (*full.evidence[:-1], "z")


def test_what_an_operator_takes_out_has_the_operator_as_its_source_and_is_no_incident() -> None:
    node = quarantined_by_operator(well("a", waiver=Waiver(("k",), 0.0)), "smell", NOW_S)
    assert node.quarantine == Quarantine(("operator: smell",), "none", (OPERATOR,), "b1", NOW_S)
    assert (node.waiver, node.history) == (None, ())
    again = quarantined_by_operator(node, "noise", NOW_S + 5, drain=True)
    assert again.quarantine == replace(node.quarantine, drain_at_s=NOW_S + 5)
    assert quarantined_by_operator(again, "x", NOW_S + 9, drain=True) == again


def test_an_operator_can_take_over_a_node_that_is_out_for_its_evidence() -> None:
    tainted = after(well("a"), TAINT, NOW_S, POLICY)
    held = quarantined_by_operator(tainted, "x" * 1000, NOW_S + 5).quarantine
    assert held is not None
    assert (held.action, held.at_s, held.sources) == ("replace", NOW_S, ("kmsg", OPERATOR))
    assert max(map(len, held.evidence)) == 120
    full = replace(held, evidence=tuple(map(str, range(MAX_EVIDENCE))), sources=())
    held = quarantined_by_operator(replace(tainted, quarantine=full), "x", NOW_S).quarantine
    assert held is not None
    assert len(held.evidence) == MAX_EVIDENCE
    assert "operator: x" in held.evidence


def test_the_newest_faults_that_runs_have_seen_are_kept_for_a_day() -> None:
    old, new = RunFault(NOW_S - RUNS_S), RunFault(NOW_S - 1, "GPU-1")
    node = with_run_faults(well("a", runs=(old,)), [new, new], NOW_S)
    assert node.runs == (new,)
    assert with_run_faults(node, [new], NOW_S) == node
    many = [RunFault(NOW_S - at) for at in range(3 * MAX_RUNS)]
    assert with_run_faults(node, many, NOW_S).runs[-1] == many[0]
    assert len(with_run_faults(node, many, NOW_S).runs) == MAX_RUNS


def test_a_fault_of_a_run_from_a_clock_that_was_ahead_is_set_to_now() -> None:
    node = well("a", runs=(RunFault(NOW_S + 1e6),))
    assert [type(each) for each in asked(pool(node))] == [Refresh]
    assert after(node, Refresh("a", ""), NOW_S, POLICY).runs == (RunFault(NOW_S),)
