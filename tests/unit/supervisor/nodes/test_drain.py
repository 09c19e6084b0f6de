from __future__ import annotations

from typing import Any

import pytest

from supervisor.nodes.drain import MAX_RETRY_S, OtherPod, evictable, prune_pod, retry_s


def pod(name: str = "p", phase: str = "Running", namespace: str = "team", **metadata: Any) -> dict[str, Any]:
    made = {"name": name, "namespace": namespace, "uid": f"uid-{name}", **metadata}
    return {"metadata": made, "spec": {"containers": []}, "status": {"phase": phase}}


def owned(kind: str) -> list[dict[str, Any]]:
    return [{"kind": kind, "name": "x", "controller": True}]


@pytest.mark.parametrize(
    "left_alone",
    [
        pod(phase="Succeeded"),
        pod(phase="Failed"),
        pod(namespace="holdfast-system"),
        pod(deletionTimestamp="2027-01-15T08:00:00Z"),
        pod(annotations={"kubernetes.io/config.mirror": "x"}),
        pod(ownerReferences=owned("DaemonSet")),
        pod(labels={"holdfast.dev/member": "true"}),
    ],
)
def test_pods_that_cannot_or_must_not_be_evicted_are_left_alone(left_alone: dict[str, Any]) -> None:
    assert evictable([left_alone]) == []
    assert evictable([prune_pod(left_alone)]) == []


def test_other_peoples_pods_are_found() -> None:
    pods = [
        pod("a", ownerReferences=owned("ReplicaSet")),
        pod("b", "Pending"),
        pod("c", namespace="kube-system"),
    ]
    assert evictable(map(prune_pod, pods)) == [
        OtherPod("team", "a", "uid-a"),
        OtherPod("team", "b", "uid-b"),
        OtherPod("kube-system", "c", "uid-c"),
    ]
    assert "spec" not in prune_pod(pods[0])


def test_refused_evictions_are_repeated_ever_less_often() -> None:
    waits = [retry_s(failures) for failures in range(1, 100)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (5.0, MAX_RETRY_S)
