"""A pod requests of a node what the scheduler counts."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.cluster.standbys.pod_requests import requests_of


def container(name: str = "c", restart: str = "", **requests: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "resources": {"requests": requests}}
    return {**found, "restartPolicy": restart} if restart else found


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"containers": [container()]}, {}),
        ({"containers": [container(cpu="1500m", memory="1Gi")]}, {"cpu": 1500, "memory": 1 << 30}),
        ({"containers": [container(cpu="1"), container("d", cpu="0.5")]}, {"cpu": 1500}),
        (
            {"containers": [container(cpu="1")], "initContainers": [container("i", cpu="3")]},
            {"cpu": 3000},  # the init container ends before the others start
        ),
        (
            {
                "containers": [container(cpu="1")],
                "initContainers": [container("s", "Always", cpu="1"), container("i", cpu="2")],
            },
            {"cpu": 3000},  # the sidecar runs beside the init container
        ),
        (
            {
                "containers": [container(cpu="2")],
                "initContainers": [container("i", cpu="2"), container("s", "Always", cpu="1")],
            },
            {"cpu": 3000},  # the sidecar starts only after the init container
        ),
        (
            {"containers": [container(cpu="1", memory="1")], "overhead": {"cpu": "250m"}},
            {"cpu": 1250, "memory": 1},
        ),
        (
            {
                "containers": [container(cpu="1", **{"nvidia.com/gpu": "2"})],
                "resources": {"requests": {"cpu": "4"}},
            },
            {"cpu": 4000, "nvidia.com/gpu": 2},
        ),
    ],
)
def test_requests_are_counted_as_the_scheduler_counts_them(
    spec: dict[str, Any], expected: dict[str, int]
) -> None:
    assert requests_of({"spec": spec}) == {**expected, "pods": 1}


def test_a_container_that_is_being_shrunk_still_counts_with_what_it_has() -> None:
    pod = {
        "spec": {"containers": [container(cpu="1")]},
        "status": {"containerStatuses": [{"name": "c", "allocatedResources": {"cpu": "2"}}]},
    }
    assert requests_of(pod) == {"cpu": 2000, "pods": 1}


def test_a_quantity_of_an_unknown_form_counts_as_nothing() -> None:
    assert requests_of({"spec": {"containers": [container(cpu="many", memory="1")]}}) == {
        "cpu": 0,
        "memory": 1,
        "pods": 1,
    }
