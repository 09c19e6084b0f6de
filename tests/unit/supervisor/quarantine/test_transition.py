from __future__ import annotations

from supervisor.quarantine.model import NO_NEW_WORK, PREFER_NOT, Drain, Forget, Hold, Release, Taint, Waiver
from supervisor.quarantine.transition import after, released_by_operator
from tests.unit.supervisor.node_views import DAY_S, NOW_S, POLICY, well

TAINT = Taint("a", NO_NEW_WORK, ("k",), "replace", ("kmsg",), "b1", "why")


def test_each_action_twice_is_as_once() -> None:
    node = well("a", waiver=Waiver(("x",), 0.0))
    for action in (Forget("a", ""), TAINT, Drain("a", ""), Hold("a", ""), Release("a", "")):
        node = after(node, action, NOW_S, POLICY)
        assert after(node, action, NOW_S, POLICY) == node


def test_a_taint_is_an_incident_and_a_second_one_soon_after_a_release_a_relapse() -> None:
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


def test_an_operator_who_frees_a_node_waives_what_was_known() -> None:
    node = released_by_operator(after(well("a"), TAINT, NOW_S, POLICY), NOW_S + 60)
    assert node.quarantine is None
    assert node.waiver == Waiver(("k",), NOW_S + 60)
    assert released_by_operator(well("b"), NOW_S) == well("b")


def test_a_weak_taint_leaves_a_waiver_and_adds_no_incident() -> None:
    weak = Taint("a", PREFER_NOT, ("d",), "none", ("psutil",), "b1", "why")
    node = after(well("a", waiver=Waiver(("x",), 0.0)), weak, NOW_S, POLICY)
    assert (node.waiver, node.history) == (Waiver(("x",), 0.0), ())
    assert released_by_operator(node, NOW_S).waiver == Waiver(("d", "x"), NOW_S)
