"""The leading supervisor is killed, frozen, cut off from the API server, or ended, while ranks are replaced.

Each time, the other supervisor takes over, no member is lost, and the job continues after one recovery.
`HOLDFAST_LEADER_KILLS` sets how many leaders are killed (6 if it is not set).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest

from tests.cluster.apparatus.kubernetes_cluster import (
    READY_S,
    SUPERVISOR,
    SYSTEM,
    ClusterUnderTest,
    Json,
    leader,
)
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.cluster.apparatus.training_job import RECOVERED_S, Observed, TrainingJob, container_id, restarts

KILLS = int(os.environ.get("HOLDFAST_LEADER_KILLS", "6"))
SEED = 20
LATEST_S = (
    1.6  # the latest kill, after the one of the rank has been requested: recoveries take about a second
)
POD, OTHER = "gpt-1", "gpt-0"  # the pods of ranks 1 and 0
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{SUPERVISOR}"
PODS = f"/api/v1/namespaces/{SYSTEM}/pods"


class Supervisors:
    """The two supervisors of an installation."""

    def __init__(self, cluster: ClusterUnderTest, processes: NodeProcesses) -> None:
        self.cluster, self.processes = cluster, processes

    def ready(self) -> list[str]:
        """Wait until two supervisors that have never restarted are ready, and return their names."""

        def look() -> list[str] | None:
            pods = [pod for pod in self.pods() if not restarts([pod]) and _is_ready(pod)]
            return [pod["metadata"]["name"] for pod in pods] if len(pods) == len(self.pods()) == 2 else None

        found: list[str] = self.cluster.until(look, "two supervisors are ready", SYSTEM, READY_S)
        return found

    def pods(self) -> list[Json]:
        found = self.cluster.read(f"{PODS}?labelSelector=app.kubernetes.io/component=supervisor")["items"]
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def pod(self, name: str) -> Json:
        return self.cluster.read(f"{PODS}/{name}")

    def leader(self) -> Json:
        """Return the leading pod, and make sure that its processes can be signalled quickly."""
        self.ready()
        name = self.cluster.until(lambda: leader(self.cluster) or None, "a supervisor leads", SYSTEM, READY_S)
        pod = self.pod(name)
        self.processes.prepare(pod["spec"]["nodeName"])
        return pod

    def signal(self, pod: Json, signum: signal.Signals, delay_s: float = 0.0) -> float:
        """Send a signal to the supervisor in a pod, and return when it was sent."""
        container = container_id(pod, "supervisor")
        return self.processes.signal_first(pod["spec"]["nodeName"], container, signum, delay_s)

    def successor(self, former: Json, since_s: float) -> tuple[str, float]:
        """Wait until another process leads. Return its pod, and the time from `since_s` until it led."""
        name = former["metadata"]["name"]

        def look() -> tuple[str, float] | None:
            spec = self.cluster.read(LEASE)["spec"]
            holder = spec.get("holderIdentity") or ""
            acquired_s = datetime.fromisoformat(spec["acquireTime"].replace("Z", "+00:00")).timestamp()
            is_new = holder and acquired_s > since_s
            return (holder.rpartition("_")[0], acquired_s - since_s) if is_new else None

        found: tuple[str, float] = self.cluster.until(look, f"a successor of {name} leads", SYSTEM, READY_S)
        return found

    def renew(self) -> None:
        """Replace the supervisors whose container has restarted, so that the next kill is like the first.

        The kubelet waits longer and longer before it restarts the same container again.
        """
        for pod in self.pods():
            if restarts([pod]) or not _is_ready(pod):
                words = ("delete", "pod", pod["metadata"]["name"], "-n", SYSTEM)
                self.cluster.kubectl(*words, "--grace-period=0", "--force", "--wait=false")
        self.ready()


def _is_ready(pod: Json) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@pytest.fixture
def supervisors(installed: ClusterUnderTest, node_processes: NodeProcesses) -> Iterator[Supervisors]:
    found = Supervisors(installed, node_processes)
    yield found
    found.renew()


@contextmanager
def at_the_same_time(work: threading.Thread) -> Iterator[None]:
    work.start()
    try:
        yield
    finally:
        work.join()


def undisturbed(job: TrainingJob, before: Observed) -> None:
    """Assert that a new supervisor leads, and that no pod was replaced, evicted or restarted."""
    after = job.observe()
    assert after.epoch > before.epoch
    assert (after.pods, after.restarts) == (before.pods, before.restarts)


def test_the_supervisors_are_on_different_nodes(supervisors: Supervisors) -> None:
    nodes = supervisors.cluster.read("/api/v1/nodes")["items"]
    used = {pod["spec"]["nodeName"] for pod in supervisors.pods()}
    assert len(used) == min(2, len(nodes))
    budget = supervisors.cluster.read(
        f"/apis/policy/v1/namespaces/{SYSTEM}/poddisruptionbudgets/{SUPERVISOR}"
    )
    assert budget["status"]["disruptionsAllowed"] == 1


def test_a_leader_that_ends_cleanly_hands_over_at_once(job: TrainingJob, supervisors: Supervisors) -> None:
    before = job.observe()
    pod = supervisors.leader()
    deleted_s = time.time()
    supervisors.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", SYSTEM, "--wait=false")
    successor, took_s = supervisors.successor(pod, deleted_s)
    assert successor != pod["metadata"]["name"]
    print(f"the next one leads {took_s:.2f} s after the deletion")  # noqa: T201
    job.supervised_by(before.epoch)
    job.trains()
    after = job.observe()
    assert (after.generation, after.incidents) == (before.generation, before.incidents)
    undisturbed(job, before)


def test_leaders_are_killed_at_random_moments_of_recoveries(
    job: TrainingJob, supervisors: Supervisors
) -> None:
    """The kill of the rank takes some tenths of a second to arrive, so some leaders are killed before it."""
    chance = random.Random(SEED)
    for number in range(KILLS):
        pod = supervisors.leader()
        job.supervised_by(0)
        before = job.observe()
        delay_s = chance.uniform(0.0, LATEST_S)
        with at_the_same_time(
            threading.Thread(target=job.signal_rank, args=(1, signal.SIGKILL, POD), name="rank")
        ):
            killed_s = supervisors.signal(pod, signal.SIGKILL, delay_s)
        _, took_s = supervisors.successor(pod, killed_s)
        incident = job.recovered(before)
        print(  # noqa: T201  a measurement, for whoever looks
            f"leader {number} killed after {delay_s:.2f} s: the next one leads after {took_s:.2f} s,"
            f" and the rank is recovered after {incident.get('recovered_s')} s"
        )
        assert (incident["kind"], incident["rank"]) == ("crash", 1), incident["why"]
        job.supervised_by(before.epoch)
        undisturbed(job, before)
        supervisors.renew()


def test_a_leader_that_was_frozen_past_its_lease_changes_nothing_when_it_wakes_up(
    job: TrainingJob, supervisors: Supervisors
) -> None:
    """A rank crashes while the leader is frozen, so it wakes up to reports that call for a recovery."""
    before = job.observe()
    pod = supervisors.leader()
    name = pod["metadata"]["name"]
    frozen_s = supervisors.signal(pod, signal.SIGSTOP)
    try:
        job.signal_rank(1, signal.SIGKILL, POD)
        successor, took_s = supervisors.successor(pod, frozen_s)
        assert successor != name
        incident = job.recovered(before)
        job.supervised_by(before.epoch)
        led = job.observe()
    finally:
        supervisors.signal(pod, signal.SIGCONT)
    print(f"the next one leads {took_s:.2f} s after the freeze; recovered after {incident['recovered_s']} s")  # noqa: T201

    def look() -> bool | None:
        return True if restarts([supervisors.pod(name)]) else None

    supervisors.cluster.until(look, f"supervisor {name} has ended", SYSTEM, RECOVERED_S)
    assert leader(supervisors.cluster) == successor
    job.trains()
    after = job.observe()
    assert (after.epoch, after.generation, after.incidents) == (led.epoch, led.generation, led.incidents)
    undisturbed(job, before)


def test_a_leader_that_is_cut_off_from_the_api_server_recovers_ranks_until_another_leads(
    job: TrainingJob, supervisors: Supervisors
) -> None:
    cluster = supervisors.cluster
    address = cluster.kubectl("get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIP}")
    before = job.observe()
    first = max(job.steps(OTHER))
    pod = supervisors.leader()
    node, container = pod["spec"]["nodeName"], container_id(pod, "supervisor")
    lease = cluster.read(LEASE)["spec"]["holderIdentity"]
    supervisors.processes.cut(node, container, address)
    try:
        job.signal_rank(1, signal.SIGKILL, POD)
        job.reaches(max(job.steps(OTHER)) + 20, RECOVERED_S)
        was_in_place = cluster.read(LEASE)["spec"].get("holderIdentity") == lease
        print(f"the leader that was cut off {'recovered the rank' if was_in_place else 'was replaced first'}")  # noqa: T201
        cluster.until(
            lambda: True if leader(cluster) not in ("", pod["metadata"]["name"]) else None,
            "the other supervisor leads",
            SYSTEM,
            READY_S,
        )
    finally:  # its containers keep the network that is cut
        words = ("delete", "pod", pod["metadata"]["name"], "-n", SYSTEM)
        cluster.kubectl(*words, "--grace-period=0", "--force", "--wait=false")
    job.supervised_by(before.epoch)
    # The next leader knows nothing of a recovery that was not recorded, so it restarts the group once more.
    assert job.observe().generation <= before.generation + (2 if was_in_place else 1)
    assert job.observe().incidents == before.incidents + 1
    then = job.observe()
    job.signal_rank(1, signal.SIGKILL, POD)
    job.recovered(then)
    undisturbed(job, before)
    steps = [step for step in job.steps(OTHER) if step > first]
    assert len(steps) - len(set(steps)) <= 2, "more than one step was lost in a recovery"
