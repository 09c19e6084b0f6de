"""Members on one node are lost together. At most one step is lost, because their state is also elsewhere.

The pods have no owner, so the test can put each pod on any node. A forced deletion of all of them at once has
the same effect as losing their node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, Json
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import RECOVERED_S, START_S, TrainingJob, example
from tests.cluster.conftest import refuse


@pytest.fixture
def nodes(installed: ClusterUnderTest) -> tuple[str, str]:
    """Return two nodes that are ready."""
    found = [
        str(node["metadata"]["name"])
        for node in installed.read("/api/v1/nodes")["items"]
        for condition in node["status"]["conditions"]
        if (condition["type"], condition["status"]) == ("Ready", "True")
    ]
    if len(found) < 2:
        refuse("this test needs two nodes that are ready")
    return found[0], found[1]


class PlacedPods:
    """A job whose pods are created one by one, each on a given node."""

    def __init__(self, cluster: ClusterUnderTest, namespace: str, members: int) -> None:
        settings = {"holdfast.dev/members": str(members)}
        [self._pod, *_] = example("bare-pods.yaml", "--steps=1000000", "--pace=0.05", annotations=settings)
        self.job = TrainingJob(cluster, namespace, [self._pod])
        self._cluster, self._namespace = cluster, namespace

    def add(self, number: int, node: str) -> None:
        pod = json.loads(json.dumps(self._pod))
        pod["metadata"]["name"] = f"gpt-{number}"
        pod["spec"]["nodeName"] = node
        self._cluster.kubectl("create", "-n", self._namespace, "-f", "-", text=json.dumps(pod))

    def lose(self, *numbers: int) -> None:
        pods = (f"gpt-{number}" for number in numbers)
        self._cluster.kubectl("delete", "pod", *pods, "-n", self._namespace, "--grace-period=0", "--force")

    def has_standbys(self, count: int) -> None:
        """Wait until `count` standbys are warm."""

        def look() -> bool | None:
            members = self.job.view().get("members", ())
            warm = [each for each in members if each["role"] == "standby" and each["parked"]]
            return True if len(warm) == count else None

        self.job.until(look, f"{count} standbys are warm", START_S)

    def recovered(self, generation: int) -> list[Json]:
        """Wait until a later generation trains, and return the records of the incidents, which are closed."""

        def look() -> list[Json] | None:
            status = self.job.status()
            recent: list[Json] = status.get("recent") or []
            if status.get("generation", 0) <= generation or any(each["open"] for each in recent):
                return None
            return recent if self.job.view().get("phase") == "running" and recent else None

        found: list[Json] = self.job.until(look, f"a generation after {generation} trains", RECOVERED_S)
        self.job.trains(RECOVERED_S)
        return found


@pytest.fixture
def namespace_of_job(namespaces: Namespaces) -> Iterator[str]:
    name = namespaces.make()
    yield name
    namespaces.delete(name)


def test_losing_most_members_of_a_group_with_their_node_costs_at_most_one_step(
    installed: ClusterUnderTest, nodes: tuple[str, str], namespace_of_job: str
) -> None:
    """Members 0 and 1 would keep each other's private states if their node made no difference."""
    pods = PlacedPods(installed, namespace_of_job, members=3)
    for number, node in enumerate((nodes[0], nodes[0], nodes[1])):
        pods.add(number, node)
    pods.job.trains()
    for number in (3, 4):
        pods.add(number, nodes[1])
    pods.has_standbys(2)
    pods.job.trains()
    before = pods.job.observe()
    pods.lose(0, 1)
    incidents = pods.recovered(before.generation)
    assert [each["lost_steps"] in (0, 1) for each in incidents] == [True] * len(incidents), incidents
    assert {each["remedy"] for each in incidents} == {"swap"}


def test_a_job_of_one_member_resumes_from_the_copy_on_its_standby(
    installed: ClusterUnderTest, nodes: tuple[str, str], namespace_of_job: str
) -> None:
    """The job has no storage, so without the copy all steps would be lost."""
    pods = PlacedPods(installed, namespace_of_job, members=1)
    pods.add(0, nodes[0])
    pods.job.trains()
    assert pods.job.view().get("secured_step") == 0
    pods.add(1, nodes[1])

    def copied() -> int | None:
        return pods.job.view().get("secured_step") or None

    secured = pods.job.until(copied, "the standby has a copy of the state", START_S)
    before = pods.job.observe()
    pods.lose(0)
    [incident] = pods.recovered(before.generation)
    assert incident["remedy"] == "swap"
    assert incident["resume"]["step"] >= secured, incident
