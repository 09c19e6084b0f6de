"""Namespaces for tests, which are deleted while other tests run."""

from __future__ import annotations

import os

from tests.cluster.apparatus.kubernetes_cluster import GONE_S, REQUEST_S, ClusterUnderTest

_LEVEL = "pod-security.kubernetes.io/enforce"


class Namespaces:
    """The namespaces that one session has created."""

    def __init__(self, cluster: ClusterUnderTest) -> None:
        self._cluster = cluster
        self._made: list[str] = []

    def make(self, level: str = "restricted", **labels: str) -> str:
        """Return a new namespace that enforces this level of pod security."""
        name = f"test-{os.urandom(4).hex()}"
        self._cluster.kubectl("create", "namespace", name)
        self._made.append(name)
        given = [f"holdfast.dev/{key}={value}" for key, value in labels.items()]
        self._cluster.kubectl("label", "namespace", name, f"{_LEVEL}={level}", *given)
        return name

    def delete(self, name: str) -> None:
        """Begin to delete a namespace."""
        self._cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def delete_all(self) -> None:
        """Delete all namespaces and return once they are gone. Raises AssertionError after `GONE_S`."""
        if not self._made:
            return
        words = ("delete", "namespace", *self._made, "--ignore-not-found", f"--timeout={GONE_S:g}s")
        self._cluster.kubectl(*words, limit_s=GONE_S + REQUEST_S)
