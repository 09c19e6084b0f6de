"""Which node is disturbed, when the decision was made, and what fits beside others on a node."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.cluster.nodes import node_faults
from bench.cluster.nodes.node_faults import free_millicores, noticed_s, requested, victim

NODES = {0: "n0", 1: "n1"}


def test_ranks_take_turns_but_a_node_that_was_hit_less_often_comes_first() -> None:
    assert victim(NODES, "n9", {}, 0, with_leader=False) == (0, "n0")
    assert victim(NODES, "n9", {}, 1, with_leader=False) == (1, "n1")
    assert victim(NODES, "n9", {"n0": 1}, 0, with_leader=False) == (1, "n1")
    assert victim(NODES, "n9", {"n0": 1, "n1": 1}, 0, with_leader=None) == (0, "n0")


def test_the_leaders_node_is_avoided_or_wanted_if_there_is_a_choice() -> None:
    assert victim(NODES, "n0", {"n1": 3}, 0, with_leader=False) == (1, "n1")
    assert victim(NODES, "n0", {"n0": 3}, 1, with_leader=True) == (0, "n0")
    assert victim({0: "n0"}, "n0", {}, 0, with_leader=False) == (0, "n0")
    assert victim(NODES, "n9", {}, 1, with_leader=True) == (1, "n1")


def test_the_time_of_the_decision_is_computed_backwards_from_the_first_new_step() -> None:
    timeline = [{"what": "fault", "at_s": 0}, {"what": "decided", "at_s": 3.1}]
    incident = {"timeline": timeline, "recovered_s": 3.5}
    assert noticed_s(5.0, incident) == pytest.approx(4.6)
    assert noticed_s(0.1, incident) == 0.0
    assert math.isnan(noticed_s(5.0, {**incident, "recovered_s": None}))
    assert math.isnan(noticed_s(5.0, {**incident, "timeline": timeline[:1]}))


def container(cpu: str = "", **more: str) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu} if cpu else {}}, **more}


def test_requests_count_as_the_scheduler_counts_them() -> None:
    sidecar = container("100m", restartPolicy="Always")
    plain: dict[str, Any] = {"spec": {"containers": [container("200m"), container()]}}
    assert requested(plain) == 200
    assert requested({"spec": {**plain["spec"], "initContainers": [sidecar]}}) == 300
    assert requested({"spec": {**plain["spec"], "initContainers": [container("2")]}}) == 2000
    assert requested({"spec": {**plain["spec"], "initContainers": [sidecar, container("250m")]}}) == 350
    assert requested({"spec": {**plain["spec"], "overhead": {"cpu": "50m"}}}) == 250
    assert requested({**plain, "status": {"phase": "Succeeded"}}) == 0


def test_what_is_free_is_what_others_leave() -> None:
    node = {"status": {"allocatable": {"cpu": "1.5"}}}
    pod = {"spec": {"containers": [container("200m")]}}
    assert free_millicores(node, [pod, pod]) == 1100
    spec = node_faults.preemptor("n1", 1100)["spec"]
    assert requested({"spec": spec}) == 1100
    assert spec["nodeSelector"] == {"kubernetes.io/hostname": "n1"}
