"""Run the demo's two jobs: an example with Holdfast that suffers faults, and its twin under torchrun."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import BadInput
from supervisor.cli.on_cluster.connection import ClusterConnection
from supervisor.cli.on_cluster.demo import pods
from supervisor.cli.on_cluster.demo.interruption import Interruption
from supervisor.cli.on_cluster.demo.kubectl import Kubectl
from supervisor.cli.on_cluster.demo.pods import PodsSeen
from supervisor.cli.on_cluster.job_source import NamedJob
from supervisor.kubernetes.client import PODS, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import NotFound, ServerUnreachable

SUPERVISED, TWIN = "gpt", "gpt-torchrun"
FILES = {SUPERVISED: "job.yaml", TWIN: "job-plain.yaml"}  # in examples/kubernetes
PODS_EACH = 2
READY_S = 150.0  # the limit for the job to begin training; four pods import torch at the same time
POLL_S = 0.4  # between two checks of the cluster
LIBRARY_IMAGE = "holdfast:dev"  # the image in the examples
_KINDS = {
    "Service": ResourceKind("", "v1", "services"),
    "Job": ResourceKind("batch", "v1", "jobs"),
}
_DIGEST = re.compile(r"^digest ([0-9a-f]{64})$", re.MULTILINE)

T = TypeVar("T")


class NotInTime(Exception):
    """A wait exceeded its time limit. The message tells the user what did not happen."""


def renamed(
    objects: Sequence[Mapping[str, Any]], name: str, args: Sequence[str], image: str
) -> Sequence[KubernetesObject]:
    """Return an example's objects with this name, script arguments and image of Holdfast. Pure."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: changed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [changed(each) for each in value]
        if not isinstance(value, str):
            return value
        whole = {"gpt": name, LIBRARY_IMAGE: image}
        return whole.get(value, value.replace("gpt-0.gpt", f"{name}-0.{name}"))

    found: list[dict[str, Any]] = changed(list(objects))
    for each in found:
        if each["kind"] == "Job":
            each["spec"]["template"]["spec"]["containers"][0]["args"] = list(args)
    return found


@dataclass(frozen=True, slots=True)
class Observed:
    """The state of the job before or after a fault. `view` is the published status, at most 5 s old."""

    epoch: int  # the supervisor's epoch
    incidents: int
    step: int
    pods: PodsSeen
    view: Mapping[str, Any]


class PodTraining:
    """Starts and observes the two jobs in the demo's namespace."""

    def __init__(
        self, connection: ClusterConnection, kubectl: Kubectl, namespace: str, stop: Interruption
    ) -> None:
        self.namespace = namespace
        self._connection, self._kubectl, self._stop = connection, kubectl, stop
        self._job: NamedJob | None = None

    def start(self, examples: Path, args: Sequence[str], image: str) -> None:
        """Create both jobs with the installation's `image`. Raises the exceptions of `ApiServer`."""
        import yaml

        for name, file in FILES.items():
            with (examples / file).open() as opened:
                objects = [each for each in yaml.safe_load_all(opened) if each is not None]
            for each in renamed(objects, name, args, image):
                kind = _KINDS[each["kind"]]
                self._connection.ask(
                    lambda server, kind=kind, each=each: server.create(kind, each, self.namespace)  # type: ignore[misc]
                )

    def wait_for_start(self, show: Callable[[str], object]) -> None:
        """Wait until the pods of both jobs run and the supervised job trains.

        This does not wait for the twin to train, because the supervised job might finish before the last
        fault.

        Raises `BadInput` if the cluster cannot run the pods, or `NotInTime`.
        """

        def poll() -> bool | None:
            listed = self.pods_of(SUPERVISED) + self.pods_of(TWIN)
            lacking = pods.missing_image(listed) or pods.not_injected(self.pods_of(SUPERVISED))
            if lacking:
                raise BadInput(lacking)
            running = sum(not pods.waiting_for([each]) for each in listed)
            show(f"{running} of {2 * PODS_EACH} pods run, and their scripts start")
            if running < 2 * PODS_EACH:
                return None
            return True if self.is_calm(0) else None

        try:
            self.until(poll, "the job trains", READY_S)
        except NotInTime as error:
            why = pods.waiting_for(self.pods_of(SUPERVISED) + self.pods_of(TWIN))
            raise NotInTime(f"{error}: {why}" if why else str(error)) from None

    # -- observing the jobs

    def pods_of(self, name: str) -> list[KubernetesObject]:
        """Return the pods of one job, sorted by name, without pods that are being deleted."""
        labels = f"batch.kubernetes.io/job-name={name}"
        found = self._connection.ask(lambda server: server.list(PODS, self.namespace, labels=labels)).objects
        alive = [each for each in found if not each["metadata"].get("deletionTimestamp")]
        return sorted(alive, key=lambda each: str(each["metadata"]["name"]))

    def job(self) -> NamedJob | None:
        """Read and return the Supervision of the job; None if it does not exist yet."""
        try:
            if self._job is None:
                self._job = NamedJob(self._connection, self.namespace, SUPERVISED)
            else:
                self._job.read()
        except NotFound:
            return None
        return self._job

    def view(self) -> Mapping[str, Any]:
        job = self.job()
        return (job.status() if job is not None else None) or {}

    def observe(self) -> Observed:
        view = self.view()
        assert self._job is not None  # the jobs have started
        return Observed(
            int(self._job.summary.get("epoch") or 0),
            int(self._job.summary.get("incidents") or 0),
            int(view.get("step") or 0),
            pods.seen(self.pods_of(SUPERVISED)),
            view,
        )

    def is_calm(self, step: int) -> bool:
        """Return True if all ranks train at `step` or later, processes are warm, and no incident is open."""
        found = self.view()
        members = [each for each in found.get("members") or () if each.get("ranks")]
        is_calm = found.get("phase") == "running" and found.get("open_incident") is None
        connected = bool(members) and all(each.get("connected") for each in members)
        return is_calm and connected and bool(found.get("warm_ready")) and (found.get("step") or -1) >= step

    def pod_of_rank(self, rank: int) -> str:
        """Return the name of the pod that hosts `rank`. Raises `NotInTime`."""

        def poll() -> str | None:
            alive = {str(each["metadata"]["name"]) for each in self.pods_of(SUPERVISED)}
            for member in self.view().get("members") or ():
                name = str(member["name"]).partition(".")[0]
                if rank in member["ranks"] and name in alive:
                    return name
            return None

        return self.until(poll, f"a pod has rank {rank}", READY_S)

    def delete_pod(self, name: str, namespace: str = "", grace_s: int | None = None) -> None:
        """Begin to delete a pod in `namespace`, by default the demo's. If `grace_s` is 0, kill the pod."""
        where = namespace or self.namespace
        self._connection.ask(lambda server: server.delete(PODS, name, where, grace_s=grace_s))

    def digest(self, name: str) -> str:
        """Return the digest that rank 0 of a job prints at the end; "" if it has not printed it yet."""
        for pod in self.pods_of(name):
            where = ("-n", self.namespace, str(pod["metadata"]["name"]), "-c", "trainer", "--tail=20")
            printed, _ = self._kubectl.attempt("logs", *where)
            found = _DIGEST.search(printed)
            if found:
                return found[1]
        return ""

    # -- waiting

    def until(self, poll: Callable[[], T | None], what: str, limit_s: float) -> T:
        """Call `poll` until its result is not None, and return the result.

        If the API server does not respond, try again. Raises `NotInTime` after `limit_s`, or `Interrupted`.
        """
        deadline = time.monotonic() + limit_s
        while True:
            try:
                found = poll()
            except ServerUnreachable:
                found = None
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise NotInTime(f"timed out after {limit_s:g} s while waiting for this: {what}")
            self._stop.pause(POLL_S)
