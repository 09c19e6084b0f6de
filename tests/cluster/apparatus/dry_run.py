"""End the quarantine's dry run for a while; after an installation, it lasts for an hour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.apparatus.kubernetes_cluster import SYSTEM, ClusterUnderTest

SETTINGS = "holdfast-quarantine"  # the quarantine's ConfigMap


def has_settings(cluster: ClusterUnderTest) -> bool:
    """Return True if an operator has configured the quarantine."""
    return bool(cluster.read(f"/api/v1/namespaces/{SYSTEM}/configmaps/{SETTINGS}"))


@contextmanager
def without_dry_run(cluster: ClusterUnderTest) -> Iterator[None]:
    """Run the block while the supervisor acts instead of announcing. There must be no settings yet."""
    there = ("configmap", SETTINGS, "-n", SYSTEM)
    cluster.kubectl("create", *there, "--from-literal=dry-run=false")
    try:
        yield
    finally:
        cluster.attempt("delete", *there, "--ignore-not-found")
