"""Take the webhook away for a while, as an upgrade that fails or a lost node would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.apparatus.kubernetes_cluster import READY_S, SYSTEM, WEBHOOK, ClusterUnderTest


@contextmanager
def absent_webhook(cluster: ClusterUnderTest) -> Iterator[None]:
    """Run the block while no webhook responds. On exit, return once all of its pods are ready again."""
    there = ("-n", SYSTEM, f"deployment/{WEBHOOK}")
    replicas = cluster.kubectl("get", *there, "-o", "jsonpath={.spec.replicas}")
    cluster.kubectl("scale", *there, "--replicas=0")
    try:
        cluster.until(lambda: is_away(cluster), "the webhook is away", SYSTEM, READY_S)
        yield
    finally:
        cluster.kubectl("scale", *there, f"--replicas={replicas}")
        cluster.kubectl("rollout", "status", *there, limit_s=READY_S)


def is_away(cluster: ClusterUnderTest) -> bool | None:
    """Return True once the API server has no address left to send a pod to."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM}/endpointslices"
    found = cluster.read(f"{path}?labelSelector=kubernetes.io/service-name={WEBHOOK}")["items"]
    return None if any(each.get("endpoints") for each in found) else True
