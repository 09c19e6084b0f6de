"""Say why a pod that requests Holdfast runs without it. Pure.

The webhook can only annotate the pod, and this works only while the webhook responds. Its callers are not
authenticated, so it changes nothing in the cluster. The supervisor reads the pods from the API server, and
records the events about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from supervisor.admission import pod_layout
from supervisor.admission.injection import MAX_NOTED, MAX_WHY, size_of
from supervisor.cluster.adoption import pod_facts

MISSED = (
    f"the pod has the annotation {pod_layout.INJECT} but was created without Holdfast, because the webhook"
    " did not respond or its namespace is excluded: it trains unsupervised until it is recreated"
)
NO_ROOM = (
    f"the pod has the annotation {pod_layout.INJECT} but was created without Holdfast, and its annotations"
    " left no room for the reason: it trains unsupervised until it is recreated"
)


class UninjectedPod(NamedTuple):
    """A pod that requests Holdfast and runs without it. `pod` contains only its identity."""

    pod: Mapping[str, Any]
    why: str


def uninjected(pod: Mapping[str, Any], recent: str) -> UninjectedPod | None:
    """Return why a pod without the members' label is not injected; None if it does not request Holdfast.

    A pod that has ended is ignored if it was created before `recent`, a time in the API server's format. A
    recent pod may have failed before it was ever checked, but an older pod no longer needs to be changed.
    """
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    if annotations.get(pod_layout.INJECT) != "true":
        return None
    has_ended = (pod.get("status") or {}).get("phase") in pod_facts.ENDED_PHASES
    # The API server writes all times in the same format, so they can be compared as strings.
    if has_ended and str(metadata.get("creationTimestamp") or "") < recent:
        return None
    identity = {key: metadata.get(key) for key in ("name", "namespace", "uid")}
    return UninjectedPod({"apiVersion": "v1", "kind": "Pod", "metadata": identity}, _why(annotations))


def was_missed(pod: Mapping[str, Any]) -> bool:
    """Return True if a pod that has not ended requests Holdfast, and the webhook did not respond for it.

    The webhook could have injected it, or written why it did not.
    """
    metadata, annotations = pod["metadata"], pod["metadata"].get("annotations") or {}
    if (pod.get("status") or {}).get("phase") in pod_facts.ENDED_PHASES:
        return False
    if metadata.get("deletionTimestamp") is not None or annotations.get(pod_layout.INJECT) != "true":
        return False
    if pod_layout.MEMBER_LABEL in (metadata.get("labels") or {}) or pod_layout.INJECTED in annotations:
        return False
    return _why(annotations) == MISSED


def _why(annotations: Mapping[str, str]) -> str:
    if stated := annotations.get(pod_layout.NOT_INJECTED):
        return stated[:MAX_WHY]
    needed = size_of(annotations) + len(pod_layout.NOT_INJECTED) + MAX_WHY
    return NO_ROOM if needed > MAX_NOTED else MISSED
