"""The node of the leading supervisor and of a member is cut off: the other one replaces the member.

`HOLDFAST_NODE_CUT` and `HOLDFAST_NODE_HEAL` are commands that, followed by a node's name, drop all packets
from and to the node, and undo this.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time

import pytest

from tests.cluster.apparatus.kubernetes_cluster import READY_S, SYSTEM, ClusterUnderTest, leader
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import START_S, TrainingJob, example
from tests.cluster.conftest import refuse

STEPS = 3000
NODES = 3
NAMES = ("HOLDFAST_NODE_CUT", "HOLDFAST_NODE_HEAL")
PRINTED_S = 60.0  # until the other member prints a step of the next generation


@pytest.fixture(scope="module")
def commands() -> tuple[list[str], list[str]]:
    """Return the commands that cut off a node and reconnect it. Without them, skip; in CI, fail."""
    words = [shlex.split(os.environ.get(name, "")) for name in NAMES]
    if not all(words):
        refuse(f"set {' and '.join(NAMES)} to commands that cut off a node of the cluster, and reconnect it")
    return words[0], words[1]


@pytest.fixture(scope="module")
def home(installed: ClusterUnderTest) -> str:
    """Return the node of the leading supervisor."""
    count = len(installed.read("/api/v1/nodes")["items"])
    if count < NODES:
        refuse(f"the cluster has {count} nodes; expected at least {NODES}")
    pod = installed.until(lambda: leader(installed) or None, "a supervisor leads", SYSTEM, READY_S)
    return str(installed.read(f"/api/v1/namespaces/{SYSTEM}/pods/{pod}")["spec"]["nodeName"])


@pytest.fixture(scope="module")
def job(installed: ClusterUnderTest, namespaces: Namespaces, home: str) -> TrainingJob:
    """Train on the leader's node and on another one, with a standby on a third."""
    objects = example(
        "pytorchjob.yaml", f"--steps={STEPS}", "--pace=0.05", annotations={"holdfast.dev/standby": "1"}
    )
    for kind, operator in (("Master", "NotIn"), ("Worker", "In")):
        match = {"key": "kubernetes.io/hostname", "operator": operator, "values": [home]}
        wish = {"weight": 100, "preference": {"matchExpressions": [match]}}
        spec = objects[-1]["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]
        spec["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    found = TrainingJob(installed, namespaces.make("baseline"), objects)
    found.start()
    found.trains()
    found.supervised_by(0)
    return found


def standby_is_warm(job: TrainingJob) -> str:
    def look() -> str | None:
        for member in job.view().get("members", ()):
            if member["role"] == "standby" and member["connected"] and member["parked"]:
                return str(member["name"]).partition(".")[0]
        return None

    found: str = job.until(look, "a standby is warm", START_S)
    return found


def test_a_standby_takes_over_from_a_member_that_is_cut_off_together_with_the_leader(
    job: TrainingJob, installed: ClusterUnderTest, home: str, commands: tuple[list[str], list[str]]
) -> None:
    cut, heal = commands
    standby = standby_is_warm(job)
    if str(job.pod(job.rank_pod(1))["spec"]["nodeName"]) != home:
        pytest.skip("the scheduler has placed no member on the leader's node")
    other = job.rank_pod(0)
    former = leader(installed)
    before = job.observe()
    job.follow(other)
    try:
        time.sleep(1.0)  # until the first steps are received
        subprocess.run([*cut, home], check=True, capture_output=True)
        since_s = time.monotonic()
        took_s = _next_generation_s(job) - since_s
        incident = job.recovered(before)
        print(  # noqa: T201  a measurement, for whoever looks
            f"the job trains again {took_s:.2f} s after the cut; {incident['why']}: {incident['timeline']}"
        )
        assert (incident["kind"], incident["rank"]) == ("member_lost", 1), incident["why"]
        assert incident["lost_steps"] <= 1
        assert job.rank_pod(1) == standby
        assert leader(installed) not in ("", former)
        after = job.observe()
        assert after.epoch > before.epoch
        assert after.pods[other] == before.pods[other]
    finally:
        job.unfollow()
        subprocess.run([*heal, home], check=True, capture_output=True)
    installed.kubectl("wait", "--for=condition=Ready", f"node/{home}", f"--timeout={READY_S:.0f}s")
    then = job.observe()
    job.trains()
    assert job.observe().generation == then.generation, "the former leader changes nothing when it is back"


def _next_generation_s(job: TrainingJob) -> float:
    """Return when the job prints a new step again, after it has printed none for a second."""
    deadline_s = time.monotonic() + PRINTED_S
    known, at_s, is_paused = max(job.followed_steps(), default=-1), time.monotonic(), False
    while time.monotonic() < deadline_s:
        newest = max(job.followed_steps(), default=-1)
        if newest > known and is_paused:
            return time.monotonic()
        if newest > known:
            known, at_s = newest, time.monotonic()
        is_paused = time.monotonic() - at_s > 1.0
        time.sleep(0.05)
    raise AssertionError(f"no new step within {PRINTED_S:g} s of the cut")
