"""A GPU of a node fails. The jobs leave the node, and no pod starts there until it has proven its health.

The times in the quarantine's settings are as short as allowed. One of three nodes may be out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest

from supervisor.nodes.names import CONDITION, CONFIG, RECORD, TAINT
from tests.cluster.apparatus.fake_gpus import Agents
from tests.cluster.apparatus.kubernetes_cluster import READY_S, SYSTEM, ClusterUnderTest, Json
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import START_S, TrainingJob
from tests.cluster.conftest import refuse
from tests.cluster.nodes.test_planned import NODES, moved, node_of, standby, started

SETTINGS = {
    "dry-run": "false", "confirm": "1s", "confirm-alone": "2s", "storm-window": "5s", "cooldown": "5s",
    "clean": "10s", "unremedied": "1", "alert": "1h", "max-share": "0.34",
}  # fmt: skip
QUARANTINE_S = 60.0  # from a verdict to the taint, and from health to the release, on a busy machine


class Quarantine:
    """What the quarantine has written to the Nodes."""

    def __init__(self, cluster: ClusterUnderTest) -> None:
        self.cluster = cluster

    def node(self, name: str) -> Json:
        return self.cluster.read(f"/api/v1/nodes/{name}")

    def taint(self, name: str) -> str:
        """Return the value of Holdfast's taint; "" if there is none."""
        taints = self.node(name)["spec"].get("taints") or ()
        return next((str(each.get("value")) for each in taints if each["key"] == TAINT), "")

    def condition(self, name: str) -> Json:
        conditions = {each["type"]: each for each in self.node(name)["status"]["conditions"]}
        found: Json = conditions.get(CONDITION, {})
        return found

    def said(self, name: str, reason: str) -> str:
        """Return the message of the newest Event about a node; "" if there is none."""
        fields = f"involvedObject.kind=Node,involvedObject.name={name},reason={reason}"
        found = self.cluster.read(f"/api/v1/namespaces/default/events?fieldSelector={fields}")["items"]
        return max(((each.get("lastTimestamp") or "", each["message"]) for each in found), default=("", ""))[
            1
        ]

    def until(self, look: object, what: str, limit_s: float = QUARANTINE_S) -> None:
        assert callable(look)
        self.cluster.until(lambda: look() or None, what, SYSTEM, limit_s)


@pytest.fixture(scope="module")
def quarantine(installed: ClusterUnderTest, agents: Agents) -> Iterator[Quarantine]:
    if len(agents.nodes) < NODES:
        refuse(f"the cluster has {len(agents.nodes)} nodes; expected at least {NODES}")
    given = [f"--from-literal={key}={value}" for key, value in SETTINGS.items()]
    installed.kubectl("create", "configmap", CONFIG, "-n", SYSTEM, *given)
    yield Quarantine(installed)
    installed.kubectl("delete", "configmap", CONFIG, "-n", SYSTEM)
    for node in agents.nodes:  # the storm leaves them faulty
        installed.attempt("taint", "nodes", node, f"{TAINT}-")
        installed.kubectl("annotate", "node", node, f"{RECORD}-")


@pytest.fixture(scope="module")
def job(installed: ClusterUnderTest, namespaces: Namespaces, quarantine: Quarantine) -> Iterator[TrainingJob]:
    """Yield a job that trains forever on two nodes, with a standby that is ready on the third."""
    job = started(installed, namespaces, steps=1_000_000, standby="1")
    job.trains()
    job.until(lambda: standby(job), "a standby is warm", START_S)
    yield job
    namespaces.delete(job.namespace)


def stranger(node: str) -> Json:
    """Return another user's pod, which may run only on this node."""
    container = {
        "name": "sleeps",
        "image": "holdfast-trainer:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [container],
        "terminationGracePeriodSeconds": 1,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"}, "spec": spec}


def test_a_node_with_an_xid_loses_its_member_and_gets_nothing_new_until_it_is_proven(
    job: TrainingJob, agents: Agents, quarantine: Quarantine, namespaces: Namespaces
) -> None:
    cluster, before = quarantine.cluster, job.observe()
    node = node_of(job, job.rank_pod(1))
    at_s = agents.xid_79(node)
    agents.until(node, "False Xid79")
    reported = agents.published(node)[1]
    verdict_s = datetime.fromisoformat(reported.replace("Z", "+00:00")).timestamp() - at_s
    incident = moved(job, 1, before)
    assert f"the node agent of {node} reports" in incident["why"]
    print(f"Xid 79: verdict on the Node after {verdict_s:.2f} s")  # noqa: T201

    quarantine.until(lambda: quarantine.taint(node) == "reboot_node", f"{node} is tainted")
    quarantine.until(lambda: quarantine.condition(node).get("status") == "True", f"{node} says so")
    record = json.loads(quarantine.node(node)["metadata"]["annotations"][RECORD])
    assert record["by"] == "holdfast"
    assert any("xid" in each for each in record["quarantine"]["evidence"]), record
    others = [each for each in agents.nodes if each != node]
    assert not any(quarantine.taint(each) for each in others)

    namespace = namespaces.make("baseline")
    cluster.kubectl("create", "-n", namespace, "-f", "-", text=json.dumps(stranger(node)))
    path = f"/api/v1/namespaces/{namespace}/pods/stranger"

    def refused() -> bool:
        conditions = cluster.read(path)["status"].get("conditions") or ()
        found = (each["message"] for each in conditions if each.get("reason") == "Unschedulable")
        return any("untolerated taint" in each for each in found)  # newer schedulers do not name the taint

    quarantine.until(refused, "the scheduler refuses the node because of the taint")

    agents.clear(node)
    quarantine.until(lambda: not quarantine.taint(node), f"{node} is released", READY_S)
    quarantine.until(lambda: quarantine.condition(node).get("reason") == "Released", f"{node} says so")
    lands = "the pod that waited runs on the node that is released"
    quarantine.until(lambda: cluster.read(path)["status"]["phase"] == "Running", lands)
    namespaces.delete(namespace)


def test_in_a_storm_nobody_moves_and_the_breaker_says_so(
    job: TrainingJob, agents: Agents, quarantine: Quarantine
) -> None:
    """The standby's node turns bad first, because members of one node may move before a storm is noticed."""
    spare = job.until(lambda: standby(job), "a standby is warm", START_S)
    first = node_of(job, spare)
    trained = [each for each in agents.nodes if each != first]
    before = job.observe()
    for node in (first, *trained):
        agents.xid_79(node)
        agents.until(node, "False Xid79")
    for node in trained:
        quarantine.until(lambda node=node: quarantine.said(node, "VerdictHeld"), f"{node}: its members stay")
    said = [quarantine.said(node, "VerdictHeld") for node in trained]
    assert all("its members stay" in each for each in said), said
    assert any("a storm" in each or "may be taken out" in each for each in said), said

    quarantine.until(lambda: any(map(quarantine.taint, agents.nodes)), "one node is tainted")
    job.trains()
    assert sum(bool(quarantine.taint(each)) for each in agents.nodes) == 1, "more than the breaker allows"
    assert "the breaker is open: no other node is taken out" in listed()
    after = job.observe()
    assert (after.generation, after.incidents) == (before.generation, before.incidents)


def listed() -> str:
    """Return what `holdfast nodes` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "nodes"],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return done.stdout
