"""Find out which pods were replaced or restarted, and why a pod does not start. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.fileio.strict_json import mapping
from supervisor.admission import pod_layout
from supervisor.cli.on_cluster.jobs import seconds_of
from supervisor.kubernetes.client import KubernetesObject

_NO_IMAGE = ("ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName")


@dataclass(frozen=True, slots=True)
class PodsSeen:
    """A job's pods at one moment: the uid of each pod, and the number of restarts of each container."""

    uids: Mapping[str, str]
    restarts: Mapping[tuple[str, str], int]  # by pod and container


@dataclass(frozen=True, slots=True)
class PodChanges:
    """What happened to a job's pods between two moments."""

    gone: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    restarted: tuple[tuple[str, str], ...] = ()  # pod and container

    def __str__(self) -> str:
        parts = []
        if self.gone or self.new:
            parts.append(f"pod {', '.join(self.gone) or '-'} was replaced by {', '.join(self.new) or 'none'}")
        if self.restarted:
            named = ", ".join(f"{container} of {pod}" for pod, container in self.restarted)
            parts.append(f"the kubelet restarted {named}")
        return "; ".join(parts) or "no pod and no container was restarted"


def seen(pods: Iterable[KubernetesObject]) -> PodsSeen:
    """Return the uids and restarts of `pods`, without pods that are being deleted."""
    alive = [each for each in pods if not each["metadata"].get("deletionTimestamp")]
    return PodsSeen(
        {_name(pod): str(pod["metadata"].get("uid")) for pod in alive},
        {
            (_name(pod), str(each["name"])): int(each.get("restartCount") or 0)
            for pod in alive
            for each in _statuses(pod)
        },
    )


def changes(before: PodsSeen, after: PodsSeen) -> PodChanges:
    old, new = set(before.uids.items()), set(after.uids.items())
    return PodChanges(
        tuple(sorted(name for name, _ in old - new)),
        tuple(sorted(name for name, _ in new - old)),
        tuple(
            sorted(
                key
                for key, count in after.restarts.items()
                if key[0] not in {name for name, _ in new - old} and count > before.restarts.get(key, 0)
            )
        ),
    )


def replacement_times(pods: Iterable[KubernetesObject], name: str, fault_s: float) -> str:
    """Return how long after a fault a pod was created and its container was started; "" if unknown.

    `fault_s` is the time of the fault in seconds since 1970.
    """
    for pod in pods:
        if _name(pod) != name:
            continue
        running = [mapping(mapping(each.get("state")).get("running")) for each in _main_statuses(pod)]
        times = (
            seconds_of(pod["metadata"].get("creationTimestamp")),
            seconds_of(running[0].get("startedAt")) if running else None,
        )
        after = [each - fault_s for each in times if each is not None]
        if len(after) == len(times):
            created, started = (f"{max(0.0, each):.0f} s" for each in after)
            return f"its owner created it after {created}, and its container started after {started}"
    return ""


def missing_image(pods: Iterable[KubernetesObject]) -> str:
    """Return which image a node lacks, and what to do about it; "" if no image is missing."""
    for pod in pods:
        for each in _statuses(pod):
            waiting = mapping(mapping(each.get("state")).get("waiting"))
            if waiting.get("reason") in _NO_IMAGE:
                image, node = each.get("image"), mapping(pod.get("spec")).get("nodeName")
                return (
                    f"node {node} does not have the image {image} and cannot pull it ({waiting['reason']}):"
                    " build it with `make images` and load it onto the nodes, for example with"
                    f" `kind load docker-image {image}` or `minikube image load {image}`"
                )
    return ""


def waiting_for(pods: Iterable[KubernetesObject]) -> str:
    """Return, in words, why pods are not running; "" if all of them run or have succeeded."""
    found = []
    for pod in pods:
        status = mapping(pod.get("status"))
        blocked = [
            str(each.get("message") or each.get("reason"))
            for each in status.get("conditions") or ()
            if each.get("type") == "PodScheduled" and each.get("status") != "True"
        ]
        reasons = [
            f"{each['name']}: {mapping(mapping(each.get('state')).get('waiting')).get('reason')}"
            for each in _statuses(pod)
            if mapping(each.get("state")).get("waiting")
        ]
        if status.get("phase") not in ("Running", "Succeeded"):
            why = "; ".join(blocked or reasons) or "no reason given"
            found.append(f"{_name(pod)} is {status.get('phase')} ({why})")
    return ", ".join(found)


def all_run(pods: Iterable[KubernetesObject]) -> bool:
    """Return True if every container is running, or has exited with code 0, as init containers do."""
    states = [mapping(each.get("state")) for pod in pods for each in _statuses(pod)]
    return all("running" in each or mapping(each.get("terminated")).get("exitCode") == 0 for each in states)


def is_injected(pod: KubernetesObject) -> bool:
    """Return True if the pod has Holdfast's sidecar."""
    setup = mapping(pod.get("spec")).get("initContainers") or ()
    return any(each.get("name") == pod_layout.SIDECAR for each in setup)


def not_injected(pods: Iterable[KubernetesObject]) -> str:
    """Return which pod was not injected, and why if that is known; "" if all pods were injected."""
    for pod in pods:
        if not is_injected(pod):
            why = mapping(pod["metadata"].get("annotations")).get(pod_layout.NOT_INJECTED)
            return f"pod {_name(pod)} was not injected: {why or 'the webhook did not answer'}"
    return ""


def places(pods: Iterable[KubernetesObject]) -> str:
    """Return the pods and their nodes in words."""
    return ", ".join(f"{_name(pod)} on {mapping(pod.get('spec')).get('nodeName')}" for pod in pods)


def _name(pod: KubernetesObject) -> str:
    return str(pod["metadata"]["name"])


def _statuses(pod: KubernetesObject) -> list[Mapping[str, Any]]:
    return [*(mapping(pod.get("status")).get("initContainerStatuses") or ()), *_main_statuses(pod)]


def _main_statuses(pod: KubernetesObject) -> list[Mapping[str, Any]]:
    return list(mapping(pod.get("status")).get("containerStatuses") or ())
