"""Kinds and small objects that the tests create."""

from __future__ import annotations

from typing import Any

from supervisor.kubernetes.client import ResourceKind

NAMESPACES = ResourceKind("", "v1", "namespaces", namespaced=False)
CONFIG_MAPS = ResourceKind("", "v1", "configmaps")
PODS = ResourceKind("", "v1", "pods")
NODES = ResourceKind("", "v1", "nodes", namespaced=False)
SERVICE_ACCOUNTS = ResourceKind("", "v1", "serviceaccounts")


def config_map(namespace: str, name: str, **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {"test": "yes"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def pod(namespace: str, name: str, node: str = "") -> dict[str, Any]:
    """Return a pod that never runs. Its image cannot be pulled and, without `node`, it is not scheduled."""
    container = {"name": "c", "image": "registry.invalid/none:1"}
    spec: dict[str, Any] = {"containers": [container], "terminationGracePeriodSeconds": 0}
    spec.update({"nodeName": node} if node else {"schedulingGates": [{"name": "holdfast.dev/test"}]})
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
