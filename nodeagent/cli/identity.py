"""Identifies the node in the report: its name in the cluster, its machine and its instance at a provider."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from nodeagent.sensing import small_files

MACHINE_ID = "etc/machine-id"


def read_machine_id(root: Path | None) -> str:
    """Return the machine id; "" if it cannot be read.

    In a container, `root` is the path where the host's root is mounted, because the container's own machine
    id, if any, is different.
    """
    found = small_files.try_read(str((root or Path("/")) / MACHINE_ID))
    return small_files.parse_text(found) or ""


def of_node(name: str, provider_id: str, machine_id: str) -> Mapping[str, str]:
    """Return the fields of the report that identify the node; unknown ones are "".

    Args:
        name: The name given by the operator; if "", the host name is used (in a container, the pod's name).
        provider_id: As in the cluster's `spec.providerID`.
        machine_id: As read from the host.
    """
    return {"node": name or platform.node(), "machine_id": machine_id, "provider_id": provider_id}
