"""A PyTorchJob of two members under Holdfast that suffers the faults, and its undisturbed counterpart."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster import pod_objects
from bench.cluster.nodes import training_record
from bench.cluster.nodes.step_log import StepLog, running_container
from bench.cluster.pod_objects import CONTAINER
from supervisor.cluster.supervision.contents import supervision_of
from supervisor.wording import count
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, Json
from tests.cluster.apparatus.training_job import TrainingJob

SCRIPT = Path(__file__).with_name("node_training.py")
NAME = "gpt"  # the job's name, which `TrainingJob` requires
RANKS = 2  # one for each member
READY_S = 240.0  # until a job trains with all of its pods, even after a node has booted
RECORDED_S = 30.0  # the supervisor writes its counts every 5 s
DELETED_S = 180.0
REFERENCE_S = 600.0
POLL_S = 0.01
FINISH = "/tmp/finish"  # as in the script
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
LABEL = "holdfast.dev/bench"  # on all pods of the job, including standbys


@dataclass(frozen=True, slots=True)
class JobBefore:
    """The state of a job before a fault."""

    generation: int
    incidents: int


class DisturbedJob:
    """A job that trains in a separate namespace, until `close` deletes the namespace."""

    def __init__(self, cluster: ClusterUnderTest, namespace: str, standbys: int, pace_s: float) -> None:
        self.namespace = namespace
        self._cluster, self._standbys = cluster, standbys
        cluster.kubectl("create", "namespace", namespace)
        self._job = TrainingJob(cluster, namespace, job_objects(standbys, pace_s))
        self._job.start()
        self.log = StepLog(namespace, CONTAINER, self._all_pods)

    def close(self) -> None:
        self.log.close()
        self._cluster.kubectl("delete", "namespace", self.namespace, "--wait=false", "--ignore-not-found")

    def gone(self) -> None:
        """Wait until the namespace is deleted, so that its pods no longer use the nodes' CPUs."""
        words = ("wait", "--for=delete", f"namespace/{self.namespace}", f"--timeout={DELETED_S:.0f}s")
        self._cluster.attempt(*words, limit_s=DELETED_S + 10)

    def ready(self) -> JobBefore:
        """Wait until the job trains with all members and standbys, and its last incident is recorded.

        Raises AssertionError with a report of the namespace if that takes longer than `READY_S`.
        """
        what = f"the job trains with all members and has {count(self._standbys, 'standby pod')}"
        found: JobBefore = self._job.until(lambda: self._look(self._standbys), what, READY_S)
        return found

    def _look(self, standbys: int) -> JobBefore | None:
        status, view = self._job.status(), self._job.view()
        recent = status.get("recent") or ()
        generation = training_record.newest_generation(self.log.steps)
        if view.get("phase") != "running" or status.get("generation") != generation:
            return None
        if recent and recent[-1]["open"]:
            return None
        members = [each for each in view.get("members", ()) if each["connected"]]
        training = [each for each in members if each["ranks"]]
        warm = [each for each in members if not each["ranks"] and each["parked"]]
        pods = {str(pod["metadata"]["name"]): pod for pod in self._job.pods()}
        names = [str(each["name"]).partition(".")[0] for each in (*training, *warm)]
        heard = [self.log.follows(running_container(pods.get(name) or {}, CONTAINER)) for name in names]
        if len(training) != RANKS or len(warm) < standbys or not all(heard):
            return None
        return JobBefore(generation, status.get("incidents", 0))

    def resumed_s(self, before: JobBefore, patience_s: float) -> float | None:
        """Return the time when all ranks had completed a step of a new generation; None if over the limit."""
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            found = training_record.resumed_s(self.log.steps, before.generation, RANKS)
            if found is not None:
                return found
            time.sleep(POLL_S)
        return None

    def incidents(self, before: JobBefore) -> list[Json]:
        """Wait until an incident has been recorded and none is open; return the records since `before`."""

        def look() -> list[Json] | None:
            recent: list[Json] = self._job.status().get("recent") or []
            new = [each for each in recent if each["id"] > f"i-{before.incidents:04d}"]
            return new if new and not new[-1]["open"] else None

        found: list[Json] = self._job.until(look, "the incident is recorded", RECORDED_S)
        return found

    def rank_pod(self, rank: int) -> Json:
        """Return the pod of a rank."""
        return self._job.pod(self._job.rank_pod(rank))

    def container_of(self, pod: str) -> str:
        """Return the id of a pod's training container; "" if it is not running."""
        return running_container(self._job.pod(pod), CONTAINER)

    def standbys(self) -> list[tuple[str, str]]:
        """Return the namespaces and names of the pods that the supervisor has created."""
        names = (str(pod["metadata"]["name"]) for pod in self._job.pods() if supervision_of(pod))
        return [(self.namespace, name) for name in names]

    def epoch(self) -> int:
        """Return the epoch of the leader that last wrote the status."""
        found: int = self._job.status().get("epoch", 0)
        return found

    def supervised_after(self, epoch: int) -> None:
        """Wait until a leader with a later epoch supervises all members."""
        self._job.supervised_by(epoch)

    def owner(self) -> Json:
        """Return the status of the PyTorchJob."""
        return self._job.owner()

    def finish(self) -> str:
        """Let the script end, and return the state of the PyTorchJob: "Succeeded" if all went well."""
        self._job.until(lambda: self._look(0), "the job trains with all members", READY_S)
        name = self._job.rank_pod(0)
        self._cluster.kubectl("exec", "-n", self.namespace, name, "-c", CONTAINER, "--", "touch", FINISH)

        def look() -> str | None:
            kinds = {each["type"]: each["status"] for each in self.owner().get("conditions") or ()}
            return next((each for each in ("Succeeded", "Failed") if kinds.get(each) == "True"), None)

        found: str = self._job.until(look, "the PyTorchJob has ended", READY_S)
        return found

    def reference(self) -> dict[int, str]:
        """Train an undisturbed run to the last digest of this job, and return its digests by step."""
        last = max((each.step for each in self.log.digests), default=-1)
        if last < 0:
            return {}
        text = json.dumps(reference_pod(last + 1))
        self._cluster.kubectl("create", "-n", self.namespace, "-f", "-", text=text)
        words = ("--for=jsonpath={.status.phase}=Succeeded", "pod/reference", "-n", self.namespace)
        limit = f"--timeout={REFERENCE_S:.0f}s"
        self._cluster.kubectl("wait", *words, limit, limit_s=REFERENCE_S + 10)
        text = self._cluster.kubectl("logs", "-n", self.namespace, "reference", "-c", CONTAINER)
        found = (training_record.parse(line, 0.0) for line in text.splitlines())
        return {each.step: each.digest for each in found if isinstance(each, training_record.PrintedDigest)}

    def _all_pods(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = self._cluster.read(f"/api/v1/namespaces/{self.namespace}/pods")[
            "items"
        ]
        return found


def job_objects(standbys: int, pace_s: float) -> list[Json]:
    """Return the objects of a job whose members are on different nodes."""
    annotations = {"holdfast.dev/inject": "true"}
    if standbys:
        annotations["holdfast.dev/standby"] = str(standbys)
    spec = pod_objects.pod(
        ["python", "/script/train.py"], annotated=True, environment={"HOLDFAST_PACE": str(pace_s)}
    )
    apart = {"labelSelector": {"matchLabels": {LABEL: "member"}}, "topologyKey": "kubernetes.io/hostname"}
    spec["affinity"] = {"podAntiAffinity": {_REQUIRED: [apart]}}
    metadata = {"labels": {LABEL: "member"}, "annotations": annotations}
    template = {"metadata": metadata, "spec": spec}
    # OnFailure: after a node has booted, the kubelet starts the containers of its pods again
    job = pod_objects.pytorch_job(NAME, RANKS, template, "OnFailure")
    return [pod_objects.script(SCRIPT), job]


def reference_pod(steps: int) -> Json:
    """Return a pod in which torchrun trains both ranks for `steps` steps, without Holdfast."""
    environment = {"HOLDFAST_PACE": "0", "HOLDFAST_STEPS": str(steps)}
    command = ["torchrun", "--standalone", f"--nproc-per-node={RANKS}", "/script/train.py"]
    spec = pod_objects.pod(command, annotated=False, environment=environment)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reference"},
        "spec": {**spec, "restartPolicy": "Never"},
    }
