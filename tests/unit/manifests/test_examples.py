"""The example jobs: restricted pods, and twins that differ only in what Holdfast replaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.admission import pod_layout
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
            assert all(isinstance(word, str) for word in words), "Kubernetes takes no number for a word"


@pytest.mark.parametrize("path", SUPERVISED, ids=lambda path: path.stem)
def test_a_twin_differs_only_in_the_annotations_and_in_what_torchrun_needs(path: Path) -> None:
    twin = path.with_stem(path.stem + PLAIN)
    for pod, plain in zip(pods_of(path), pods_of(twin), strict=True):
        annotations = pod["metadata"]["annotations"]
        assert annotations[pod_layout.INJECT] == "true"
        assert not any(
            key.startswith(pod_layout.PREFIX) for key in plain.get("metadata", {}).get("annotations", {})
        )
        (ours,), (theirs,) = pod["spec"]["containers"], plain["spec"]["containers"]
        assert ours["command"] == ["python", "-m", "trainer.gpt"]
        assert (theirs["command"][0], theirs["command"][-2:]) == ("torchrun", ["-m", "trainer.gpt"])
        for key in ("name", "image", "args", "resources", "securityContext"):
            assert ours[key] == theirs[key]
        assert all(each in theirs["env"] for each in ours["env"])
        assert pod["spec"]["securityContext"] == plain["spec"]["securityContext"]
        assert "initContainers" not in pod["spec"]


def test_each_kind_of_job_has_a_twin() -> None:
    assert len(SUPERVISED) == 4
    assert {path.stem for path in FILES} == {each.stem + end for each in SUPERVISED for end in ("", PLAIN)}


def test_bare_pods_declare_their_group_and_its_size() -> None:
    found = pods_of(EXAMPLES / "bare-pods.yaml")
    for pod in found:
        assert pod["metadata"]["annotations"][pod_layout.MEMBERS] == str(len(found))
    assert len({pod["metadata"]["annotations"][pod_layout.GROUP] for pod in found}) == 1
