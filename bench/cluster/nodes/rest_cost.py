"""What Holdfast's parts cost at rest, according to the CPU times that the kubelets record for containers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bench.cluster.nodes.node_report import RestCost
from bench.harness.console import say
from tests.cluster.apparatus.kubernetes_cluster import NODES, SYSTEM, ClusterUnderTest

READ_S = 30.0  # kubelets read the CPU times every 10 to 15 s
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class CpuTime:
    """The CPU time of a container when its kubelet last read it."""

    at_s: float
    used_s: float


def cpu_times(
    summary: Mapping[str, Any], standbys: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], CpuTime]:
    """Return the CPU times of the containers in a kubelet's summary that are part of Holdfast.

    The key contains the part and the details that distinguish its containers. `standbys` contains the
    namespaces and names of the standby pods.
    """
    there, found = set(standbys), {}
    for pod in summary.get("pods") or ():
        place = (str(pod["podRef"]["namespace"]), str(pod["podRef"]["name"]))
        part = _part(*place, is_standby=place in there)
        for container in (pod.get("containers") or ()) if part else ():
            cpu = container.get("cpu") or {}
            if "usageCoreNanoSeconds" in cpu:
                key = (part, f"{place[1]}/{container['name']}")
                at_s = datetime.fromisoformat(cpu["time"].replace("Z", "+00:00")).timestamp()
                found[key] = CpuTime(at_s, cpu["usageCoreNanoSeconds"] / 1e9)
    return found


def _part(namespace: str, pod: str, *, is_standby: bool) -> str:
    if is_standby:
        return "standbys"
    if namespace == NODES:
        return "node agents"
    if namespace == SYSTEM:
        return "webhooks" if "webhook" in pod else "supervisors"
    return ""


def cores(
    before: Mapping[tuple[str, str], CpuTime], after: Mapping[tuple[str, str], CpuTime]
) -> dict[str, float]:
    """Return the cores that each part uses. Containers without two readings do not count."""
    found: dict[str, float] = {}
    for key, later in after.items():
        earlier = before.get(key)
        if earlier is not None and later.at_s > earlier.at_s:
            share = (later.used_s - earlier.used_s) / (later.at_s - earlier.at_s)
            found[key[0]] = found.get(key[0], 0.0) + share
    return found


def measure(
    cluster: ClusterUnderTest, nodes: Iterable[str], standbys: Iterable[tuple[str, str]], for_s: float
) -> RestCost:
    """Return the cores used over the next `for_s` seconds, or a little longer."""
    there = list(nodes)
    pods = list(standbys)
    before = _read(cluster, there, pods)
    time.sleep(for_s)
    after = _read(cluster, there, pods)
    deadline_s = time.monotonic() + READ_S
    while time.monotonic() < deadline_s and any(after[key] == before.get(key) for key in after):
        time.sleep(RETRY_S)
        after = _read(cluster, there, pods)
    if missing := [name for part, name in after if (part, name) not in before]:
        say(f"not measured, because they have just started: {', '.join(missing)}")
    return RestCost(cores(before, after), len(there))


def _read(
    cluster: ClusterUnderTest, nodes: Iterable[str], standbys: list[tuple[str, str]]
) -> dict[tuple[str, str], CpuTime]:
    found: dict[tuple[str, str], CpuTime] = {}
    for node in nodes:
        found |= cpu_times(cluster.read(f"/api/v1/nodes/{node}/proxy/stats/summary"), standbys)
    return found
