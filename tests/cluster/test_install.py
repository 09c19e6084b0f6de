"""One command installs Holdfast, and another one removes it and leaves nothing behind."""

from __future__ import annotations

import json

import pytest

from tests.cluster.apparatus.kubernetes_cluster import (
    DEFAULT,
    EXAMPLES,
    NODES,
    PROGRAMS,
    ROOT,
    SYSTEM,
    ClusterUnderTest,
    install,
    is_lent,
    uninstall,
)
from tests.cluster.apparatus.training_job import TrainingJob
from tests.cluster.conftest import Kubectl

KINDS = (
    "namespaces,customresourcedefinitions,mutatingwebhookconfigurations,validatingwebhookconfigurations,"
    "clusterroles,clusterrolebindings,priorityclasses,"
    "validatingadmissionpolicies,validatingadmissionpolicybindings"
)
OF_OPERATORS = ("pytorchjob", "tfjob")  # objects of an operator that a cluster may lack
LIBRARY = """
apiVersion: v1
kind: Pod
metadata: {name: library}
spec:
  restartPolicy: Never
  securityContext: {runAsNonRoot: true, runAsUser: 4321, seccompProfile: {type: RuntimeDefault}}
  volumes: [{name: code, emptyDir: {}}]
  initContainers:
  - name: setup
    image: holdfast:dev
    imagePullPolicy: IfNotPresent
    args: [holdfast, install-runtime, /opt/holdfast]
    volumeMounts: [{name: code, mountPath: /opt/holdfast}]
    securityContext: &restricted
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
  - name: again
    image: holdfast:dev
    imagePullPolicy: IfNotPresent
    args: [holdfast, install-runtime, /opt/holdfast]
    volumeMounts: [{name: code, mountPath: /opt/holdfast}]
    securityContext: *restricted
  containers:
  - name: train
    image: holdfast-trainer:dev
    imagePullPolicy: IfNotPresent
    command: [sh, -ec]
    args: ["python -c 'import holdfast; print(holdfast.__file__)'; /opt/holdfast/bin/py-spy --version"]
    env: [{name: PYTHONPATH, value: /opt/holdfast/lib}]
    volumeMounts: [{name: code, mountPath: /opt/holdfast}]
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
"""


def of_ours(cluster: ClusterUnderTest) -> set[str]:
    """Return the names of all cluster-wide objects that are ours."""
    names = cluster.kubectl("get", KINDS, "-o", "name").split()
    return {name for name in names if "holdfast" in name}


def test_the_installed_programs_become_ready_without_a_restart(installed: ClusterUnderTest) -> None:
    namespaces = (SYSTEM, NODES)
    pods = [
        each
        for name in namespaces
        for each in json.loads(installed.kubectl("get", "pods", "-n", name, "-o", "json"))["items"]
    ]
    statuses = [each["status"]["containerStatuses"][0] for each in pods]
    assert len(statuses) > len(PROGRAMS)
    assert [each["ready"] for each in statuses] == [True] * len(pods), installed.report(SYSTEM)
    assert [each["restartCount"] for each in statuses] == [0] * len(pods), installed.report(SYSTEM)


def test_the_api_server_trusts_the_webhook(installed: ClusterUnderTest) -> None:
    path = "jsonpath={.webhooks[0].clientConfig.caBundle}"
    assert installed.kubectl("get", "mutatingwebhookconfiguration", "holdfast-webhook", "-o", path)


def test_applying_the_manifests_again_changes_nothing(installed: ClusterUnderTest) -> None:
    done = installed.attempt("diff", "-k", DEFAULT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["high-availability", "kernel-log"])
def test_the_api_server_accepts_an_overlay(name: str, installed: ClusterUnderTest) -> None:
    overlay = ROOT / "manifests" / "overlays" / name
    assert "(server dry run)" in installed.kubectl("apply", "--dry-run=server", "-k", overlay)


def test_the_api_server_accepts_the_examples(namespace: str, kubectl: Kubectl) -> None:
    """The namespace refuses pods that are not restricted."""
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if not path.name.startswith(OF_OPERATORS):
            printed = kubectl("apply", "--dry-run=server", "-n", namespace, "-f", path)
            assert "(server dry run)" in printed, path.name


def test_any_user_installs_the_runtime_and_a_foreign_image_imports_it(
    cluster: ClusterUnderTest, images: tuple[str, ...], namespace: str
) -> None:
    assert images
    cluster.kubectl("apply", "-n", namespace, "-f", "-", text=LIBRARY)
    cluster.wait("jsonpath={.status.phase}=Succeeded", "pod/library", namespace=namespace)
    printed = cluster.kubectl("logs", "-n", namespace, "library", "-c", "train")
    assert printed.startswith("/opt/holdfast/lib/holdfast/__init__.py\npy-spy ")


def test_uninstalling_leaves_nothing_and_running_jobs_train_on(
    installed: ClusterUnderTest, job: TrainingJob
) -> None:
    if is_lent():
        pytest.skip("HOLDFAST_INSTALLED=1: others use what is installed")
    assert of_ours(installed) != set()
    before = job.observe()
    try:
        uninstall(installed)
        assert of_ours(installed) == set()
        nodes = installed.kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.conditions[*].type}")
        assert not {"GpuHealthy", "TrainingNodeHealthy"} & set(nodes.split())
        job.reaches(job.step() + 100)
        after = job.observe()
        assert (after.pods, after.restarts) == (before.pods, before.restarts)
    finally:
        install(installed)  # for the tests after this one
