"""Cause the faults of a chaos run on the cluster, and end them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.chaos import fault_table
from bench.chaos.chaos_schedule import PlannedFault
from bench.chaos.fault_table import ALL, CHAOS_FAULTS, FaultPlace
from bench.chaos.job_condition import survives_without
from bench.chaos.repairs import DueRepairs
from bench.chaos.watched_job import WatchedJob
from holdfast.errors import BadInput
from supervisor.admission import pod_layout
from supervisor.cli.command_options import ClusterOptions
from supervisor.cli.on_cluster import control
from supervisor.cli.on_cluster.connection import connected
from supervisor.cli.on_cluster.job_source import NamedJob
from tests.cluster.apparatus.absent_webhook import is_away
from tests.cluster.apparatus.kubernetes_cluster import READY_S, SYSTEM, WEBHOOK, ClusterUnderTest, leader
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.cluster.apparatus.training_job import container_id
from tests.s3server.server import ObjectServer, Refusal

COMMAND_S = 120.0  # for a command that kills, cuts, starts or heals a node
# Until the owner creates a pod in place of an evicted one. A Job whose pods have often been evicted takes
# longer, and the webhook should not be away for that long.
SUCCESSOR_S = 60.0
POLL_S = 0.5
DRAIN_S = 90.0  # for all pods of a node to end; each may take its whole grace period
NAME = "gpt"  # the name of each example's Supervision
SIDECAR = "holdfast-sidecar"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def pods_that_stay(listed: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of a node's pods that a drain should have evicted but has not.

    A pod that is being deleted has been evicted, even if it is still listed. While a Job controller backs
    off, its evicted pods stay listed for minutes, until it counts them.
    """
    return [
        str(each["metadata"]["name"])
        for each in listed
        if not each["metadata"].get("deletionTimestamp")
        and each.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        and not any(owner["kind"] == "DaemonSet" for owner in each["metadata"].get("ownerReferences") or ())
    ]


def missed_pods(listed: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the pods that an owner has created and that the webhook has missed."""
    return [
        str(each["metadata"]["name"])
        for each in listed
        if pod_layout.INJECTED not in (each["metadata"].get("annotations") or {})
        and any(owner["kind"] in ALL for owner in each["metadata"].get("ownerReferences") or ())
    ]


class WouldNotSurvive(Exception):
    """A job would lose all of its members. The message says which."""


@dataclass(frozen=True, slots=True)
class StruckTarget:
    """What a fault has struck.

    Attributes:
        jobs: The jobs that it struck, which must notice it.
        node: The node, if it struck a whole one.
        counted: The job of each pod that its owner may count as failed.
        detail: What did not happen as planned, for the report.
    """

    jobs: frozenset[str]
    node: str = ""
    counted: tuple[str, ...] = ()
    detail: str = ""


class FaultInjector:
    """Causes and ends faults. It adds each repair to `repairs` before it does the damage."""

    def __init__(
        self,
        cluster: ClusterUnderTest,
        jobs: Mapping[str, WatchedJob],
        processes: NodeProcesses,
        storage: ObjectServer,
        repairs: DueRepairs,
    ) -> None:
        self._cluster, self._jobs, self._processes = cluster, jobs, processes
        self._storage, self._repairs = storage, repairs
        self._strikes: Mapping[FaultPlace, Callable[[str, str, int], None]] = {
            "rank": self._strike_rank,
            "sidecar": self._drill,
            "launcher": self._strike_launcher,
            "pod": self._strike_pod,
            "leader": self._strike_leader,
            "api": self._stop_api,
            "webhook": self._remove_webhook,
            "storage": self._refuse_storage,
        }

    def prepare(self, nodes: list[str]) -> None:
        """Start what the faults need on each node."""
        for node in nodes:
            self._processes.prepare(node)

    def strike(self, kind: str, job: str = "", rank: int = 0) -> StruckTarget:
        """Cause a fault, and return what it has struck.

        Raises:
            BadInput: A drill is refused.
            WouldNotSurvive: A job would lose all of its members.
            AssertionError: kubectl failed, or an object that the fault needs does not exist.
        """
        place = CHAOS_FAULTS[kind].place
        if place == "node":
            return self._strike_node(kind, job, rank)
        if place == "missed pod":
            return self._evict_missed(kind, job, rank)
        self._strikes[place](kind, job, rank)
        return StruckTarget(frozenset({job} if job else self._jobs))

    def end(self, planned: PlannedFault) -> None:
        """End the fault, and wait until what it struck, such as a node, is ready again."""
        self._repairs.carry_out(planned.kind)

    def hosts_all_supervisors(self, node: str) -> bool:
        """Return True if no other node has a supervisor, so no job recovers while the node is lost."""
        labels = "labelSelector=app.kubernetes.io/component=supervisor"
        found = self._cluster.read(f"/api/v1/namespaces/{SYSTEM}/pods?{labels}")["items"]
        return all(pod["spec"].get("nodeName") in (None, node) for pod in found)

    # -- one job

    def _strike_rank(self, kind: str, job: str, rank: int) -> None:
        """Send a signal directly, because this also works during a takeover. All other faults are drills."""
        if kind in _SIGNALS:
            self._jobs[job].training.signal_rank(rank, _SIGNALS[kind])
        else:
            self._drill(kind, job, rank)

    def _drill(self, kind: str, job: str, rank: int) -> None:
        with connected(ClusterOptions()) as connection:
            control.carry_out(NamedJob(connection, self._jobs[job].training.namespace, NAME), kind, rank)

    def _strike_launcher(self, _kind: str, job: str, rank: int) -> None:
        training = self._jobs[job].training
        pod = training.pod(training.rank_pod(rank))
        self._processes.kill_first(pod["spec"]["nodeName"], container_id(pod, training.container))

    def _strike_pod(self, kind: str, job: str, rank: int) -> None:
        if kind == "evict":
            self._drill("member", job, rank)
            return
        training = self._jobs[job].training
        there = ("-n", training.namespace, "--wait=false")
        self._cluster.kubectl("delete", "pod", training.rank_pod(rank), *there)

    def _evict_missed(self, kind: str, job: str, rank: int) -> StruckTarget:
        """Evict a pod while the webhook is away, and wait until its owner has created the next one."""
        training = self._jobs[job].training
        self._remove_webhook(kind, job, rank)
        self._cluster.until(lambda: is_away(self._cluster), "the webhook is away", SYSTEM, READY_S)
        self._drill("member", job, rank)
        deadline_s = time.monotonic() + SUCCESSOR_S
        while not missed_pods(training.pods()):
            if time.monotonic() > deadline_s:
                return StruckTarget(frozenset({job}), detail="the webhook missed no pod")
            time.sleep(POLL_S)
        return StruckTarget(frozenset({job}))

    # -- the supervisor

    def _strike_leader(self, kind: str, _job: str, _rank: int) -> None:
        found: str = self._cluster.until(
            lambda: leader(self._cluster) or None, "a supervisor leads", SYSTEM, READY_S
        )
        if kind == "leader-delete":
            self._cluster.kubectl("delete", "pod", found, "-n", SYSTEM, "--grace-period=0", "--force")
            return
        pod = self._cluster.read(f"/api/v1/namespaces/{SYSTEM}/pods/{found}")
        node, container = pod["spec"]["nodeName"], container_id(pod, "supervisor")
        if kind == "leader-kill":
            self._processes.kill_first(node, container)
            return

        def thaw() -> None:
            now = self._cluster.read(f"/api/v1/namespaces/{SYSTEM}/pods/{found}")
            if now and container_id(now, "supervisor") == container:  # otherwise the kubelet has replaced it
                self._processes.signal_first(node, container, signal.SIGCONT)

        self._repairs.owe(kind, thaw)
        self._processes.signal_first(node, container, signal.SIGSTOP)

    # -- nodes

    def _strike_node(self, kind: str, job: str, rank: int) -> StruckTarget:
        nodes = {name: each.nodes() for name, each in self._jobs.items()}
        node = nodes[job].get(rank, "")
        if not node:
            raise WouldNotSurvive(f"the node of rank {rank} of {job} is not known")
        for name, each in self._jobs.items():
            is_over = each.condition is not None and each.condition.exit_code == 0
            if not is_over and (why := survives_without(each.job, nodes[name].values(), node)):
                raise WouldNotSurvive(why)
        counted = self._of_jobs_on(node) if CHAOS_FAULTS[kind].job_counts else ()
        if kind == "drain":
            self._drain(node)
        else:
            begin, end = CHAOS_FAULTS[kind].needs
            self._repairs.owe(kind, lambda: self._restore(end, node))
            _run(begin, node)
        return StruckTarget(frozenset(name for name in nodes if node in nodes[name].values()), node, counted)

    def _of_jobs_on(self, node: str) -> tuple[str, ...]:
        """Return the job's name for each pod of a Job on the node, even if the pod is a standby now."""
        return tuple(
            name
            for name, each in self._jobs.items()
            for pod in each.training.pods()
            if pod["spec"].get("nodeName") == node
            and any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences", ()))
        )

    def _restore(self, command: str, node: str) -> None:
        """Bring a node back, and return when it is ready."""
        _run(command, node)
        self._wait_for_node(node)
        if command == fault_table.START_NODE:
            self._processes.forget(node)
            self._processes.prepare(node)

    def _drain(self, node: str) -> None:
        def uncordon() -> None:
            self._cluster.kubectl("uncordon", node)
            self._processes.forget(node)
            self._processes.prepare(node)

        self._repairs.owe("drain", uncordon)
        words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={DRAIN_S:.0f}s")
        done = self._cluster.attempt("drain", node, *words, limit_s=DRAIN_S + 10)
        if done.returncode:
            listed = self._cluster.read(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}")["items"]
            if left := pods_that_stay(listed):
                why = done.stderr.strip().rpartition("\n")[2]
                raise BadInput(f"kubectl drain {node}: {', '.join(left)} not evicted: {why}")

    def _wait_for_node(self, node: str) -> None:
        words = ("wait", "--for=condition=Ready", f"node/{node}", f"--timeout={READY_S:.0f}s")
        self._cluster.kubectl(*words, limit_s=READY_S + 10)

    # -- what all jobs use

    def _stop_api(self, kind: str, _job: str, _rank: int) -> None:
        self._repairs.owe(kind, lambda: _run(fault_table.CONT_API))
        _run(fault_table.STOP_API)

    def _remove_webhook(self, kind: str, _job: str, _rank: int) -> None:
        there = ("-n", SYSTEM, f"deployment/{WEBHOOK}")
        replicas = self._cluster.kubectl("get", *there, "-o", "jsonpath={.spec.replicas}")

        def restore() -> None:
            self._cluster.kubectl("scale", *there, f"--replicas={replicas}")
            self._cluster.kubectl("rollout", "status", *there, limit_s=READY_S)

        self._repairs.owe(kind, restore)
        self._cluster.kubectl("scale", *there, "--replicas=0")

    def _refuse_storage(self, kind: str, _job: str, _rank: int) -> None:
        def restore() -> None:
            self._storage.interfere = lambda _: None

        self._repairs.owe(kind, restore)
        self._storage.interfere = lambda _: Refusal(503, "ServiceUnavailable")


def _run(variable: str, *words: str) -> None:
    """Run the command in an environment variable. Ctrl-C does not reach it."""
    command = [*shlex.split(os.environ[variable]), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S, start_new_session=True)
