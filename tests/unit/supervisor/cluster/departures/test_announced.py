"""What announces the departure of a member, when it ends, and which pods the supervisor evicts itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisor.cluster.adoption.tolerations import Toleration
from supervisor.cluster.departures.announced import EVICT_AGAIN_S, AnnouncedDepartures
from supervisor.cluster.departures.node_notices import KUBELET_RESTART_S
from supervisor.cluster.pods import PodMember, member_name
from supervisor.kubernetes.watch import ObjectName
from supervisor.view.model import Departure

S = 1_000_000_000


def pod(number: int = 0, **given: Any) -> PodMember:
    uid, name = f"{number:08x}-0000", f"w-{number}"
    made = PodMember(uid, name, member_name(name, uid, 0), f"n{number}", "c", is_running=True)
    return replace(made, **given)


def tainted(key: str, effect: str = "NoSchedule", name: str = "n0") -> dict[ObjectName, Any]:
    node = {"metadata": {"name": name}, "spec": {"taints": [{"key": key, "effect": effect}]}}
    return {ObjectName("", name): node}


def only(found: dict[str, Departure]) -> Departure:
    [departure] = found.values()
    return departure


def test_a_pod_that_nothing_disturbs_stays() -> None:
    assert AnnouncedDepartures().observe([pod()], {}, 100.0) == {}


def test_a_pod_that_is_being_deleted_ends_after_its_grace_period() -> None:
    found = AnnouncedDepartures()
    leaving = pod(is_leaving=True, grace_s=30.0)
    for now_s in (100.0, 110.0):
        assert only(found.observe([leaving], {}, now_s)) == Departure(
            "its pod is being deleted", 130 * S, True
        )


@pytest.mark.parametrize(
    ("reason", "words", "has_begun"),
    [
        ("PreemptionByScheduler", "it is being preempted by a pod with a higher priority", False),
        ("EvictionByEvictionAPI", "it is being evicted", False),
        ("DeletionByTaintManager", "it does not tolerate a taint of its node", False),
        ("TerminationByKubelet", "the kubelet is terminating it", True),
        ("SomethingNew", "its pod is about to be disrupted (SomethingNew)", False),
    ],
)
def test_a_pod_with_the_condition_disruption_target_is_about_to_end(
    reason: str, words: str, has_begun: bool
) -> None:
    found = only(AnnouncedDepartures().observe([pod(disruption=reason)], {}, 100.0))
    assert (found.why, found.has_begun, found.ends_ns) == (words, has_begun, 0)


def test_the_deletion_says_why_the_pod_is_deleted() -> None:
    leaving = pod(is_leaving=True, disruption="PreemptionByScheduler")
    found = only(AnnouncedDepartures().observe([leaving], {}, 100.0))
    assert found.why == "its pod is being deleted: it is being preempted by a pod with a higher priority"


def test_a_notice_on_the_node_moves_only_the_pods_of_that_node() -> None:
    nodes = tainted("ToBeDeletedByClusterAutoscaler")
    found = AnnouncedDepartures().observe([pod(0), pod(1)], nodes, 100.0)
    assert [*found] == [pod(0).member]
    assert AnnouncedDepartures().observe([pod(0), pod(1)], tainted("x", "NoSchedule"), 100.0) == {}


def test_a_pod_that_tolerates_a_taint_for_a_while_ends_after_that() -> None:
    found = AnnouncedDepartures()
    tolerating = pod(tolerations=(Toleration("gpu", "Exists", seconds=60.0),))
    assert only(found.observe([tolerating], tainted("gpu", "NoExecute"), 100.0)).ends_ns == 160 * S
    assert only(found.observe([tolerating], tainted("gpu", "NoExecute"), 120.0)).ends_ns == 160 * S
    assert found.observe([tolerating], {}, 130.0) == {}, "the taint was removed"
    assert only(found.observe([tolerating], tainted("gpu", "NoExecute"), 140.0)).ends_ns == 200 * S


def test_a_node_that_is_silent_for_a_moment_moves_nothing() -> None:
    key = "node.kubernetes.io/unreachable"
    found, nodes = AnnouncedDepartures(), tainted(key, "NoExecute")
    default = pod(tolerations=(Toleration(key, "Exists", "", "NoExecute", 300.0),))
    assert found.observe([default], nodes, 100.0) == {}
    assert found.observe([default], nodes, 100.0 + KUBELET_RESTART_S - 1) == {}
    assert only(found.observe([default], nodes, 100.0 + KUBELET_RESTART_S)).ends_ns == 400 * S


def test_a_pod_whose_container_does_not_run_is_no_member_that_could_move() -> None:
    assert AnnouncedDepartures().observe([pod(is_running=False)], tainted("gpu", "NoExecute"), 100.0) == {}


def test_a_request_to_leave_a_node_applies_to_the_pods_that_are_there_now() -> None:
    found = AnnouncedDepartures()
    for _ in range(2):
        found.leave([pod(0), pod(1)], "n0", "node n0 is quarantined: Xid 79")
    assert only(found.observe([pod(0), pod(1)], {}, 100.0)) == Departure("node n0 is quarantined: Xid 79")
    later = pod(2, node="n0")
    assert found.observe([pod(1), later], {}, 101.0) == {}
    assert found.observe([pod(0), pod(1)], {}, 102.0) == {}, "the pod was gone"


def test_pods_that_were_asked_to_leave_and_standbys_are_evicted_and_others_are_left_to_their_owner() -> None:
    found = AnnouncedDepartures()
    asked, ours, owners, deleted = pod(0), pod(1, is_standby=True), pod(2), pod(3, is_leaving=True)
    pods = [asked, ours, owners, deleted]
    found.leave(pods, "n0", "node n0 is quarantined")
    nodes = {**tainted("gpu", "NoExecute", "n1"), **tainted("gpu", "NoExecute", "n2")}
    departing = found.observe(pods, nodes, 100.0)
    assert {*departing} == {each.member for each in pods}
    assert found.take_due_evictions(pods, departing, 100.0) == [asked, ours]
    assert found.take_due_evictions(pods, departing, 100.0 + EVICT_AGAIN_S - 1) == []
    assert found.take_due_evictions(pods, departing, 100.0 + EVICT_AGAIN_S) == [asked, ours]


def bad_node(name: str = "n0") -> dict[ObjectName, Any]:
    verdict = {"type": "GpuHealthy", "status": "False", "message": "GPU 3 is lost"}
    return {ObjectName("", name): {"metadata": {"name": name}, "status": {"conditions": [verdict]}}}


def test_a_verdict_moves_a_member_with_ranks_only_if_the_quarantine_lets_it() -> None:
    member = pod().member
    assert AnnouncedDepartures().observe([pod()], bad_node(), 100.0, frozenset({"n1"}), {member}) == {}
    found = only(AnnouncedDepartures().observe([pod()], bad_node(), 100.0, frozenset({"n0"}), {member}))
    assert found == Departure("the node agent of n0 reports: GPU 3 is lost", may_stay=True)


def test_a_member_without_ranks_on_a_node_with_a_verdict_is_a_worse_choice_and_is_not_evicted() -> None:
    idle = pod(is_standby=True)
    found = AnnouncedDepartures()
    departing = found.observe([idle], bad_node(), 100.0)
    assert only(departing).may_stay
    assert found.take_due_evictions([idle], departing, 100.0) == []


def test_the_pod_of_a_member_is_evicted_and_its_restarted_container_is_not() -> None:
    found = AnnouncedDepartures()
    found.leave_as_members([pod(0), pod(1)], {pod(1).member}, "its peers did not reach it")
    announced = found.observe([pod(0), pod(1)], {}, 5.0)
    assert {name: each.why for name, each in announced.items()} == {
        pod(1).member: "its peers did not reach it"
    }
    assert announced[pod(1).member].may_stay, "it is a last choice until it is gone"
    assert found.take_due_evictions([pod(0), pod(1)], announced, 5.0) == [pod(1)]
