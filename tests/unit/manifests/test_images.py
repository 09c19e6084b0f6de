"""The images are pinned, run without privileges, and are built only from files that .dockerignore allows."""

from __future__ import annotations

import re
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.literals import ROOT
from tests.unit.manifests.kubernetes_files import containers, of_kind, pods

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

IMAGES = ROOT / "images"
DOCKERFILES = (IMAGES / "Dockerfile", IMAGES / "Dockerfile.trainer")


def pins() -> dict[str, str]:
    lines = (IMAGES / "requirements.txt").read_text().split()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_every_dependency_of_the_clusters_programs_is_pinned_to_a_compatible_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cluster"], *extras["objects"]]
    found = pins()
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"}):
            version = found.get(canonicalize_name(requirement.name), "")
            assert version, requirement.name
            assert requirement.specifier.contains(version), (requirement.name, version)
    assert "torch" not in found
    assert all(found.values()), "a line does not pin a version"


def test_the_images_run_without_privileges_as_the_users_that_the_manifests_name() -> None:
    users = [re.findall(r"^USER (\d+):(\d+)$", path.read_text(), re.MULTILINE)[-1] for path in DOCKERFILES]
    (pod,) = pods(of_kind("Deployment")["holdfast-supervisor"])
    assert users[0] == (str(pod["spec"]["securityContext"]["runAsUser"]),) * 2
    assert users[1] == ("1000", "1000")
    assert containers(pod)[0]["args"][0] == "holdfast", "the images have no entry point"
    assert not any("ENTRYPOINT" in path.read_text() for path in DOCKERFILES)


def test_every_copied_path_is_allowed_by_dockerignore() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    for path in DOCKERFILES:
        for words in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.MULTILINE):
            for source in words.split()[:-1]:
                assert source.split("/")[0] in allowed, source
                assert (ROOT / source).exists(), source


def test_the_trainers_image_has_the_torch_that_the_tests_run_on_and_no_holdfast() -> None:
    text = DOCKERFILES[1].read_text()
    (torch,) = re.findall(r"torch==[\d.]+", (ROOT / "Makefile").read_text())
    assert torch in text
    assert not re.search(r"^(COPY|RUN) .*\bholdfast\b", text, re.MULTILINE)
