"""The pods of a job, or the API server, are unreachable for longer than a restart takes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from tests.cluster.apparatus.durable_storage import CLAIM, DurableStorage
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import (
    RECOVERED_S,
    SUMMARY_S,
    TrainingJob,
    example,
    pods_in,
    restarts,
)
from tests.cluster.conftest import refuse

STEPS = 400
POD, OTHER = "gpt-1", "gpt-0"  # the pods of ranks 1 and 0
AWAY_S = 60.0
KILLED_AFTER_S = 25.0  # well after the Lease of the leader has expired
_STAMPED = re.compile(r"^(\S+) step +(\d+) +loss", re.MULTILINE)

# Kills a rank later, from within its container: no request reaches the container during the outage.
_KILL_LATER = """
import os, signal, sys, time
if os.fork():
    sys.exit()
os.setsid()
for fd in range(3):
    os.close(fd)
time.sleep(float(sys.argv[2]))
title = f"holdfast: rank {sys.argv[1]} "
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if open(f"/proc/{pid}/cmdline").read().startswith(title):
            os.kill(int(pid), signal.SIGKILL)
            break
    except OSError:
        continue
"""


@pytest.fixture(scope="module")
def stored_job(installed: ClusterUnderTest, namespaces: Namespaces) -> Iterator[TrainingJob]:
    """Yield a job of two pods on one node that has durable storage."""
    namespace = namespaces.make("baseline")
    storage = DurableStorage(installed, namespace)
    storage.make()
    found = example(
        "statefulset.yaml",
        f"--steps={STEPS}",
        "--pace=0.05",
        annotations={
            "holdfast.dev/checkpoints": f"pvc://{CLAIM}/gpt",
            "holdfast.dev/checkpoint-every": "1h",  # so that those that the tests see have another reason
        },
    )
    for pod in pods_in(found):
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": storage.node}
    job = TrainingJob(installed, namespace, found)
    job.start()
    job.trains()
    job.supervised_by(0)
    try:
        yield job
    finally:
        installed.kubectl("uncordon", storage.node)
        installed.kubectl("delete", "statefulset/gpt", "-n", namespace, "--timeout=60s")
        storage.remove()


def checkpoint_step(job: TrainingJob) -> int:
    """Return the step of the newest checkpoint that the supervisor knows; -1 for none."""
    found = job.view().get("checkpoint")
    return int(found["step"]) if found else -1


def test_a_drained_member_leaves_a_checkpoint_and_the_job_waits_for_its_successor(
    stored_job: TrainingJob, installed: ClusterUnderTest
) -> None:
    """Nothing may run on the node, so the owner's new pod stays pending until the node is back."""
    before = stored_job.observe()
    node = stored_job.pod(POD)["spec"]["nodeName"]
    installed.kubectl(
        *("drain", node, f"--pod-selector=statefulset.kubernetes.io/pod-name={POD}"),
        *("--delete-emptydir-data", "--force", "--timeout=90s"),
        limit_s=120.0,
    )
    last = stored_job.until(
        lambda: step if (step := checkpoint_step(stored_job)) >= 0 else None,
        "the state was saved while the job waits",
        RECOVERED_S,
    )
    assert stored_job.status()["phase"] == "securing"
    installed.kubectl("uncordon", node)
    incident = stored_job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("member_lost", 1), incident["why"]
    assert incident["resume"]["step"] == last
    after = stored_job.observe()
    assert after.pods[OTHER] == before.pods[OTHER]
    assert after.restarts == {}


def test_a_job_whose_pods_are_lost_one_after_another_resumes_from_that_checkpoint(
    stored_job: TrainingJob, installed: ClusterUnderTest
) -> None:
    """The second pod has no time to save anything."""
    first = checkpoint_step(stored_job)
    stored_job.reaches(first + 20)
    node = stored_job.pod(POD)["spec"]["nodeName"]
    there = ("-n", stored_job.namespace)
    installed.kubectl("cordon", node)
    installed.kubectl("delete", "pod", POD, *there, "--wait=false")
    last = stored_job.until(
        lambda: step if (step := checkpoint_step(stored_job)) > first else None,
        "the state was saved while the job waits",
        RECOVERED_S,
    )
    printed = stored_job.steps(OTHER)
    assert max(printed) - last <= 1, "more than one step was lost"
    installed.kubectl("delete", "pod", OTHER, *there, "--grace-period=0", "--force")
    installed.kubectl("uncordon", node)
    stored_job.trains(RECOVERED_S)
    again = stored_job.steps(stored_job.rank_pod(0))
    assert min(again) == last, "the first repeated step does not follow the checkpoint"


def test_the_interrupted_job_ends_with_the_weights_of_an_undisturbed_one(
    stored_job: TrainingJob, installed: ClusterUnderTest, namespaces: Namespaces
) -> None:
    found = example("bare-pods.yaml", f"--steps={STEPS}", "--pace=0.02")
    undisturbed = TrainingJob(installed, namespaces.make(), found)
    undisturbed.start()
    assert stored_job.digest() == undisturbed.digest()


def commands() -> tuple[list[str], list[str]]:
    """Return the commands that stop the API server and continue it. Without them, skip; in CI, fail."""
    names = ("HOLDFAST_API_SERVER_STOP", "HOLDFAST_API_SERVER_CONT")
    words = [shlex.split(os.environ.get(name, "")) for name in names]
    if not all(words):
        refuse(f"set {' and '.join(names)} to commands that stop the cluster's API server, and continue it")
    return words[0], words[1]


def test_a_rank_is_replaced_while_the_api_server_is_stopped(
    job: TrainingJob, installed: ClusterUnderTest
) -> None:
    """The server is stopped and not killed, so that every connection to it is half open."""
    stop, cont = commands()
    before = job.observe()
    inside = ("exec", "-n", job.namespace, POD, "-c", job.container, "--", "python3", "-c")
    installed.kubectl(*inside, _KILL_LATER, "1", str(KILLED_AFTER_S))
    subprocess.run(stop, check=True)
    stopped_s = time.time()
    try:
        time.sleep(AWAY_S)  # the subject of this test: nobody can query the API server now
    finally:
        subprocess.run(cont, check=True)
    back_s = time.time()
    job.supervised_by(before.epoch - 1)
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("crash", 1), incident["why"]
    after = job.observe()
    assert after.epoch == before.epoch, "the leader changed"
    assert (after.pods, after.restarts) == (before.pods, before.restarts), "a pod was evicted or restarted"
    stamped = [
        (datetime.fromisoformat(stamp[:19] + "+00:00").timestamp(), int(step))
        for stamp, step in _STAMPED.findall(job.printed(OTHER, "&timestamps=true"))
    ]
    away = [step for at_s, step in stamped if stopped_s + KILLED_AFTER_S + 10 < at_s < back_s - 2]
    assert len(away) > 20, f"few steps after the recovery and before the server was back: {away}"
    assert [step for _, step in stamped if step == away[0]] == away[:1]
    assert restarts(job.pods()) == {}


def test_the_supervisor_uses_an_api_server_that_has_come_back(job: TrainingJob) -> None:
    """A fault that needs the API: the pod is deleted, and its successor joins."""
    before = job.observe()
    job.signal_rank(1, signal.SIGKILL, POD)
    job.recovered(before)
    assert job.until(lambda: job.view() or None, "a status is published", SUMMARY_S)
