"""Pods for the tests of the injector, and a JSON patch applied as the API server applies it."""

from __future__ import annotations

import copy
from typing import Any

from supervisor.admission import pod_layout
from supervisor.admission.injection import Injected, InjectionContext, Refused, inject

Pod = dict[str, Any]
CONTEXT = InjectionContext(image="holdfast:dev", version="0.1.0", ca="PEM\n", namespace="team")


def container(line: tuple[str, ...] = ("python", "train.py"), **fields: Any) -> Pod:
    return {"name": "main", "image": "trainer", "command": list(line), **fields}


def pod(*containers: Pod, annotations: dict[str, str] | None = None, **spec: Any) -> Pod:
    """Return a pod that opts in to Holdfast. Keys of `annotations` have no prefix."""
    asked = {pod_layout.PREFIX + key: value for key, value in (annotations or {}).items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "train-", "annotations": {pod_layout.INJECT: "true", **asked}},
        "spec": {"containers": list(containers or (container(),)), **spec},
    }


def injected(given: Pod, context: InjectionContext = CONTEXT) -> Injected:
    found = inject(given, context)
    assert isinstance(found, Injected), found
    return found


def refusal(given: Pod, context: InjectionContext = CONTEXT) -> str:
    found = inject(given, context)
    assert isinstance(found, Refused), found
    return found.why


def named(parts: list[Pod], name: str) -> Pod:
    (found,) = [each for each in parts if each["name"] == name]
    return found


def sidecar(given: Pod) -> Pod:
    return named(given["spec"]["initContainers"], pod_layout.SIDECAR)


def variables(of: Pod) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in of["env"]}


def resources(limits: dict[str, Any] | None = None, requests: dict[str, Any] | None = None) -> Pod:
    given = {"limits": limits, "requests": requests}
    return {kind: amounts for kind, amounts in given.items() if amounts is not None}


def patched(before: Any, patch: list[dict[str, Any]]) -> Any:
    """Return `before` after the operations of a JSON patch (RFC 6902)."""
    document = {"": copy.deepcopy(before)}
    for each in patch:
        *way, last = [
            "",
            *(part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")[1:]),
        ]
        holder: Any = document
        for part in way:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        key = int(last) if isinstance(holder, list) else last
        if each["op"] == "remove":
            del holder[key]
        elif each["op"] == "add" and isinstance(holder, list):
            assert 0 <= int(key) <= len(holder)
            holder.insert(int(key), copy.deepcopy(each["value"]))
        else:
            assert each["op"] == "add" or isinstance(holder, list) or key in holder
            holder[key] = copy.deepcopy(each["value"])
    return document[""]
