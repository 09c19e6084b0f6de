"""Find out whether a pod fits on a node, as the scheduler's filters do. Pure.

This considers the resources, the number of pods, the ports and the taints of the node; the node selector and
the required node affinity of the pod; and required anti-affinity within a node. It does not consider volumes,
ResourceClaims, topology spread and affinity to other pods. The callers limit the cost of a wrong "fits".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.cluster.adoption.tolerations import Toleration, tolerations_of
from supervisor.cluster.standbys.pod_requests import Requests, amounts, requests_of
from supervisor.kubernetes.client import KubernetesObject

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOSTNAME = "kubernetes.io/hostname"
_KEEPS_AWAY = ("NoSchedule", "NoExecute")
_CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}

HostPort = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PodNeeds:
    """What a pod needs from its node, and what it uses there."""

    namespace: str
    name: str
    uid: str
    node: str  # "" until it is scheduled
    priority: int
    preempts: bool  # False if its preemption policy is Never
    requests: Requests
    ports: frozenset[HostPort]
    labels: Mapping[str, str]
    selector: Mapping[str, str]
    node_terms: tuple[Mapping[str, Any], ...] | None  # of the required node affinity; None for any node
    apart: tuple[Mapping[str, Any], ...]  # the terms of the required anti-affinity within a node
    tolerations: tuple[Toleration, ...]

    @property
    def place(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node, and the pods that take up its room, including pods that are being deleted."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, Any], ...]
    allocatable: Requests
    pods: tuple[PodNeeds, ...]
    used: Requests

    def without(self, uids: Collection[str]) -> NodeRoom:
        """Return the node as it would be without these pods."""
        gone = [each for each in self.pods if each.uid in uids] if uids else ()
        if not gone:
            return self
        left = Counter(self.used)
        left.subtract(_used(gone))
        return self._with(tuple(each for each in self.pods if each.uid not in uids), left)

    def beside(self, others: Iterable[PodNeeds]) -> NodeRoom:
        """Return the node as it would be with more pods. Pods that it already has are counted only once."""
        more = tuple(others)
        if more:
            known = {each.uid for each in self.pods}
            more = tuple(each for each in more if each.uid not in known)
        if not more:
            return self
        return self._with((*self.pods, *more), Counter(self.used) + Counter(_used(more)))

    def _with(self, pods: tuple[PodNeeds, ...], used: Requests) -> NodeRoom:
        return NodeRoom(self.name, self.labels, self.taints, self.allocatable, pods, used)


def read_pod_needs(pod: KubernetesObject) -> PodNeeds:
    """Return the needs of a valid pod."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    affinity = spec.get("affinity") or {}
    required = (affinity.get("nodeAffinity") or {}).get(REQUIRED)
    apart = (affinity.get("podAntiAffinity") or {}).get(REQUIRED) or ()
    return PodNeeds(
        metadata.get("namespace") or "",
        metadata["name"],
        metadata.get("uid") or "",
        spec.get("nodeName") or "",
        spec.get("priority") or 0,
        spec.get("preemptionPolicy") != "Never",
        requests_of(pod),
        frozenset(_ports(spec)),
        metadata.get("labels") or {},
        spec.get("nodeSelector") or {},
        tuple(required.get("nodeSelectorTerms") or ()) if required else None,
        tuple(each for each in apart if each.get("topologyKey") == HOSTNAME),
        tolerations_of(spec),
    )


def read_node_room(node: KubernetesObject, pods: Iterable[PodNeeds]) -> NodeRoom:
    """Return a valid node with the given pods."""
    metadata, spec = node["metadata"], node.get("spec") or {}
    there = tuple(pods)
    return NodeRoom(
        metadata["name"],
        metadata.get("labels") or {},
        (*(spec.get("taints") or ()), *((_CORDON,) if spec.get("unschedulable") else ())),
        amounts((node.get("status") or {}).get("allocatable")),
        there,
        _used(there),
    )


def fits(pod: PodNeeds, room: NodeRoom) -> bool:
    return not lacking(pod, room) and not is_kept_away(pod, room)


def lacking(pod: PodNeeds, room: NodeRoom) -> tuple[str, ...]:
    """Return the resources that the node does not have enough of for the pod."""
    return tuple(
        name
        for name, amount in pod.requests.items()
        if amount > 0 and amount > room.allocatable.get(name, 0) - room.used.get(name, 0)
    )


def is_kept_away(pod: PodNeeds, room: NodeRoom) -> bool:
    """Return True if something other than a lack of resources prevents the pod from running on the node."""
    return (
        not _is_selected(pod, room)
        or any(not _tolerates(pod, each) for each in room.taints if each.get("effect") in _KEEPS_AWAY)
        or (bool(pod.ports) and any(pod.ports & each.ports for each in room.pods))
        or any(_are_apart(pod, each) or _are_apart(each, pod) for each in room.pods)
    )


def _tolerates(pod: PodNeeds, taint: Mapping[str, Any]) -> bool:
    return any(each.tolerates(taint) for each in pod.tolerations)


def _is_selected(pod: PodNeeds, room: NodeRoom) -> bool:
    if any(room.labels.get(key) != value for key, value in pod.selector.items()):
        return False
    return pod.node_terms is None or any(_matches_term(each, room) for each in pod.node_terms)


def _matches_term(term: Mapping[str, Any], room: NodeRoom) -> bool:
    """Return True if the node meets all requirements of a term, which must have at least one."""
    labels, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    return bool(labels or fields) and (
        all(_meets(each, room.labels) for each in labels)
        and all(_meets(each, {"metadata.name": room.name}) for each in fields)
    )


def _meets(requirement: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return True if labels meet a requirement of a selector of nodes or pods."""
    found, values = labels.get(str(requirement.get("key"))), list(requirement.get("values") or ())
    match requirement.get("operator"):
        case "In":
            return found in values
        case "NotIn":
            return found not in values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case "Gt" | "Lt" as operator:
            try:
                one, other = int(found or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return one > other if operator == "Gt" else one < other
        case _:
            return False


def _are_apart(pod: PodNeeds, other: PodNeeds) -> bool:
    """Return True if the anti-affinity of `pod` excludes `other` from its node."""
    return any(_selects(each, pod.namespace, other) for each in pod.apart)


def _selects(term: Mapping[str, Any], own: str, other: PodNeeds) -> bool:
    """Return True if a term of a pod in the namespace `own` selects `other`.

    The labels of namespaces are unknown here, so a namespace selector is considered only if it selects all
    namespaces.
    """
    selector, namespaces = term.get("labelSelector"), term.get("namespaces") or ()
    if selector is None:
        return False
    is_all = term.get("namespaceSelector") == {}
    if not is_all and other.namespace not in (namespaces or (own,)):
        return False
    return all(
        other.labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items()
    ) and all(_meets(each, other.labels) for each in selector.get("matchExpressions") or ())


def _ports(spec: Mapping[str, Any]) -> Iterator[HostPort]:
    """Yield the ports of the node that a pod uses, with their protocol. The address is not considered."""
    sidecars = (each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always")
    for container in (*(spec.get("containers") or ()), *sidecars):
        for each in container.get("ports") or ():
            if port := each.get("hostPort"):
                yield str(each.get("protocol") or "TCP"), port


def _used(pods: Iterable[PodNeeds]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in pods:
        total.update(each.requests)
    return dict(total)
