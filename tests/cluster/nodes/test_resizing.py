"""A job whose lost pod cannot be replaced for a while continues with fewer members, and grows back later.

Its pods need a label that the test removes from all nodes, so that the owner's new pod has to wait.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, Json
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import TrainingJob, example, pods_in

LABEL = "holdfast.dev/test-resizing"
MEMBERS, SAMPLES, EPOCHS = 3, 4800, 2
GROUP_S = 90.0
SCRIPT = f"""
import time, torch, holdfast
class Numbers:
    def __len__(self):
        return {SAMPLES}
    def __getitem__(self, index):
        return torch.full((8,), index / {SAMPLES})
torch.manual_seed(0)
module = torch.nn.Linear(8, 4)
session = holdfast.join()
model = torch.nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.AdamW(model.parameters())
state = session.protect(model=model, optimizer=optimizer)
batches = holdfast.Batches(Numbers(), 2, session, state)
@session.on_resize
def adapt(old, new):
    print("adapted from", old, "to", new, flush=True)
for step, batch in batches.steps(batches.first_step({EPOCHS})):
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state.commit(loss=loss, position=batches.position(step))
    if session.rank == 0:
        print("step", step, "loss", float(loss), flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def nodes(installed: ClusterUnderTest) -> Iterator[list[str]]:
    """Yield the names of the nodes, which have the label during the test."""
    names = [each["metadata"]["name"] for each in installed.read("/api/v1/nodes")["items"]]
    installed.kubectl("label", "--overwrite", "node", *names, f"{LABEL}=yes")
    yield names
    installed.kubectl("label", "node", *names, f"{LABEL}-")


def job_of_three() -> list[Json]:
    found = example("job.yaml", annotations={"holdfast.dev/min-members": "2"})
    found[-1]["spec"] |= {"completions": MEMBERS, "parallelism": MEMBERS}
    [pod] = pods_in(found)
    pod["spec"] |= {
        "nodeSelector": {LABEL: "yes"},
        "volumes": [{"name": "script", "configMap": {"name": "script"}}],
    }
    container = pod["spec"]["containers"][0]
    container |= {
        "command": ["python", "/script/train.py"],
        "args": [],
        "volumeMounts": [{"name": "script", "mountPath": "/script"}],
    }
    script = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "script"},
        "data": {"train.py": SCRIPT},
    }
    return [script, *found]


def test_a_job_without_a_node_for_its_new_pod_goes_on_smaller_and_grows_back(
    installed: ClusterUnderTest, namespaces: Namespaces, nodes: list[str]
) -> None:
    job = TrainingJob(installed, namespaces.make("baseline"), job_of_three())
    job.start()
    job.trains()

    def group_of(members: int) -> bool | None:
        view = job.view()
        whole = view.get("group") == {"members": members, "of": MEMBERS} and view.get("rate")
        return True if whole else None

    job.until(lambda: group_of(3), "three members train", GROUP_S)
    survivor = job.rank_pod(0)
    job.follow(survivor)
    installed.kubectl("label", "node", *nodes, f"{LABEL}-")
    lost = job.rank_pod(1)
    installed.kubectl("delete", "pod", "-n", job.namespace, lost, "--grace-period=0", "--force")
    job.until(lambda: group_of(2), "two members train", GROUP_S)
    installed.kubectl("label", "--overwrite", "node", *nodes, f"{LABEL}=yes")
    job.until(lambda: group_of(3), "three members train again", GROUP_S)

    def closed() -> list[Json] | None:
        found: list[Json] = job.status()["recent"][-2:]
        return None if any(each["open"] for each in found) else found

    shrunk, grown = job.until(closed, "both incidents are over", GROUP_S)
    for each in (shrunk, grown):
        print(f"{each['why']}: without training for {each['recovered_s']:.2f} s")  # noqa: T201
    assert (shrunk["kind"], shrunk["world_size"]) == ("member_lost", {"before": 3, "after": 2})
    assert shrunk["lost_steps"] <= 1
    assert (grown["kind"], grown["world_size"], grown["lost_steps"]) == (
        "growth",
        {"before": 2, "after": 3},
        0,
    )
    job.until(lambda: job.owner().get("succeeded") == MEMBERS or None, "the Job has succeeded", GROUP_S)
    steps = job.followed_steps()
    job.unfollow()
    assert sorted(set(steps)) == list(range(steps[0], steps[-1] + 1)), "a step is missing"
    assert len(steps) - len(set(steps)) <= 1
