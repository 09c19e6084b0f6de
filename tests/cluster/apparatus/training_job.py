"""A training job on the cluster: started from an example, watched, and disturbed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import yaml

from tests.cluster.apparatus.kubernetes_cluster import EXAMPLES, ClusterUnderTest, Json

START_S = 120.0  # until the first step: up to five jobs import torch at once on two busy cores
RECOVERED_S = 90.0  # until a job trains again, with a new pod if it needs one
TRAINED_S = 150.0  # for a few hundred paced steps
SUMMARY_S = 30.0  # the supervisor writes its counts every 5 s
STEADY = 5  # steps after which a job counts as training

_STEP = re.compile(r"^step +(\d+) +loss", re.MULTILINE)
_DIGEST = re.compile(r"^digest ([0-9a-f]{64})$", re.MULTILINE)

# Sends a signal to a rank, whose process has the rank in its name. The image has no other tool for this.
_SIGNAL_RANK = """
import os, sys
title = f"holdfast: rank {sys.argv[1]} "
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        found = open(f"/proc/{pid}/cmdline").read().startswith(title)
    except OSError:
        continue
    if found:
        os.kill(int(pid), int(sys.argv[2]))
        sys.exit()
sys.exit("no process of " + title)
"""


@dataclass(frozen=True, slots=True)
class Observed:
    """The figures and pods of a job, to be compared before and after a fault."""

    generation: int
    incidents: int
    epoch: int  # of the supervisor
    pods: Mapping[str, str]  # the uid of each pod by name
    restarts: Mapping[str, int]  # of the containers that have restarted, by pod/container


class TrainingJob:
    """One job in a separate namespace."""

    def __init__(self, cluster: ClusterUnderTest, namespace: str, objects: list[Json]) -> None:
        """`objects` are the objects of an example."""
        self.cluster, self.namespace, self.objects = cluster, namespace, objects
        self.template = next(pods_in(objects))
        self.container: str = self.template["spec"]["containers"][0]["name"]
        self._follower: subprocess.Popen[bytes] | None = None
        self._followed: IO[bytes] | None = None

    def start(self) -> None:
        text = "\n".join(json.dumps(each) for each in self.objects)
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", "-", text=text)

    # -- what the cluster shows

    def pods(self) -> list[Json]:
        """Return the job's pods by name, without those that are being deleted."""
        found = self.cluster.read(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        alive = [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]
        return sorted(alive, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, name: str) -> Json:
        return self.cluster.read(f"/api/v1/namespaces/{self.namespace}/pods/{name}")

    def owner(self) -> Json:
        """Return the status of the object that owns the pods; {} if it has none."""
        kind = self.objects[-1]
        group, _, version = kind["apiVersion"].rpartition("/")
        place = f"/apis/{group}/{version}/namespaces/{self.namespace}/{kind['kind'].lower()}s/gpt"
        status: Json = self.cluster.read(place).get("status") or {}
        return status

    def status(self) -> Json:
        """Return the status of the Supervision; {} if there is none."""
        path = f"/apis/holdfast.dev/v1alpha1/namespaces/{self.namespace}/supervisions/gpt"
        status: Json = self.cluster.read(path).get("status") or {}
        return status

    def view(self) -> Json:
        """Return what `holdfast status` shows, at most 5 s old."""
        text = self.status().get("view")
        view: Json = json.loads(text) if text else {}
        return view

    def observe(self) -> Observed:
        status, pods = self.status(), self.pods()
        return Observed(
            generation=status.get("generation", 0),
            incidents=status.get("incidents", 0),
            epoch=status.get("epoch", 0),
            pods={pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods},
            restarts=restarts(pods),
        )

    def rank_pod(self, rank: int) -> str:
        """Return the name of the pod that has `rank`."""

        def look() -> str | None:
            alive = {pod["metadata"]["name"] for pod in self.pods()}
            for member in self.view().get("members", ()):
                name = str(member["name"]).partition(".")[0]
                if rank in member["ranks"] and name in alive:
                    return name
            return None

        found: str = self.until(look, f"a pod has rank {rank}", SUMMARY_S)
        return found

    # -- what the script prints

    def printed(self, pod: str, options: str = "") -> str:
        return self.cluster.log(self.namespace, pod, self.container, options)

    def steps(self, pod: str) -> list[int]:
        """Return the steps that rank 0 has printed in `pod`, in order."""
        return [int(step) for step in _STEP.findall(self.printed(pod))]

    def step(self) -> int:
        """Return the last step that rank 0 has printed in any pod; -1 before the first."""
        found = (_STEP.findall(self.printed(pod["metadata"]["name"], "&tailLines=3")) for pod in self.pods())
        return max((int(steps[-1]) for steps in found if steps), default=-1)

    def follow(self, pod: str) -> None:
        """Keep what `pod` prints until its container ends, because a later container may replace its log."""
        self._followed = TemporaryFile()
        words = ("logs", "--follow", "-n", self.namespace, pod, "-c", self.container)
        self._follower = subprocess.Popen(
            ["kubectl", *words], stdout=self._followed, stderr=subprocess.DEVNULL
        )

    def followed_steps(self) -> list[int]:
        """Return the steps that the pod of `follow` has printed, in order."""
        assert self._followed is not None
        self._followed.seek(0)
        return [int(step) for step in _STEP.findall(self._followed.read().decode(errors="replace"))]

    def unfollow(self) -> None:
        """Stop the process that `follow` has started."""
        if self._follower is not None and self._followed is not None:
            self._follower.kill()
            self._follower.wait()
            self._followed.close()

    def digest(self) -> str:
        """Wait for the end of the training, and return the digest of the final weights."""

        def look() -> str | None:
            texts = [self.printed(pod["metadata"]["name"], "&tailLines=5") for pod in self.pods()]
            if self._followed is not None:
                self._followed.seek(0)
                texts.append(self._followed.read().decode(errors="replace"))
            return next((found[1] for text in texts if (found := _DIGEST.search(text))), None)

        found: str = self.until(look, "the script has printed its digest", TRAINED_S)
        return found

    # -- waiting

    def until(self, look: Any, what: str, limit_s: float) -> Any:
        return self.cluster.until(look, what, self.namespace, limit_s)

    def trains(self, limit_s: float = START_S) -> int:
        """Return the step once the job has trained `STEADY` more steps than now."""
        first = self.step()
        return self.reaches(first + STEADY, limit_s)

    def reaches(self, step: int, limit_s: float = START_S) -> int:
        def look() -> int | None:
            now = self.step()
            return now if now >= step else None

        found: int = self.until(look, f"step {step}", limit_s)
        return found

    def recovered(self, before: Observed) -> Json:
        """Wait until the job has recovered from one fault, and return the record of the incident.

        Raises AssertionError if that took more than one generation, or cost more than one step.
        """

        def look() -> Json | None:
            status = self.status()
            recent: list[Json] = status.get("recent") or []
            if status.get("incidents", 0) <= before.incidents or len(recent) <= 0:
                return None
            last = recent[-1]
            return last if last["id"] > f"i-{before.incidents:04d}" and not last["open"] else None

        incident: Json = self.until(look, f"an incident after {before.incidents} is over", RECOVERED_S)
        status = self.status()
        assert status["incidents"] == before.incidents + 1, status["recent"]
        assert status["generation"] == before.generation + 1, status["recent"]
        assert incident["lost_steps"] in (0, 1), json.dumps(incident)
        self.trains(RECOVERED_S)
        return incident

    def supervised_by(self, epoch: int) -> None:
        """Wait until a supervisor with an epoch above `epoch` has reports from all members."""

        def look() -> bool | None:
            if self.status().get("epoch", 0) <= epoch:
                return None
            view = self.view()
            connected = [each["connected"] for each in view.get("members", ()) if each["ranks"]]
            return True if view.get("phase") == "running" and connected and all(connected) else None

        self.until(look, f"a supervisor after epoch {epoch} supervises all members", RECOVERED_S)

    # -- faults

    def signal_rank(self, rank: int, signum: int, pod: str = "") -> None:
        inside = ("exec", "-n", self.namespace, pod or self.rank_pod(rank), "-c", self.container, "--")
        self.cluster.kubectl(*inside, "python3", "-c", _SIGNAL_RANK, str(rank), str(signum))


def example(name: str, *options: str, annotations: Mapping[str, str] | None = None) -> list[Json]:
    """Return the objects of an example, with `options` in place of its script's own options.

    `annotations` are added to the pods.
    """
    with Path(EXAMPLES / name).open() as file:
        objects = [each for each in yaml.safe_load_all(file) if each is not None]
    changed: list[Json] = json.loads(json.dumps(objects))  # YAML anchors make two templates one object
    for pod in pods_in(changed):
        pod["spec"]["containers"][0]["args"] = ["--tiny", "--val-every=0", "--log-every=1", *options]
        if annotations:
            pod["metadata"].setdefault("annotations", {}).update(annotations)
    return changed


def pods_in(thing: Any) -> Any:
    """Yield the pods and pod templates within an object."""
    if isinstance(thing, list):
        for each in thing:
            yield from pods_in(each)
    elif isinstance(thing, dict):
        if "containers" in (thing.get("spec") or {}):
            yield thing
        else:
            yield from pods_in(list(thing.values()))


def statuses(pod: Json) -> list[Json]:
    """Return the statuses of all containers of a pod."""
    status = pod.get("status") or {}
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def restarts(pods: list[Json]) -> dict[str, int]:
    """Return the number of restarts of each container that has restarted."""
    return {
        f"{pod['metadata']['name']}/{each['name']}": each["restartCount"]
        for pod in pods
        for each in statuses(pod)
        if each["restartCount"]
    }


def container_id(pod: Json, name: str) -> str:
    """Return the id of a running container."""
    found: str = next(each["containerID"] for each in statuses(pod) if each["name"] == name)
    return found
