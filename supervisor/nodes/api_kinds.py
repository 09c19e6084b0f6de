"""The kinds of objects that the quarantine reads and writes."""

from __future__ import annotations

from supervisor.kubernetes.client import ResourceKind

NODES = ResourceKind("", "v1", "nodes", namespaced=False)
CONFIG_MAPS = ResourceKind("", "v1", "configmaps")
