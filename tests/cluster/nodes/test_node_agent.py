"""Node agents publish to the Nodes of a real cluster. A stand-in for NVML simulates their GPUs."""

from __future__ import annotations

import json
import signal
import time

from holdfast.node_report import REPORT
from nodeagent.publishing.conditions import GPU
from nodeagent.publishing.schedule import HEARTBEAT_S
from supervisor.quarantine.reports import read_report
from tests.cluster.apparatus.fake_gpus import Agents
from tests.cluster.apparatus.kubernetes_cluster import (
    AGENT,
    NODES,
    READY_S,
    ClusterUnderTest,
)
from tests.cluster.apparatus.node_processes import NodeProcesses

SEEN_S = 15.0  # from a fault until the Node shows it, on a busy machine; usually a second


def test_every_node_has_both_conditions_and_a_report_of_its_own_machine(agents: Agents) -> None:
    assert agents.nodes
    for node in agents.nodes:
        agents.until(node, "True Healthy")
        found = agents.cluster.read(f"/api/v1/nodes/{node}")
        raw = json.loads(found["metadata"]["annotations"][REPORT])
        info = found["status"]["nodeInfo"]
        assert (raw["node"], raw["boot_id"]) == (node, info["bootID"])
        assert raw["machine_id"] == info["machineID"]
        report = read_report(raw)
        assert len(report.devices) == 2


def test_a_finding_changes_the_conditions_of_its_node_only(agents: Agents) -> None:
    node, *others = agents.nodes
    agents.xid_79(node)
    agents.until(node, "False Xid79", SEEN_S)
    found = agents.cluster.read(f"/api/v1/nodes/{node}")
    findings = read_report(json.loads(found["metadata"]["annotations"][REPORT])).findings
    (finding,) = (each for each in findings if each.device)
    assert (finding.level, finding.action) == ("unhealthy", "reboot_node")
    for other in others:
        assert agents.published(other)[0][GPU] == "True Healthy"


def test_a_deleted_agent_makes_its_node_unknown_until_the_next_one_has_looked(agents: Agents) -> None:
    """The next pod has other GPUs and another saved state, so the previous test's finding is gone."""
    node = agents.nodes[0]
    name = agents.pod(node)["metadata"]["name"]
    agents.cluster.kubectl("delete", "pod", name, "-n", NODES, "--wait=false")
    seen = agents.watch(node, "True Healthy")
    assert "Unknown AgentStopped" in seen or "Unknown AgentStarting" in seen, seen
    assert agents.pod(node)["metadata"]["name"] != name


def test_the_report_of_an_agent_that_is_frozen_or_killed_goes_stale(
    agents: Agents, node_processes: NodeProcesses
) -> None:
    node = agents.nodes[-1]
    pod = agents.pod(node)
    container = pod["status"]["containerStatuses"][0]
    node_processes.signal_first(node, container["containerID"], signal.SIGSTOP)
    stale = agents.published(node)[1]  # a write that was in flight has arrived
    end_s = time.monotonic() + HEARTBEAT_S + 5.0
    while time.monotonic() < end_s:  # nothing can announce that nothing happens
        words, at = agents.published(node)
        assert (words[GPU], at) == ("True Healthy", stale), "a frozen agent has written"
        time.sleep(1.0)
    node_processes.kill_first(node, container["containerID"])
    agents.cluster.until(
        lambda: True if agents.published(node)[1] > stale else None, "another report", NODES, READY_S
    )
    agents.until(node, "True Healthy")
    again = agents.pod(node)
    assert again["metadata"]["name"] == pod["metadata"]["name"]
    assert again["status"]["containerStatuses"][0]["restartCount"] == container["restartCount"] + 1


def test_the_api_server_has_no_doubt_about_the_policy(installed: ClusterUnderTest) -> None:
    """It checks the types of each expression, and lists what it cannot explain."""
    path = f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{AGENT}"
    status = installed.until(
        lambda: installed.read(path).get("status") or None, "the policy has been checked", NODES, READY_S
    )
    assert status["typeChecking"] == {}
