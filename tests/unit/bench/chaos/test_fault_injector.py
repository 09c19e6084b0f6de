"""What a fault of a chaos run has really done."""

from __future__ import annotations

from typing import Any

from bench.chaos.fault_injector import missed_pods, pods_that_stay
from supervisor.admission import pod_layout


def pod(name: str, *, owner: str = "", phase: str = "Running", leaves: bool = False) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if owner:
        metadata["ownerReferences"] = [{"kind": owner}]
    if leaves:
        metadata["deletionTimestamp"] = "2026-11-26T18:07:40Z"
    return {"metadata": metadata, "status": {"phase": phase}}


def test_a_drain_has_evicted_the_pods_that_are_still_listed_while_they_end() -> None:
    gone = [
        pod("agent", owner="DaemonSet"),
        pod("gpt-1-kbc5g", owner="Job", leaves=True),  # it has a finalizer of its Job
        pod("done", owner="Job", phase="Succeeded"),
    ]
    assert pods_that_stay(gone) == []
    stays = [pod("web", owner="ReplicaSet"), pod("bare", phase="Pending")]
    assert pods_that_stay([*gone, *stays]) == ["web", "bare"]


def test_the_webhook_has_missed_a_pod_of_an_owner_that_it_has_not_annotated() -> None:
    injected, standby = pod("gpt-0", owner="StatefulSet"), pod("gpt-standby-1", owner="Supervision")
    injected["metadata"]["annotations"] = {pod_layout.INJECTED: "{}"}
    assert missed_pods([injected, standby, pod("bare")]) == []
    missed = pod("gpt-1", owner="StatefulSet")
    missed["metadata"]["annotations"] = {pod_layout.INJECT: "true"}
    assert missed_pods([injected, missed, pod("gpt-1-kbc5g", owner="Job")]) == ["gpt-1", "gpt-1-kbc5g"]
