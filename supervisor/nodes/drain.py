"""Choose which pods of other people to evict from a drained node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.admission.pod_layout import MEMBER_LABEL, NAMESPACE

RETRY_S, MAX_RETRY_S = 5.0, 60.0  # the pause after a refused eviction, doubled each time
_MIRROR = "kubernetes.io/config.mirror"  # a pod from the kubelet's own files, which the API cannot evict


@dataclass(frozen=True, slots=True)
class OtherPod:
    """A pod that no job of Holdfast owns."""

    namespace: str
    name: str
    uid: str


def evictable(pods: Iterable[Mapping[str, Any]]) -> list[OtherPod]:
    """Return the pods that an operator may want evicted.

    A DaemonSet would recreate its pod at once, a mirror pod cannot be evicted, and Holdfast's own pods in its
    namespace repair the node. Members of jobs leave in another way: their state is saved first.
    """
    found = []
    for pod in pods:
        metadata = pod["metadata"]
        owners = metadata.get("ownerReferences") or ()
        is_over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if (
            is_over
            or metadata.get("deletionTimestamp")
            or metadata.get("namespace") == NAMESPACE
            or _MIRROR in (metadata.get("annotations") or {})
            or MEMBER_LABEL in (metadata.get("labels") or {})
            or any(each.get("kind") == "DaemonSet" and each.get("controller") for each in owners)
        ):
            continue
        found.append(OtherPod(metadata["namespace"], metadata["name"], metadata["uid"]))
    return found


def prune_pod(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return only what `evictable` reads."""
    kept = ("name", "namespace", "uid", "ownerReferences", "deletionTimestamp", "annotations", "labels")
    metadata = {key: value for key, value in pod["metadata"].items() if key in kept}
    return {"metadata": metadata, "status": {"phase": (pod.get("status") or {}).get("phase")}}


def retry_s(failures: int) -> float:
    """Return how long to wait after this number of refusals in a row."""
    return min(MAX_RETRY_S, RETRY_S * 2.0 ** min(failures - 1, 10))
