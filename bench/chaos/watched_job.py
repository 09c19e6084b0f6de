"""Watch one job of a chaos run on the cluster, and find out how it ended."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bench.chaos.job_condition import JobCondition, condition_of, new_incidents
from bench.chaos.job_objects import BUCKET
from bench.chaos.job_table import ChaosJob
from bench.chaos.report import JobResult
from holdfast.checkpoint import object_location
from holdfast.checkpoint.catalog import StoredCheckpoint
from sidecar.storage.object_client import ObjectClient
from sidecar.storage.object_storage import ObjectStorage
from tests.cluster.apparatus.training_job import TrainingJob, restarts

SUPERVISIONS = "/apis/holdfast.dev/v1alpha1/namespaces/{}/supervisions"
TAIL = "&tailLines=30"
_DIGESTS = re.compile(r"^digests (\{.*\})$", re.MULTILINE)

T = TypeVar("T")


class WatchedJob:
    """One job, in a separate namespace."""

    def __init__(self, job: ChaosJob, training: TrainingJob) -> None:
        self.job, self.training = job, training
        self.condition: JobCondition | None = None  # as last read
        self.digests: dict[str, Any] | None = None
        self._status: Mapping[str, Any] = {}
        self._known: set[str] = set()  # the ids of incidents that were reported

    def look(self) -> JobCondition | None:
        """Read the job; return None if the API server does not answer or the job is not supervised yet.

        The pods of a StatefulSet are restarted after the training ends, so their output is saved at once.
        """
        status = answered(self.training.status)
        if not status:
            return None
        self._status, self.condition = status, condition_of(self.job, status)
        if self.condition.exit_code == 0 and self.digests is None:
            self.digests = answered(self._printed_digests)
        return self.condition

    def take_incidents(self) -> list[dict[str, Any]]:
        """Return the incidents since the last call."""
        found = new_incidents(self._status, self._known)
        self._known |= {str(each["id"]) for each in found}
        return found

    def restarts(self) -> int:
        """Return how often containers of the job's pods have been restarted."""
        return sum(restarts(self.training.pods()).values())

    def nodes(self) -> dict[int, str]:
        """Return the node of each rank's pod, if it is known."""
        where = {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in self.training.pods()}
        found: dict[int, str] = {}
        for member in self.training.view().get("members", ()):
            name = str(member["name"]).partition(".")[0]
            found |= {rank: where[name] for rank in member["ranks"] if name in where}
        return found

    def _printed_digests(self) -> dict[str, Any] | None:
        for pod in self.training.pods():
            for more in ("", "&previous=true"):
                text = self.training.printed(pod["metadata"]["name"], TAIL + more)
                if found := _DIGESTS.search(text):
                    digests: dict[str, Any] = json.loads(found[1])
                    return digests
        return None

    # -- the end

    def owner_has_succeeded(self) -> bool:
        """Return True if the owner reports success; a StatefulSet does not, so its run must report it."""
        if self.job.kind == "StatefulSet":
            return self.condition is not None and self.condition.exit_code == 0
        wanted = "Complete" if self.job.kind == "Job" else "Succeeded"
        conditions = (answered(self.training.owner) or {}).get("conditions") or ()
        return any(each["type"] == wanted and each["status"] == "True" for each in conditions)

    def failures(self) -> int:
        """Return how many failures the owner has counted."""
        status = self.training.owner()
        replicas = (status.get("replicaStatuses") or {}).values()
        return int(status.get("failed") or 0) + sum(int(each.get("failed") or 0) for each in replicas)

    def result(self) -> JobResult:
        """Return how the job ended, without its checkpoints."""
        found = JobResult(
            self.job.name, self.owner_has_succeeded(), digests=self.digests, failures=self.failures()
        )
        if not found.succeeded:
            condition = self.condition
            found.detail = (
                "there is no Supervision"
                if condition is None
                else condition.unrest or f"at step {condition.step}"
            )
        return found

    def remove(self) -> None:
        """Delete the owner of the pods, and everything else that was created for the job."""
        text = "\n".join(json.dumps(each) for each in self.training.objects)
        there = ("-n", self.training.namespace, "--ignore-not-found", "--wait=false")
        self.training.cluster.kubectl("delete", *there, "-f", "-", text=text)

    def leftovers(self) -> list[str]:
        """Return what is left of the job: pods, volumes and Supervisions."""
        read, namespace = self.training.cluster.read, self.training.namespace
        found = {
            "pod": read(f"/api/v1/namespaces/{namespace}/pods"),
            "claim": read(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"),
            "supervision": read(SUPERVISIONS.format(namespace)),
        }
        left = [
            f"{kind} {namespace}/{each['metadata']['name']}"
            for kind, listed in found.items()
            for each in listed.get("items", ())
        ]
        volumes = read("/api/v1/persistentvolumes")["items"]
        bound = [
            each for each in volumes if (each["spec"].get("claimRef") or {}).get("namespace") == namespace
        ]
        return left + [f"volume {each['metadata']['name']}" for each in bound]


def checked_checkpoints(job: ChaosJob, credentials: Mapping[str, str], local: Path) -> tuple[int, list[str]]:
    """Read all checkpoints of a job in full; return how many are intact, and a line for each that is not."""
    location = object_location.parse(f"s3://{BUCKET}/{job.prefix}")
    before = dict(os.environ)
    os.environ.update(credentials)  # the library reads them when the client is made
    try:
        client = ObjectClient(location, credentials)
    finally:
        os.environ.clear()
        os.environ.update(before)
    storage = ObjectStorage(location, lambda: client, local)
    whole, torn = 0, []
    for path, found in storage.each_checkpoint():
        fault = storage.content_fault(found) if isinstance(found, StoredCheckpoint) else str(found)
        if fault:
            torn.append(f"{job.name} {path}: {fault}")
        else:
            whole += 1
    return whole, torn


def answered(ask: Callable[[], T]) -> T | None:
    """Return what `ask` reads from the API server; None if the server does not answer or refuses."""
    try:
        return ask()
    except (AssertionError, OSError, http.client.HTTPException, ValueError):
        return None
