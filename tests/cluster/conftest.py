"""A cluster to test on, what is installed there, and a report of it for a test that fails.

    KUBECONFIG=~/.kube/config HOLDFAST_IMAGE_BUILD="docker build -t" python -m pytest tests/cluster

The tests install Holdfast in the cluster and remove it again. They refuse a cluster in which it is installed.
`HOLDFAST_IMAGE_BUILD` is the command before the tag that builds an image, and loads it on every node.
`HOLDFAST_IMAGES_READY=1` says instead that both images are there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "manifests" / "default"
EXAMPLES = ROOT / "examples" / "kubernetes"
SYSTEM = "holdfast-system"
PROGRAMS = ("holdfast-supervisor", "holdfast-webhook")
IMAGES = {"holdfast:dev": "images/Dockerfile", "holdfast-trainer:dev": "images/Dockerfile.trainer"}
OURS = "holdfast.dev/installed-by-tests"  # annotation: a namespace that an interrupted run may have left

BUILD_S = 1200.0  # of an image: torch is 0.2 GB to download and 0.9 GB to load on each node
READY_S = 180.0  # from `apply` until both programs are ready on a busy machine with two cores
GONE_S = 120.0  # pods have 30 s to end, and the namespace controller comes by every few seconds
REQUEST_S = 60.0  # of kubectl for a request that waits for nothing
TEST_S = 600.0
LOG_LINES = 40

_HOW = (
    "set KUBECONFIG to a cluster on which Holdfast may be installed, and HOLDFAST_IMAGE_BUILD to a command"
    ' that builds and loads an image there, such as "docker build -t", or HOLDFAST_IMAGES_READY=1'
)


class ClusterUnderTest:
    """The cluster of $KUBECONFIG, as kubectl shows it."""

    def kubectl(self, *words: str | Path, text: str | None = None, limit_s: float = REQUEST_S) -> str:
        """Run kubectl with `text` on its input and return its output.

        Raises AssertionError with kubectl's message if it fails.
        """
        done = self.attempt(*words, text=text, limit_s=limit_s)
        assert done.returncode == 0, f"kubectl {shlex.join(map(str, words))}: {done.stderr or done.stdout}"
        return done.stdout

    def attempt(
        self, *words: str | Path, text: str | None = None, limit_s: float = REQUEST_S
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return how it ended. Raises subprocess.TimeoutExpired after `limit_s`."""
        return subprocess.run(
            ["kubectl", *map(str, words)],
            input=text,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            cwd=ROOT,
        )

    def wait(self, condition: str, *words: str, namespace: str, limit_s: float = READY_S) -> None:
        """Return once `kubectl wait --for=condition` has seen it on the objects that `words` name.

        Raises AssertionError with a report of the namespace after `limit_s`.
        """
        flags = (f"--for={condition}", f"--timeout={limit_s:g}s", "--namespace", namespace)
        done = self.attempt("wait", *flags, *words, limit_s=limit_s + REQUEST_S)
        if done.returncode:
            what = f"{' '.join(words)}: no {condition} within {limit_s:g} s: {done.stderr}"
            raise AssertionError(f"{what}\n{self.report(namespace)}")

    def report(self, namespace: str) -> str:
        """Return the pods, events and last log lines of a namespace, or why they cannot be had."""
        there = ("--namespace", namespace)
        logs = ("logs", *there, "--all-containers", "--prefix", f"--tail={LOG_LINES}")
        parts = {
            f"pods of {namespace}": self._seen("get", "pods", *there, "-o", "wide"),
            "events": self._seen("get", "events", *there, "--sort-by=.lastTimestamp"),
        }
        for name in self._seen("get", "pods", *there, "-o", "name").split():
            if name.startswith("pod/"):
                parts[f"log of {name}"] = self._seen(*logs, name)
        return "\n".join(f"-- {title}\n{text}" for title, text in parts.items())

    def _seen(self, *words: str) -> str:
        try:
            done = self.attempt(*words)
        except subprocess.TimeoutExpired as error:
            return str(error)
        return done.stdout + done.stderr


Kubectl = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(TEST_S + BUILD_S))  # the first test also builds the images


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what is in the cluster to the report of a test that failed."""
    report = yield
    found = item.funcargs.get("cluster")
    if report.failed and call.when == "call" and isinstance(found, ClusterUnderTest):
        for namespace in (SYSTEM, item.funcargs.get("namespace")):
            if isinstance(namespace, str):
                report.sections.append((f"cluster: {namespace}", found.report(namespace)))
    return report


@pytest.fixture(scope="session")
def cluster() -> ClusterUnderTest:
    """Give the cluster of $KUBECONFIG, or skip; in CI, fail."""
    missing = _missing()
    if missing:
        end = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        end(f"{missing}: {_HOW}")
    found = ClusterUnderTest()
    found.kubectl("version")
    return found


def _missing() -> str:
    """Return what the tests of a cluster lack; "" if nothing."""
    if not os.environ.get("KUBECONFIG"):
        return "no cluster is given"
    if not os.environ.get("HOLDFAST_IMAGE_BUILD") and os.environ.get("HOLDFAST_IMAGES_READY") != "1":
        return "no images are given"
    return "" if shutil.which("kubectl") else "kubectl is not on PATH"


@pytest.fixture
def kubectl(cluster: ClusterUnderTest) -> Kubectl:
    """Run kubectl and return its output; an error fails the test."""
    return cluster.kubectl


@pytest.fixture
def namespace(cluster: ClusterUnderTest) -> Iterator[str]:
    """Give a new namespace that admits restricted pods only, and delete it."""
    name = f"test-{os.urandom(4).hex()}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    cluster.kubectl("delete", "namespace", name, f"--timeout={GONE_S:g}s", limit_s=GONE_S + REQUEST_S)


@pytest.fixture(scope="session")
def images(cluster: ClusterUnderTest) -> tuple[str, ...]:
    """Build both images and load them on the nodes, and give their tags."""
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
    """Give the cluster with Holdfast installed and ready, and uninstall it at the end of the session."""
    there = cluster.attempt("get", "namespace", SYSTEM, "-o", "jsonpath={.metadata.annotations}")
    if there.returncode == 0 and OURS not in there.stdout:
        pytest.fail(f"this cluster has a namespace {SYSTEM}: the tests would remove what is installed there")
    uninstall(cluster)
    try:
        install(cluster)
        yield cluster
    finally:
        uninstall(cluster)


def install(cluster: ClusterUnderTest) -> None:
    """Install Holdfast and return when it is ready. Raises AssertionError with a report of its namespace."""
    cluster.kubectl("create", "namespace", SYSTEM)
    cluster.kubectl("annotate", "namespace", SYSTEM, f"{OURS}=true")
    cluster.kubectl("apply", "-k", DEFAULT)
    for name in PROGRAMS:
        cluster.wait("condition=Available", f"deployment/{name}", namespace=SYSTEM)


def uninstall(cluster: ClusterUnderTest) -> None:
    """Remove all that `install` has made, and return when it is gone."""
    words = ("delete", "-k", DEFAULT, "--ignore-not-found", f"--timeout={GONE_S:g}s")
    cluster.kubectl(*words, limit_s=GONE_S + REQUEST_S)
