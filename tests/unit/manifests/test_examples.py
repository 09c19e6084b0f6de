"""The example jobs: restricted pods, and twins that differ only in what Holdfast replaces."""

from __future__ import annotations

import copy
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.admission import pod_layout
from supervisor.admission.injection import Injected, InjectionContext, inject
from tests.unit.manifests.kubernetes_files import (
    EXAMPLES,
    Object,
    containers,
    load,
    pods,
    restricted_violations,
)

PLAIN = "-plain"
FILES = sorted(EXAMPLES.glob("*.yaml"))
NOT_TORCH = "tfjob"
END_S = 60.0  # the limit for a script of some milliseconds, on a busy machine
SUPERVISED = [path for path in FILES if PLAIN not in path.stem]


def pods_of(path: Path) -> list[Object]:
    found = list(pods(load(path)))
    assert found
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_pod_is_restricted_and_bounded_and_pulls_no_image_that_is_present(path: Path) -> None:
    for pod in pods_of(path):
        assert restricted_violations(pod) == []
        for container in containers(pod):
            assert container["imagePullPolicy"] == "IfNotPresent"
            assert container["image"].endswith(":dev")
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert container["resources"]["limits"].keys() == {"memory"}
            words = (*container.get("command", ()), *container.get("args", ()))
            assert all(isinstance(word, str) for word in words), (
                "Kubernetes does not accept numbers as arguments"
            )


@pytest.mark.parametrize("path", SUPERVISED, ids=lambda path: path.stem)
def test_a_twin_differs_only_in_the_annotations_and_in_what_torchrun_needs(path: Path) -> None:
    twins = [pod for pod in pods_of(path.with_stem(path.stem + PLAIN)) if not serves_rendezvous(pod)]
    for pod, plain in zip(pods_of(path), twins, strict=True):
        annotations = dict(pod["metadata"]["annotations"])
        assert annotations.pop(pod_layout.INJECT) == "true"
        kept = {key: each for key, each in annotations.items() if not key.startswith(pod_layout.PREFIX)}
        assert plain.get("metadata", {}).get("annotations", {}) == kept
        (ours,), (theirs,) = pod["spec"]["containers"], plain["spec"]["containers"]
        for key in ("name", "image", "args", "resources", "securityContext"):
            assert ours[key] == theirs[key]
        for key in ("env", "volumeMounts"):
            assert all(each in theirs[key] for each in ours.get(key, ()))
        assert pod["spec"]["securityContext"] == plain["spec"]["securityContext"]
        for key in ("initContainers", "volumes"):
            others = [each for each in plain["spec"].get(key, ()) if each["name"] != "library"]
            assert pod["spec"].get(key, []) == others


@pytest.mark.parametrize("path", SUPERVISED, ids=lambda path: path.stem)
def test_the_script_is_started_by_python_or_torchrun_and_in_the_twin_by_torchrun(path: Path) -> None:
    (*_, ours), (*_, theirs) = pods_of(path), pods_of(path.with_stem(path.stem + PLAIN))
    command, plain = (each["spec"]["containers"][0]["command"] for each in (ours, theirs))
    if path.stem == NOT_TORCH:
        assert command == plain == ["python", "/scripts/line.py"]
        return
    assert command[-2:] == plain[-2:] == ["-m", "trainer.gpt"]
    assert (command[0] in ("python", "torchrun"), plain[0]) == (True, "torchrun")


@pytest.mark.parametrize("path", SUPERVISED, ids=lambda path: path.stem)
def test_each_pod_is_injected_with_one_rank(path: Path) -> None:
    for pod in pods_of(path):
        found = inject(copy.deepcopy(pod), InjectionContext("holdfast:dev", "0.1.0"))
        assert isinstance(found, Injected)
        assert (found.record.nproc, found.record.container) == (1, pod["spec"]["containers"][0]["name"])


def serves_rendezvous(pod: Object) -> bool:
    """Return True for the pod where the workers of a Deployment find each other."""
    return [each["name"] for each in pod["spec"]["containers"]] == ["store"]


def test_each_kind_of_job_has_a_twin() -> None:
    assert len(SUPERVISED) == 7
    assert {path.stem for path in FILES} == {each.stem + end for each in SUPERVISED for end in ("", PLAIN)}


def test_the_guides_claim_is_bound_to_its_volume_without_a_storage_class() -> None:
    for name in ("pytorchjob-guide", "pytorchjob-guide-plain"):
        volume, claim, _ = load(EXAMPLES / f"{name}.yaml")
        assert (volume["kind"], claim["kind"]) == ("PersistentVolume", "PersistentVolumeClaim")
        for key in ("storageClassName", "accessModes"):
            assert volume["spec"][key] == claim["spec"][key]
        assert volume["spec"]["capacity"] == claim["spec"]["resources"]["requests"]
        for pod in pods_of(EXAMPLES / f"{name}.yaml"):
            assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
            claimed = [each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"]
                       if "persistentVolumeClaim" in each]  # fmt: skip
            assert claimed == [claim["metadata"]["name"]]


@pytest.fixture
def line(tmp_path: Path) -> Path:
    """Return the script of the TFJob, which is the same in its twin."""
    (ours, _), (theirs, _) = (load(EXAMPLES / f"{NOT_TORCH}{end}.yaml") for end in ("", PLAIN))
    assert ours == theirs
    path = tmp_path / "line.py"
    path.write_text(ours["data"]["line.py"])
    return path


def test_the_workers_of_the_tfjob_fit_one_line_and_two_runs_get_the_same(line: Path) -> None:
    texts = []
    for _ in range(2):
        first, second = workers(line, "--steps=200", "--pace=0")
        texts.append(finished(first))
        assert (finished(second), first.returncode, second.returncode) == ("", 0, 0)
    assert texts[0] == texts[1]
    losses = [float(each) for each in re.findall(r"^step +\d+ loss (\S+)$", texts[0], re.MULTILINE)]
    assert len(losses) == 200
    assert losses[-1] < losses[0] / 100
    assert re.search(r"^digest [0-9a-f]{64}$", texts[0], re.MULTILINE)


def test_a_worker_of_the_tfjob_fails_when_the_other_is_killed(line: Path) -> None:
    for victim in (0, 1):
        both = workers(line, "--steps=1000000", "--pace=0.01")
        assert both[0].stdout is not None
        assert both[0].stdout.readline().startswith("step")
        both[victim].kill()
        finished(both[1 - victim])
        assert both[1 - victim].returncode == 1
        finished(both[victim])


def workers(script: Path, *options: str) -> list[subprocess.Popen[str]]:
    """Start both workers as the operator does, on ports of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        addresses = [f"127.0.0.1:{free.getsockname()[1]}", "127.0.0.1:1"]
    found = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        found.append(
            subprocess.Popen(
                [sys.executable, str(script), "--tiny", *options],
                env={"TF_CONFIG": json.dumps(task)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    return found


def finished(worker: subprocess.Popen[str]) -> str:
    """Wait for the end of a worker, and return the rest of its output."""
    try:
        return worker.communicate(timeout=END_S)[0]
    finally:
        worker.kill()


def test_bare_pods_declare_their_group_and_its_size() -> None:
    found = pods_of(EXAMPLES / "bare-pods.yaml")
    for pod in found:
        assert pod["metadata"]["annotations"][pod_layout.MEMBERS] == str(len(found))
    assert len({pod["metadata"]["annotations"][pod_layout.GROUP] for pod in found}) == 1
