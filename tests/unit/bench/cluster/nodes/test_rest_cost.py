"""Which containers belong to Holdfast, and what they use."""

from __future__ import annotations

from typing import Any

import pytest

from bench.cluster.nodes.rest_cost import CpuTime, cores, cpu_times


def pod(namespace: str, name: str, used_s: float | None, at: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    cpu = {"time": at} if used_s is None else {"time": at, "usageCoreNanoSeconds": int(used_s * 1e9)}
    return {"podRef": {"namespace": namespace, "name": name}, "containers": [{"name": "c", "cpu": cpu}]}


def test_only_the_containers_of_holdfast_count() -> None:
    pods = [
        pod("holdfast-system", "holdfast-supervisor-x", 1),
        pod("holdfast-system", "holdfast-webhook-x", 2),
        pod("holdfast-nodes", "holdfast-nodeagent-x", 3),
        pod("bench", "gpt-standby-1", 4),
        pod("bench", "gpt-master-0", 5),
        pod("holdfast-system", "holdfast-webhook-new", None),
    ]
    found = cpu_times({"pods": pods}, [("bench", "gpt-standby-1")])
    assert {part: each.used_s for (part, _), each in found.items()} == {
        "supervisors": 1,
        "webhooks": 2,
        "node agents": 3,
        "standbys": 4,
    }
    assert cpu_times({}, []) == {}


def test_each_container_is_measured_between_its_own_readings() -> None:
    before = {("a", "1"): CpuTime(0, 10), ("a", "2"): CpuTime(5, 10), ("b", "3"): CpuTime(0, 0)}
    after = {
        ("a", "1"): CpuTime(10, 11),
        ("a", "2"): CpuTime(25, 12),
        ("b", "3"): CpuTime(0, 0),  # not read again
        ("c", "4"): CpuTime(10, 99),  # started meanwhile
    }
    assert cores(before, after) == {"a": pytest.approx(0.2)}
