"""A bucket on this machine for the checkpoints of jobs on the cluster."""

from __future__ import annotations

import socket

from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, Json
from tests.s3server.server import ObjectServer, credentials

MANIFEST = "/manifest.json"


def address(cluster: ClusterUnderTest) -> str:
    """Return the address where pods can reach this machine."""
    nodes = cluster.read("/api/v1/nodes")["items"]
    node = next(a["address"] for a in nodes[0]["status"]["addresses"] if a["type"] == "InternalIP")
    with socket.socket(socket.AF_INET6 if ":" in node else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((node, 9))  # connecting a UDP socket sends nothing
        found: str = way.getsockname()[0]
    return found


def secret(server: ObjectServer, name: str) -> Json:
    """Return the Secret with which sidecars use the server."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": credentials(server.url),
    }


def saved_steps(server: ObjectServer) -> list[int]:
    """Return the steps of the published checkpoints, in order."""
    keys = [key for key in server.filled() if key.endswith(MANIFEST)]
    return [int(key.split("/")[-2].removeprefix("step-")) for key in keys]
