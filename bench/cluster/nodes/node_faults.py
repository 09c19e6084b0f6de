"""Cause one fault after another on the nodes, pods and leader of a training job, and measure each.

Each function waits until the job trains with all of its pods, and starts the clock with the command that
causes the fault. The time until the supervisor's decision is computed backwards from the first new step,
because the supervisor's own clock measures the time between the two.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from bench.cluster.nodes import node_report, training_record
from bench.cluster.nodes.disturbed_job import LABEL, RANKS, DisturbedJob, JobBefore
from bench.cluster.nodes.fake_gpus import FakeGpus
from bench.cluster.nodes.node_commands import NodeCommands
from bench.cluster.nodes.node_report import MeasuredFault
from bench.cluster.pod_objects import IMAGE
from tests.cluster.apparatus.kubernetes_cluster import SYSTEM, ClusterUnderTest, Json, leader
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.cluster.apparatus.training_job import container_id

CUT_S = 60.0  # how long a node is cut off
DARK_S = 5.0  # without a standby, a killed node is started again after this time
NODE_READY_S = 180.0
NEW_POD_S = 240.0
DRAIN_S = 120.0
CALM_S = 15.0  # how long the job is watched after a leader has been killed
PRIORITY = "holdfast-bench"
PREEMPTOR = "preemptor"
SUPERVISOR = "holdfast-supervisor"
REPLICAS_S = 320.0  # the kubelet waits for up to 300 s before it starts a container again


class FaultyCluster:
    """The cluster whose nodes are disturbed."""

    def __init__(
        self,
        cluster: ClusterUnderTest,
        commands: NodeCommands,
        patience_s: float,
        note: Callable[[MeasuredFault], None],
    ) -> None:
        """`note` is called with each fault once the job has recovered completely or has failed to do so."""
        self._cluster, self._commands, self._patience_s = cluster, commands, patience_s
        self._note = note
        self._hits: Counter[str] = Counter()  # how often each node was disturbed

    # -- sudden faults

    def kill(self, job: DisturbedJob, number: int, *, with_leader: bool = False) -> None:
        """Kill a member's node, and start it again after the job trains."""
        if with_leader:
            self._await_replicas()
        before = job.ready()
        rank, node = self._victim(job, number, with_leader=with_leader)
        kind = node_report.KILL_LEADER if node == self.leader_node() else node_report.KILL
        began_s = time.monotonic()
        try:
            self._commands.disturb("kill", node)
            found = self._measured(job, before, MeasuredFault(kind, node, rank), began_s)
        finally:
            self._restore(node)
        self._settle(job, before, found, began_s)

    def kill_without_standby(self, job: DisturbedJob, number: int) -> None:
        """Kill a member's node, start it again, and measure from the start of the new container."""
        before = job.ready()
        rank, node = self._victim(job, number, with_leader=False)
        pod = job.rank_pod(rank)["metadata"]["name"]
        known = job.container_of(pod)
        began_s = time.monotonic()
        try:
            self._commands.disturb("kill", node)
            time.sleep(DARK_S)
        finally:
            self._restore(node)
        there_s = self._new_container(job, rank, pod, known)
        found = self._measured(job, before, MeasuredFault(node_report.KILL_BARE, node, rank), began_s)
        if not found.is_late:
            found = replace(found, first_step_s=max(0.0, began_s + found.first_step_s - there_s))
        self._settle(job, before, found, began_s)

    def cut(self, job: DisturbedJob, number: int, *, with_leader: bool = False) -> None:
        """Cut off a member's node for `CUT_S`."""
        if with_leader:
            self._await_replicas()
        before = job.ready()
        rank, node = self._victim(job, number, with_leader=with_leader)
        kind = node_report.CUT_LEADER if node == self.leader_node() else node_report.CUT
        began_s = time.monotonic()
        try:
            self._commands.disturb("cut", node)
            found = self._measured(job, before, MeasuredFault(kind, node, rank), began_s)
            time.sleep(max(0.0, began_s + CUT_S - time.monotonic()))
        finally:
            self._restore(node)
        self._settle(job, before, found, began_s)

    # -- announced faults

    def drain(self, job: DisturbedJob, number: int) -> None:
        """Drain this job's pods from a member's node, and uncordon the node."""
        before = job.ready()
        rank, node = self._victim(job, number, with_leader=None)
        chosen = (
            f"--pod-selector={LABEL}=member",
            "--ignore-daemonsets",
            "--delete-emptydir-data",
            "--force",
        )
        began_s = time.monotonic()
        try:
            self._cluster.kubectl("drain", node, *chosen, f"--timeout={DRAIN_S:.0f}s", limit_s=DRAIN_S + 10)
            found = self._measured(job, before, MeasuredFault(node_report.DRAIN, node, rank), began_s)
        finally:
            self._cluster.kubectl("uncordon", node)
        self._settle(job, before, found, began_s)

    def preempt(self, job: DisturbedJob, number: int) -> None:
        """Have a pod with a higher priority preempt a member's pod."""
        before = job.ready()
        rank, node = self._victim(job, number, with_leader=None)
        pods = self._cluster.read(f"/api/v1/pods?fieldSelector=spec.nodeName={node}")["items"]
        others = [pod for pod in pods if pod["metadata"]["namespace"] != job.namespace]
        free = free_millicores(self._cluster.read(f"/api/v1/nodes/{node}"), others)
        with self._priority():
            text = json.dumps(preemptor(node, free))
            began_s = time.monotonic()
            self._cluster.kubectl("create", "-n", job.namespace, "-f", "-", text=text)
            try:
                fault = MeasuredFault(node_report.PREEMPTION, node, rank)
                found = self._measured(job, before, fault, began_s)
            finally:
                self._cluster.kubectl("delete", "pod", PREEMPTOR, "-n", job.namespace, "--wait=true")
        self._settle(job, before, found, began_s)

    def verdict(self, job: DisturbedJob, number: int, gpus: FakeGpus) -> None:
        """Raise an Xid on a member's node. The first new step is measured from the Node's condition."""
        before = job.ready()
        rank, node = self._victim(job, number, with_leader=None)
        try:
            raised_s, told_s = gpus.fail(node)
            fault = MeasuredFault(node_report.VERDICT, node, rank, verdict_s=told_s - raised_s)
            found = self._measured(job, before, fault, told_s)
        finally:
            gpus.heal(node)
        self._settle(job, before, found, told_s)

    # -- the supervisor

    def kill_leader(self, job: DisturbedJob, processes: NodeProcesses) -> None:
        """Kill the leading supervisor's process. The job must train undisturbed."""
        before = job.ready()
        pod = self._cluster.read(f"/api/v1/namespaces/{SYSTEM}/pods/{leader(self._cluster)}")
        node, epoch = str(pod["spec"]["nodeName"]), job.epoch()
        processes.prepare(node)
        began_s = time.monotonic()
        processes.kill_first(node, container_id(pod, "supervisor"))
        job.supervised_after(epoch)
        supervised_s = time.monotonic() - began_s
        time.sleep(CALM_S)
        found = MeasuredFault(node_report.LEADER, node, -1, incidents=0, supervised_s=supervised_s)
        self._settle(job, before, found, began_s)

    # -- what they have in common

    def leader_node(self) -> str:
        """Return the node of the leading supervisor; "" if none leads."""
        name = leader(self._cluster)
        pod = self._cluster.read(f"/api/v1/namespaces/{SYSTEM}/pods/{name}") if name else {}
        return str((pod.get("spec") or {}).get("nodeName") or "")

    def _await_replicas(self) -> None:
        """Wait until all replicas of the supervisor are ready. The kubelet may restart one late."""
        found = self._cluster.read(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{SUPERVISOR}")
        ready = f"--for=jsonpath={{.status.readyReplicas}}={found['spec']['replicas']}"
        limit = f"--timeout={REPLICAS_S:.0f}s"
        self._cluster.kubectl(
            "wait", ready, f"deployment/{SUPERVISOR}", "-n", SYSTEM, limit, limit_s=REPLICAS_S + 10
        )

    def _victim(self, job: DisturbedJob, number: int, *, with_leader: bool | None) -> tuple[int, str]:
        """Return the rank to disturb, and its node."""
        nodes = {rank: str(job.rank_pod(rank)["spec"]["nodeName"]) for rank in range(RANKS)}
        chosen = victim(nodes, self.leader_node(), self._hits, number, with_leader=with_leader)
        self._hits[chosen[1]] += 1
        return chosen

    def _measured(
        self, job: DisturbedJob, before: JobBefore, fault: MeasuredFault, began_s: float
    ) -> MeasuredFault:
        """Wait for the first new step, and return the fault with its cost."""
        resumed_s = job.resumed_s(before, self._patience_s)
        if resumed_s is None:
            limit_s = self._patience_s
            return replace(fault, first_step_s=limit_s, pause_s=limit_s, is_late=True)
        found = replace(fault, first_step_s=resumed_s - began_s)
        with suppress(AssertionError):  # without a leader, the incident is recorded later
            found = replace(found, noticed_s=noticed_s(found.first_step_s, job.incidents(before)[-1]))
        return found

    def _settle(self, job: DisturbedJob, before: JobBefore, fault: MeasuredFault, began_s: float) -> None:
        """Wait until the job has recovered completely, and note the fault with its cost until then.

        If the job does not recover completely, this notes the fault with what is known, and raises
        AssertionError.
        """
        try:
            after = job.ready()
            if after.incidents > before.incidents:
                incidents = job.incidents(before)
                fault = replace(
                    fault,
                    lost_steps=sum(each["lost_steps"] or 0 for each in incidents),
                    incidents=after.incidents - before.incidents,
                    why=str(incidents[-1]["why"]),
                )
        finally:
            steps = job.log.steps
            lost = training_record.steps_lost(steps, before.generation)
            fault = replace(fault, lost_steps=max(fault.lost_steps, lost))
            if not fault.is_late:
                pause_s = training_record.longest_pause_s(steps, began_s, time.monotonic())
                fault = replace(fault, pause_s=pause_s)
            self._note(fault)

    def _restore(self, node: str) -> None:
        self._commands.restore(node)
        limit = f"--timeout={NODE_READY_S:.0f}s"
        self._cluster.kubectl(
            "wait", "--for=condition=Ready", f"node/{node}", limit, limit_s=NODE_READY_S + 10
        )

    def _new_container(self, job: DisturbedJob, rank: int, pod: str, known: str) -> float:
        """Return the time when a container other than `known` was first seen running in a rank's pod."""

        def look() -> float | None:
            found = job.container_of(pod)
            return time.monotonic() if found not in ("", known) else None

        what = f"the pod {pod} of rank {rank} runs again"
        found: float = self._cluster.until(look, what, job.namespace, NEW_POD_S)
        return found

    @contextmanager
    def _priority(self) -> Iterator[None]:
        self._cluster.kubectl("delete", "priorityclass", PRIORITY, "--ignore-not-found")
        self._cluster.kubectl("create", "priorityclass", PRIORITY, "--value=1000000")
        try:
            yield
        finally:
            self._cluster.kubectl("delete", "priorityclass", PRIORITY)


def victim(
    nodes: Mapping[int, str], leads: str, hits: Mapping[str, int], number: int, *, with_leader: bool | None
) -> tuple[int, str]:
    """Return the rank to disturb, and its node, for the fault with this number.

    The ranks take turns, but a node that was disturbed less often is preferred. `with_leader` is True to
    prefer the leader's node, False to avoid it, and None if it does not matter. It is ignored if there is no
    choice.
    """
    fitting = [rank for rank, node in nodes.items() if with_leader is None or (node == leads) is with_leader]
    turn = number % len(nodes)
    chosen = min(fitting or nodes, key=lambda rank: (hits.get(nodes[rank], 0), rank != turn))
    return chosen, nodes[chosen]


def noticed_s(first_step_s: float, incident: Mapping[str, Any]) -> float:
    """Return the seconds from the fault to the decision, given the seconds to the first new step."""
    at = {each["what"]: each["at_s"] for each in incident["timeline"]}
    if "decided" not in at or incident["recovered_s"] is None:
        return math.nan
    return float(max(0.0, first_step_s - (incident["recovered_s"] - at["decided"])))


def free_millicores(node: Json, pods: Iterable[Json]) -> int:
    """Return how much CPU a node has left for pods other than `pods`, in thousandths of a core."""
    return millicores(node["status"]["allocatable"]["cpu"]) - sum(requested(pod) for pod in pods)


def requested(pod: Json) -> int:
    """Return the CPU that the scheduler counts for a pod, in thousandths of a core."""
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    spec, beside, most = pod["spec"], 0, 0
    for each in spec.get("initContainers") or ():
        if each.get("restartPolicy") == "Always":  # a sidecar runs alongside all later containers
            beside += _asked(each)
            most = max(most, beside)
        else:
            most = max(most, beside + _asked(each))
    running = beside + sum(_asked(each) for each in spec["containers"])
    return max(most, running) + millicores((spec.get("overhead") or {}).get("cpu", "0"))


def _asked(container: Json) -> int:
    return millicores(((container.get("resources") or {}).get("requests") or {}).get("cpu", "0"))


def millicores(text: str) -> int:
    """Return an amount of CPU such as 200m or 1.5 in thousandths of a core."""
    return int(text[:-1]) if text.endswith("m") else round(float(text) * 1000)


def preemptor(node: str, free: int) -> Json:
    """Return a pod that needs all of a node's CPU that is not used by others."""
    container = {
        "name": "sleeps",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": f"{free}m"}},
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "priorityClassName": PRIORITY,
        "containers": [container],
        "terminationGracePeriodSeconds": 1,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": PREEMPTOR}, "spec": spec}
