"""What is planned, and that every interrupted prefix of it converges with the next leader."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from supervisor.nodes import patches
from supervisor.nodes.names import RECORD, REQUEST, REQUESTED_BY, TAINT
from supervisor.quarantine.model import NodePolicy, RunFault
from tests.unit.supervisor.nodes.node_samples import (
    FOREIGN,
    NOW_S,
    XID,
    NodesInMemory,
    PlayedLeader,
    StaleWrite,
    healthy_pool,
    heard_by,
)

HOUR_S = 3600.0
Change = Callable[[NodesInMemory], None]


def fall_ill(nodes: NodesInMemory) -> None:
    nodes.report("a", XID)


def taken_out() -> NodesInMemory:
    """Return three nodes of which one is out and drained, with its condition."""
    nodes, leader = healthy_pool("a", "b", "c")
    fall_ill(nodes)
    busy = replace(leader.policy, drain_for=frozenset({"reboot_node"}))
    leader.policy = busy
    assert leader.settle(1.0) == ["taint", "condition"]
    return nodes


def recover(nodes: NodesInMemory) -> None:
    """The node boots, and is healthy for a day."""
    nodes.now_s += 24 * HOUR_S
    nodes.objects["a"]["status"]["nodeInfo"]["bootID"] = "b2"
    nodes.report("a", boot_id="b2")


def release_by_hand(nodes: NodesInMemory) -> None:
    nodes.untaint("a")


def request(text: str) -> Change:
    return lambda nodes: nodes.annotate("a", REQUEST, text)


CHANGES: dict[str, tuple[Callable[[], NodesInMemory], Change, list[str]]] = {
    "taint": (lambda: healthy_pool("a", "b", "c")[0], fall_ill, ["taint", "condition"]),
    "release": (taken_out, recover, ["release", "condition"]),
    "by hand": (taken_out, release_by_hand, ["operator_release", "condition"]),
    "request": (taken_out, request("release"), ["operator_release", "condition"]),
    "quarantine": (
        lambda: healthy_pool("a", "b", "c")[0],
        request("quarantine: smell"),
        ["operator_quarantine", "condition"],
    ),
    "drain": (
        lambda: healthy_pool("a", "b", "c")[0],
        request("quarantine+drain: smell"),
        ["operator_quarantine", "condition"],
    ),
    "refused": (taken_out, request("relaese"), ["request_refused"]),
}  # fmt: skip


def after_prefix(name: str, prefix: int) -> tuple[NodesInMemory, list[str]]:
    """Interrupt the first leader after so many writes; the next one carries on. Return all writes."""
    make, change, _ = CHANGES[name]
    nodes = make()
    nodes.writes.clear()
    first, second = PlayedLeader(nodes), PlayedLeader(nodes)
    heard_by(first, nodes)
    heard_by(second, nodes)
    change(nodes)
    for each in (first, second):
        each.hear(10.0)
    steps = first.steps(10.0)
    for _ in range(prefix):
        next(steps)
    second.settle(10.0)
    assert second.settle(11.0) == [], "the second leader repeats something"
    assert PlayedLeader(nodes).settle(0.0) == [], "a leader that has heard nothing acts"
    return nodes, nodes.writes


@pytest.mark.parametrize("name", CHANGES)
def test_every_interrupted_prefix_converges_with_the_next_leader_and_is_never_repeated(name: str) -> None:
    expected = CHANGES[name][2]
    states = []
    for prefix in range(len(expected) + 1):
        nodes, writes = after_prefix(name, prefix)
        assert writes == expected, prefix
        nodes.taint("a")
        states.append((nodes.objects["a"]["spec"], nodes.record("a"), nodes.condition("a")))
    assert all(each == states[0] for each in states)


def test_two_leaders_at_once_taint_a_node_once() -> None:
    nodes, first = healthy_pool("a", "b", "c")
    second = heard_by(PlayedLeader(nodes), nodes)
    fall_ill(nodes)
    first.hear(1.0)
    second.hear(1.0)
    [one], [other] = first.plan(1.0).writes, second.plan(1.0).writes
    stale = nodes.known("a")
    first.write(one)
    body = patches.main_patch(stale, other.after, other.note, "x")
    with pytest.raises(StaleWrite):
        nodes.patch("a", body, "taint")
    second.settle(1.0)
    assert nodes.writes == ["taint", "condition"]
    assert len(nodes.record("a")["history"]) == 1


def test_a_leader_that_has_just_begun_believes_no_report_until_it_changes() -> None:
    nodes, _ = healthy_pool("a", "b", "c")
    fall_ill(nodes)
    late = PlayedLeader(nodes)
    assert late.settle(0.0) == []
    assert {each.why for each in late.plan(0.0).holds} == {"unknown: no agent has reported"}
    for name in ("b", "c"):
        nodes.report(name)
    assert late.settle(20.0) == []
    nodes.report("a", XID, held_s=120.0)
    assert late.settle(30.0) == ["taint", "condition"]


def test_a_clock_that_jumps_condemns_and_releases_nobody() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    nodes.now_s += 400 * 24 * HOUR_S
    assert leader.settle(1.0) == []
    fall_ill(nodes)
    assert leader.settle(2.0) == ["taint", "condition"]
    nodes.now_s = NOW_S  # set back: what is stored lies in the future
    nodes.report("a", XID)
    assert leader.settle(3.0) == ["refresh"]
    assert nodes.record("a")["quarantine"]["at_s"] == NOW_S
    nodes.now_s += 400 * 24 * HOUR_S
    nodes.report("a", XID)
    assert leader.settle(4.0) == []
    assert nodes.taint("a") is not None


def test_a_dry_run_plans_no_write_but_carries_out_what_operators_ask() -> None:
    nodes, _ = healthy_pool("a", "b", "c")
    leader = heard_by(PlayedLeader(nodes, is_dry=True), nodes)
    fall_ill(nodes)
    leader.runs["a"] = (RunFault(NOW_S - 5),)
    before = copy.deepcopy(nodes.objects)
    assert leader.settle(1.0) == []
    assert nodes.objects == before
    assert [type(each).__name__ for each in leader.plan(1.0).dry] == ["Taint"]
    request("quarantine+drain: smell")(nodes)
    assert leader.settle(2.0) == ["operator_quarantine", "condition"]
    assert leader.plan(2.0).draining == (("a", "an operator has taken it out: smell"),)


def test_most_nodes_bad_are_held_by_the_breaker() -> None:
    nodes, leader = healthy_pool("a", "b", "c", "d")
    for name in ("a", "b", "c"):
        nodes.report(name, XID)
    assert leader.settle(1.0) == ["taint", "condition"]
    held = [each for each in leader.plan(1.0).holds if "1 of 4 nodes are out" in each.why]
    assert len(held) == 2


def test_a_node_without_an_agent_is_not_in_the_pool_unless_it_is_out() -> None:
    nodes, leader = healthy_pool("a", "b")
    del nodes.objects["b"]["metadata"]["annotations"]["holdfast.dev/node-health"]
    nodes.touch("b")
    assert [each.name for each in leader.plan(1.0).pool.nodes] == ["a"]
    nodes.annotate("b", REQUEST, "quarantine: smell")
    assert leader.settle(2.0) == ["operator_quarantine", "condition"]
    assert [each.name for each in leader.plan(2.0).pool.nodes] == ["a", "b"]
    nodes.annotate("b", REQUEST, "release")
    leader.settle(3.0)
    assert nodes.taint("b") is None


def test_a_taint_that_was_set_by_hand_stays_until_an_operator_removes_it() -> None:
    nodes, leader = healthy_pool("a", "b")
    by_hand = {"key": TAINT, "value": "x", "effect": "NoSchedule"}
    nodes.objects["a"]["spec"]["taints"].append(by_hand)
    nodes.touch("a")
    assert leader.settle(1.0) == ["operator_quarantine", "condition"]
    recover(nodes)
    assert leader.settle(2.0) == []
    assert nodes.taint("a") is not None
    nodes.untaint("a")
    assert leader.settle(3.0) == ["operator_release", "forget", "condition"]


def test_a_release_is_a_waiver_of_this_boot_even_if_no_report_has_been_heard() -> None:
    nodes = taken_out()
    request("release")(nodes)
    assert PlayedLeader(nodes).settle(0.0) == ["operator_release", "condition"]
    waiver = nodes.record("a")["waiver"]
    assert (waiver["evidence"], waiver["boot_id"]) == (["GPU-1 xid 79 reboot_node"], "b1")
    condition = nodes.condition("a")
    assert condition is not None
    assert (condition["status"], condition["reason"]) == ("False", "ReleasedByOperator")


def test_the_record_names_who_requested_it() -> None:
    nodes, leader = healthy_pool("a", "b")
    nodes.annotate("a", REQUESTED_BY, "eva\n@example.com")
    request("quarantine: smell")(nodes)
    assert leader.settle(1.0) == ["operator_quarantine", "condition"]
    record = nodes.record("a")
    assert (record["by"], record["why"]) == (
        "operator eva @example.com",
        "an operator (eva @example.com) has taken it out: smell",
    )
    assert REQUESTED_BY not in nodes.objects["a"]["metadata"]["annotations"]
    request("release")(nodes)
    leader.settle(2.0)
    assert (nodes.record("a")["by"], nodes.record("a")["why"]) == ("operator", "an operator has released it")
    nodes.annotate("a", REQUESTED_BY, "eva")
    request("quarantine: smell")(nodes)
    leader.settle(3.0)
    nodes.annotate("a", REQUESTED_BY, "eva")
    request("release")(nodes)
    leader.settle(4.0)
    condition = nodes.condition("a")
    assert condition is not None
    assert condition["reason"] == "ReleasedByOperator"


def test_a_release_of_a_node_in_service_removes_only_the_request() -> None:
    nodes, leader = healthy_pool("a", "b")
    request("release")(nodes)
    assert leader.settle(1.0) == ["operator_release"]
    assert REQUEST not in nodes.objects["a"]["metadata"]["annotations"]
    assert "waiver" not in nodes.record("a")


def test_an_unreadable_record_is_an_alert_and_changed_only_at_an_operators_request() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    nodes.annotate("a", RECORD, '{"quarantine": 5}')
    nodes.objects["a"]["spec"]["taints"].append({"key": TAINT, "value": "x", "effect": "NoSchedule"})
    nodes.touch("a")
    assert leader.settle(1.0) == []
    found = leader.plan(1.0)
    [hold] = [each for each in found.holds if each.node == "a"]
    assert hold.alert
    assert "quarantine is 5; expected an object" in hold.why
    assert found.breaker.out == 1
    request("release")(nodes)
    assert leader.settle(2.0)[0] == "operator_release"
    assert nodes.objects["a"]["spec"]["taints"] == FOREIGN
    assert "quarantine" not in nodes.record("a")


def test_what_a_run_has_seen_is_stored_and_is_a_witness_for_the_next_leader() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    alone = {**XID, "sources": ["kmsg"], "origins": ["driver log"]}
    leader.runs["a"] = (RunFault(NOW_S - 30.0, "GPU-1"),)
    assert leader.settle(1.0) == ["run_faults"]
    assert nodes.record("a") == {"runs": [{"at_s": NOW_S - 30.0, "device": "GPU-1"}]}
    successor = heard_by(PlayedLeader(nodes), nodes)
    nodes.report("b", alone)
    assert successor.settle(1.0) == []
    nodes.report("a", alone)
    assert successor.settle(2.0) == ["taint", "condition"]


def test_a_deleted_node_leaves_nothing_behind() -> None:
    nodes = taken_out()
    del nodes.objects["a"]
    nodes.add("a")  # another machine under the same name
    nodes.objects["a"]["metadata"]["uid"] = "new"
    leader = heard_by(PlayedLeader(nodes), nodes)
    assert leader.settle(1.0) == []
    assert leader.plan(1.0).breaker.out == 0


def test_a_drain_is_planned_by_evidence_and_continued_by_the_next_leader() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    fall_ill(nodes)
    leader.settle(1.0)
    stored = nodes.record("a")
    stored["quarantine"]["drain_at_s"] = NOW_S
    nodes.annotate("a", RECORD, json.dumps(stored))
    assert [name for name, _ in PlayedLeader(nodes).plan(0.0).draining] == ["a"]
    dry = PlayedLeader(nodes, NodePolicy(), is_dry=True)
    assert dry.plan(0.0).draining == ()
