"""Read the Kubernetes objects in this repository's YAML files, and the pods that they describe."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.unit.literals import ROOT

BASE = ROOT / "manifests" / "base"
OVERLAYS = ROOT / "manifests" / "overlays"
EXAMPLES = ROOT / "examples" / "kubernetes"

Object = dict[str, Any]


@functools.cache
def load(path: Path) -> list[Object]:
    """Return the objects in a file. All tests share them and must not change them."""
    with path.open() as file:
        return [each for each in yaml.safe_load_all(file) if each is not None]


def resources(folder: Path) -> Iterator[Object]:
    """Yield the objects in the files of `folder` that its kustomization lists."""
    for name in load(folder / "kustomization.yaml")[0]["resources"]:
        if (folder / name).is_file():
            yield from load(folder / name)


def installed() -> list[Object]:
    """Return the objects of all files that are applied, including the overlays."""
    folders = (BASE, *(each for each in sorted(OVERLAYS.iterdir()) if each.is_dir()))
    return [each for folder in folders for each in resources(folder)]


def of_kind(kind: str) -> dict[str, Object]:
    """Return the installed objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in installed() if each["kind"] == kind}


def pods(thing: Any) -> Iterator[Object]:
    """Yield the pod templates (and pods) within an object, as mappings with `metadata` and `spec`."""
    if isinstance(thing, list):
        for each in thing:
            yield from pods(each)
    elif isinstance(thing, dict):
        if "containers" in (thing.get("spec") or {}):
            yield thing
        else:
            yield from pods(list(thing.values()))


def containers(pod: Object) -> list[Object]:
    """Return the containers of a pod, the init containers first."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def restricted_violations(pod: Object) -> list[str]:
    """Return the fields of a pod that the Pod Security Standard `restricted` would refuse."""
    spec = pod["spec"]
    of_pod = spec.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [f"volume {each['name']}" for each in spec.get("volumes", []) if "hostPath" in each]
    if of_pod.get("runAsNonRoot") is not True or of_pod.get("runAsUser") == 0:
        found.append("may run as root")
    if of_pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("no seccomp profile")
    for container in containers(pod):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            found.append(f"{container['name']} may gain privileges")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            found.append(f"{container['name']} keeps capabilities")
        if own.get("runAsUser") == 0 or any("hostPort" in each for each in container.get("ports", [])):
            found.append(f"{container['name']} is root or has a port of the host")
    return found
