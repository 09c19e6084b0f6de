"""Fixtures for a cluster and what is installed in it, and a report of the cluster when a test fails.

    KUBECONFIG=~/.kube/config HOLDFAST_IMAGE_BUILD="docker build -t" make cluster

The tests install Holdfast in the cluster and remove it again. They refuse a cluster in which somebody else
has installed it. Three variables determine where the tested images and installation come from:

`HOLDFAST_IMAGE_BUILD` is a command that, followed by a tag, builds an image and loads it on every node.
`HOLDFAST_IMAGES_READY=1` states instead that both images are already on the nodes.
`HOLDFAST_INSTALLED=1` states that Holdfast is installed. The tests then use it and do not remove it.

`HOLDFAST_API_SERVER_STOP` is a command that stops the process of the API server, so that it keeps its
connections but does not answer. `HOLDFAST_API_SERVER_CONT` continues it. Without these commands, the test of
an outage is skipped.

`HOLDFAST_NODE_CUT`, `HOLDFAST_NODE_HEAL`, `HOLDFAST_NODE_KILL` and `HOLDFAST_NODE_START` are commands that,
followed by the name of a node, disconnect it from the network, connect it again, cut its power, and boot it.
Without them, the tests of lost nodes are skipped.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.cluster.apparatus import kubernetes_cluster
from tests.cluster.apparatus.kubernetes_cluster import (
    PROGRAMS,
    ROOT,
    SYSTEM,
    ClusterUnderTest,
    install,
    uninstall,
)
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.cluster.apparatus.training_job import TrainingJob, example

FOLDERS = (Path(__file__).parent, Path(__file__).parent / "nodes")
IMAGES = {"holdfast:dev": "images/Dockerfile", "holdfast-trainer:dev": "images/Dockerfile.trainer"}
OURS = kubernetes_cluster.OURS

BUILD_S = 1200.0  # to build an image: torch is 0.2 GB to download and 0.9 GB to load on each node
TEST_S = 600.0

# The order of the modules. The demo installs Holdfast itself. The examples train while the tests of security
# run. Nothing can be supervised after Holdfast has been uninstalled.
ORDER = (
    "test_demo",
    "test_commands",
    "test_training",
    "test_security",
    "test_object_storage",
    "test_shared_checkpoints",
    "test_faults",
    "test_missed_pods",
    "test_leaders",
    "test_planned",
    "test_bad_nodes",
    "test_yielding",
    "test_resizing",
    "test_cut_off_members",
    "test_cut_off_leader",
    "test_shared_node",
    "test_outages",
    "test_node_agent",
    "test_lost_nodes",
    "test_lost_hosts",
    "test_install",
)

_HOW = (
    "set KUBECONFIG to a cluster on which Holdfast may be installed, and HOLDFAST_IMAGE_BUILD to a command"
    ' that builds and loads an image there, such as "docker build -t", or HOLDFAST_IMAGES_READY=1'
)

Kubectl = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        item.add_marker(pytest.mark.timeout(TEST_S + BUILD_S))  # the first test also builds the images
    ranks = {name: rank for rank, name in enumerate(ORDER)}
    if unplaced := {item.path.stem for item in ours if item.path.parent in FOLDERS} - set(ORDER):
        raise pytest.UsageError(f"tests/cluster/conftest.py, ORDER: add {', '.join(sorted(unplaced))}")
    ordered = iter(sorted(ours, key=lambda item: ranks.get(item.path.stem, -1)))
    chosen = set(ours)
    items[:] = [next(ordered) if item in chosen else item for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of the cluster to the report of a failed test."""
    report = yield
    found = item.funcargs.get("cluster")
    if report.failed and call.when == "call" and isinstance(found, ClusterUnderTest):
        used = (item.funcargs.get("namespace"), *(getattr(each, "namespace", None) for each in _used(item)))
        for namespace in dict.fromkeys((SYSTEM, *used)):
            if isinstance(namespace, str):
                report.sections.append((f"cluster: {namespace}", found.report(namespace)))
    return report


def _used(item: pytest.Function) -> tuple[object, ...]:
    return tuple(item.funcargs.values())


def refuse(why: str) -> NoReturn:
    """Skip a test for which the cluster lacks something. In CI, fail it instead."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterUnderTest]:
    """Yield the cluster that $KUBECONFIG selects. Skip if there is none; in CI, fail instead."""
    missing = kubernetes_cluster.missing()
    if missing:
        refuse(f"{missing}: {_HOW}")
    found = ClusterUnderTest()
    found.kubectl("version")
    yield found
    found.close()


@pytest.fixture
def kubectl(cluster: ClusterUnderTest) -> Kubectl:
    """Run kubectl and return its output; an error fails the test."""
    return cluster.kubectl


@pytest.fixture(scope="session")
def namespaces(cluster: ClusterUnderTest) -> Iterator[Namespaces]:
    """Create namespaces. At the end of the session, delete them and wait until they are gone."""
    made = Namespaces(cluster)
    yield made
    made.delete_all()


@pytest.fixture
def namespace(namespaces: Namespaces) -> Iterator[str]:
    """Yield a new namespace that admits only restricted pods, and delete it after the test."""
    name = namespaces.make()
    yield name
    namespaces.delete(name)


@pytest.fixture(scope="session")
def node_processes(
    cluster: ClusterUnderTest, namespaces: Namespaces, images: tuple[str, ...]
) -> NodeProcesses:
    """Return an object that signals the processes on nodes from outside their containers."""
    assert images
    return NodeProcesses(cluster, namespaces.make("privileged"))


@pytest.fixture(scope="session")
def images(cluster: ClusterUnderTest) -> tuple[str, ...]:
    """Build both images, load them on the nodes, and return their tags."""
    if os.environ.get("HOLDFAST_IMAGES_READY") != "1":
        build = shlex.split(os.environ["HOLDFAST_IMAGE_BUILD"])
        for tag, file in IMAGES.items():
            done = subprocess.run(
                [*build, tag, "-f", file, "."],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=BUILD_S,
            )
            assert done.returncode == 0, f"{tag} was not built:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return tuple(IMAGES)


@pytest.fixture(scope="session")
def installed(cluster: ClusterUnderTest, images: tuple[str, ...]) -> Iterator[ClusterUnderTest]:
    """Yield the cluster with Holdfast installed and ready, and uninstall it at the end of the session.

    With HOLDFAST_INSTALLED=1, use the existing installation and leave it in place.
    """
    if kubernetes_cluster.is_lent():
        for name in PROGRAMS:
            cluster.wait("condition=Available", f"deployment/{name}", namespace=SYSTEM)
        yield cluster
        return
    there = cluster.attempt("get", "namespace", SYSTEM, "-o", "jsonpath={.metadata.annotations}")
    if there.returncode == 0 and OURS not in there.stdout:
        pytest.fail(
            f"this cluster has a namespace {SYSTEM}: the tests would remove what is installed there"
            " (HOLDFAST_INSTALLED=1 has them use it instead)"
        )
    uninstall(cluster)
    try:
        install(cluster)
        yield cluster
    finally:
        uninstall(cluster)


@pytest.fixture(scope="session")
def job(installed: ClusterUnderTest, namespaces: Namespaces) -> TrainingJob:
    """Return a job of two pods that trains forever. The owner replaces pods and restarts containers."""
    objects = example(
        "statefulset.yaml", "--steps=1000000", "--pace=0.05", annotations={"holdfast.dev/hang-floor": "5s"}
    )
    job = TrainingJob(installed, namespaces.make(), objects)
    job.start()
    job.trains()
    job.supervised_by(0)
    return job
