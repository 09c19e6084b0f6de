"""Read which pods of the cluster have no node yet, and what they lack. Pure.

A mirror of only these pods costs little, because a pod is in it only until it is scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.admission.pod_layout import STANDBY_OF
from supervisor.cluster.standbys.node_fit import PodNeeds, read_pod_needs
from supervisor.kubernetes.client import KubernetesObject

SELECTOR = "spec.nodeName=,status.phase=Pending"  # the field selector of these pods
# How long a pod must wait before a standby yields. The scheduler takes a moment to preempt other pods, or to
# try again after a change.
SCHEDULER_S = 1.0
# How long a waiting pod keeps standbys off the nodes on which it fits. If it is not scheduled there by then,
# something that `node_fit` does not consider keeps it away.
HOLD_S = 60.0
# The scheduler's messages about a lack of resources, and about the limit on the number of a node's pods:
# https://github.com/kubernetes/kubernetes/blob/master/pkg/scheduler/framework/plugins/noderesources/fit.go
_LACKS = ("Insufficient ", "Too many pods")
TAKEN = (*_LACKS, "anti-affinity")  # these messages, and the one about pods that must not be on the same node
_WAITING = "waiting"  # the field of a mirrored object


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A pod without a node."""

    needs: PodNeeds
    is_standby: bool
    is_gated: bool  # the scheduler does not consider it yet
    why: str  # why the scheduler found no node; "" if it has not tried yet
    nominated: str  # the node on which the scheduler makes room for it; "" for none

    @property
    def lacks_room(self) -> bool:
        """True if the scheduler found no node for lack of resources, and is not making room itself."""
        is_for_room = any(each in self.why for each in _LACKS)
        return is_for_room and not (self.nominated or self.is_standby or self.is_gated)


def kept(pod: KubernetesObject) -> KubernetesObject:
    """Return what a mirror keeps of a pod without a node."""
    metadata = pod["metadata"]
    kept_metadata = {key: metadata.get(key) for key in ("namespace", "name", "uid", "resourceVersion")}
    return {"metadata": kept_metadata, _WAITING: _read(pod)}


def found_in(mirrored: Iterable[KubernetesObject]) -> list[WaitingPod]:
    return [each[_WAITING] for each in mirrored]


def by_importance(pods: Iterable[WaitingPod]) -> list[WaitingPod]:
    """Return the pods in the scheduler's order, as far as the order depends on the pods."""
    return sorted(pods, key=lambda each: (-each.needs.priority, each.needs.place))


def _read(pod: KubernetesObject) -> WaitingPod:
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    condition = _scheduled(status)
    reason = condition.get("reason") if condition.get("status") == "False" else ""
    return WaitingPod(
        read_pod_needs(pod),
        STANDBY_OF in (metadata.get("labels") or {}),
        bool(spec.get("schedulingGates")) or metadata.get("deletionTimestamp") is not None,
        _why(spec, str(reason or ""), str(condition.get("message") or "")),
        str(status.get("nominatedNodeName") or ""),
    )


def _scheduled(status: Mapping[str, Any]) -> Mapping[str, Any]:
    conditions: list[Mapping[str, Any]] = status.get("conditions") or []
    return next((each for each in conditions if each.get("type") == "PodScheduled"), {})


def _why(spec: Mapping[str, Any], reason: str, message: str) -> str:
    if gates := [str(each.get("name")) for each in spec.get("schedulingGates") or ()]:
        return f"the scheduling gate {', '.join(gates)} has not been removed"
    return message or reason if reason else ""
