"""Identifies the node in the report: its name in the cluster, its machine and its instance at a provider."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from nodeagent.sensing import small_files

MACHINE_ID = "etc/machine-id"


def of_node(name: str, provider_id: str, root: Path | None) -> Mapping[str, str]:
    """Return the fields of the report that identify the node; "" for what is unknown.

    Args:
        name: The name given by the operator; "" for the host name, which in a container is the pod's.
        provider_id: As in the cluster's `spec.providerID`.
        root: In a container, the path where the host's root is mounted, because the container's own machine
        id, if any, is different.
    """
    machine_id = small_files.parse_text(small_files.try_read(str((root or Path("/")) / MACHINE_ID)))
    return {"node": name or platform.node(), "machine_id": machine_id or "", "provider_id": provider_id}
