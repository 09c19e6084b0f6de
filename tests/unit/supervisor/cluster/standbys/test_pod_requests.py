"""A pod requests of a node what the scheduler counts."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.cluster.standbys.pod_requests import in_words, requests_of


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


def test_amounts_are_shown_in_the_units_of_users() -> None:
    assert (in_words("cpu", 1500), in_words("nvidia.com/gpu", 2)) == ("1.5 cpu", "2 nvidia.com/gpu")
