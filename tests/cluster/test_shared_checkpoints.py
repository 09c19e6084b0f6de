"""The pods of a job on different nodes write a checkpoint together, into a real object storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.cluster.apparatus.bucket import address, saved_steps, secret
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import TrainingJob, example, pods_in
from tests.cluster.test_object_storage import PREFIX, SECRET
from tests.s3server.server import ObjectServer, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SAVED_S = 200.0
# 170 MB of parameters and optimizer: members share a checkpoint from 64 MiB each on.
MODEL = ("--width=768", "--layers=2", "--batch=1", "--accumulate=1", "--context=16")


@pytest.fixture
def server(cluster: ClusterUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with serving(tmp_path_factory.mktemp("s3") / "objects", address(cluster)) as made:
        yield made


def test_two_pods_write_the_parts_of_a_checkpoint_together(
    installed: ClusterUnderTest, namespaces: Namespaces, server: ObjectServer
) -> None:
    annotations = {
        "holdfast.dev/checkpoints": f"s3://checkpoints/{PREFIX}",
        "holdfast.dev/checkpoints-secret": SECRET,
        "holdfast.dev/checkpoint-every": "5s",
        "holdfast.dev/state-size": "200Mi",
    }
    objects = example("statefulset.yaml", "--steps=1000000", *MODEL, annotations=annotations)
    for pod in pods_in(objects):
        pod["spec"]["containers"][0]["resources"] = {
            "requests": {"cpu": "200m", "memory": "1Gi"},
            "limits": {"memory": "3Gi"},
        }
    job = TrainingJob(installed, namespaces.make(), [secret(server, SECRET), *objects])
    job.start()
    job.trains()

    def shared() -> Counter[str] | None:
        """Return how many parts of one published checkpoint each node has sent, once two nodes have."""
        for step in saved_steps(server):
            parts = [each for each in server.requests if f"step-{step:08d}/" in each.key]
            found = Counter(
                each.sender for each in parts if each.method == "PUT" and "replicated" in each.key
            )
            if len(found) == 2:
                return found
        return None

    found: Counter[str] = job.until(shared, "a checkpoint that both pods have written", SAVED_S)
    assert min(found.values()) >= 2, found
    job.trains()
    namespaces.delete(job.namespace)
