"""Every injection is repeatable, loses nothing, keeps the pod's class, and gives a patch that fits."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol import environment
from supervisor.admission import pod_layout
from supervisor.admission.injection import Injected, NotAsked, Refused, inject, json_patch
from supervisor.admission.resources import quantity
from tests.unit.supervisor.admission.pods import CONTEXT, Pod, patched

NAMES = st.sampled_from(["main", "pytorch", "istio-proxy", "logs", "web", "holdfast-sidecar"])
COMMANDS = st.sampled_from(
    [
        ["python", "x.py"], ["torchrun", "--nproc-per-node=2", "x"],
        ["torchrun", "--nproc-per-node=gpu", "-m", "x"],
        ["bash", "-c", "set -e; cd /a && torchrun --nnodes=2 x.py --b $C"], ["sh", "-c", "python x | tee y"],
        ["env", "A=b", "python3", "-m", "pkg"], ["accelerate", "launch", "--mixed_precision=bf16", "x.py"],
        ["./start"], None,
    ]
)  # fmt: skip
AMOUNTS = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from(["1", "1000m", 2, "0"]),
        "memory": st.sampled_from(["1Gi", "1024Mi", "64Gi"]),
        "ephemeral-storage": st.just("1Gi"),
        "nvidia.com/gpu": st.sampled_from([1, "8"]),
    },
)
RESOURCES = st.one_of(
    st.fixed_dictionaries({}, optional={"limits": AMOUNTS, "requests": AMOUNTS}),
    st.just({"limits": {"cpu": "2", "memory": "8Gi"}, "requests": {"cpu": "2000m", "memory": "8192Mi"}}),
)
VARIABLES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"name": st.sampled_from(["A", environment.LOGS]), "value": st.just("v")}),
        st.just({"name": "PET_NNODES", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}),
    ),
    max_size=2,
    unique_by=lambda each: str(each["name"]),
)
SECURITY = st.fixed_dictionaries(
    {},
    optional={
        "runAsUser": st.sampled_from([0, 1000]), "runAsGroup": st.just(3), "runAsNonRoot": st.booleans(),
        "fsGroup": st.just(4),
    },
)  # fmt: skip
CONTAINERS = st.fixed_dictionaries(
    {"name": NAMES, "image": st.just("i")},
    optional={
        "command": COMMANDS,
        "args": st.sampled_from([["--lr", "$(LR)"], []]),
        "env": VARIABLES,
        "resources": RESOURCES,
        "securityContext": SECURITY,
        "volumeMounts": st.just([{"name": "data", "mountPath": "/data"}]),
        "restartPolicyRules": st.just([{"action": "Restart"}]),
    },
)
TOLERATIONS = st.lists(
    st.fixed_dictionaries(
        {"key": st.sampled_from([*pod_layout.AWAY_TAINTS, "spot"]), "operator": st.just("Exists")},
        optional={"effect": st.just("NoExecute"), "tolerationSeconds": st.sampled_from([300, 60])},
    ),
    max_size=3,
)
ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        "hang-floor": st.sampled_from(["10s", "1x"]),
        "state-size": st.sampled_from(["1Mi", "1Gi"]),
        "checkpoints": st.sampled_from(["pvc://a/b", "hostpath:///c", "s3://bucket/d", "gs://"]),
        "checkpoints-secret": st.just("credentials"),
        "nproc-per-node": st.sampled_from(["2", "auto"]),
        "members": st.just("4"),
        "container": st.just("main"),
        "not-injected": st.just("once"),
    },
)


@st.composite
def pods(draw: st.DrawFn) -> Pod:
    annotations = {pod_layout.PREFIX + key: value for key, value in draw(ANNOTATIONS).items()}
    spec: Pod = draw(
        st.fixed_dictionaries(
            {
                "containers": st.lists(
                    CONTAINERS, min_size=1, max_size=3, unique_by=lambda each: str(each["name"])
                )
            },
            optional={
                "initContainers": st.lists(CONTAINERS, max_size=1),
                "volumes": st.sampled_from([[{"name": "data"}], [{"name": "holdfast-code"}]]),
                "tolerations": TOLERATIONS,
                "securityContext": SECURITY,
                "hostNetwork": st.booleans(),
                "resources": RESOURCES,
                "nodeSelector": st.sampled_from(
                    [{"kubernetes.io/os": "linux"}, {"kubernetes.io/os": "windows"}]
                ),
            },
        )
    )
    metadata = {"generateName": "p-", "annotations": {pod_layout.INJECT: "true", **annotations}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": json.loads(json.dumps(spec)),
    }  # no part is shared


def result(given_pod: Pod) -> Injected | Refused:
    found = inject(given_pod, CONTEXT)
    assert not isinstance(found, NotAsked)
    return found


def has_all(after: Any, before: Any, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the paths of the values that are in `before` but not in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            lost
            for key, value in before.items()
            for lost in (has_all(after[key], value, (*path, key)) if key in after else [(*path, key)])
        ]
    if isinstance(before, list) and isinstance(after, list) and len(after) >= len(before):
        return [
            lost for place, each in enumerate(before) for lost in has_all(after[place], each, (*path, place))
        ]
    return [] if before == after else [path]


def guaranteed(spec: Pod) -> bool:
    """Return True if Kubernetes puts a pod with these containers into its class Guaranteed."""
    for each in [*spec["containers"], *spec.get("initContainers", [])]:
        limits = each.get("resources", {}).get("limits", {})
        requests = {**limits, **each.get("resources", {}).get("requests", {})}
        for name in ("cpu", "memory"):
            if not quantity(limits.get(name, 0)) or quantity(limits[name]) != quantity(requests[name]):
                return False
    return True


@given(pods())
def test_injecting_is_deterministic_and_does_not_change_its_input(before: Pod) -> None:
    kept = copy.deepcopy(before)
    first, second = result(before), result(copy.deepcopy(before))
    assert before == kept
    assert first == second


@given(pods())
def test_injecting_twice_equals_injecting_once(before: Pod) -> None:
    first = result(before)
    second = result(first.pod)
    assert type(second) is type(first)
    assert second.pod == first.pod
    assert second.patch == []


@given(pods())
def test_the_patch_turns_the_pod_into_the_injected_one(before: Pod) -> None:
    found = result(before)
    assert patched(before, found.patch) == found.pod


@given(pods())
def test_nothing_of_the_users_is_lost(before: Pod) -> None:
    found = result(before)
    lost = has_all(found.pod, before)
    if isinstance(found, Refused):
        assert {path[:2] for path in lost} <= {("metadata", "annotations")}
        return
    place = [each["name"] for each in before["spec"]["containers"]].index(found.record.container)
    trains = ("spec", "containers", place)
    changed = {(*trains, "command"), (*trains, "args"), ("metadata", "annotations", pod_layout.NOT_INJECTED)}
    assert {path[:4] for path in lost if path[:2] != ("spec", "tolerations")} <= changed
    given_words = [
        *before["spec"]["containers"][place]["command"],
        *before["spec"]["containers"][place].get("args", []),
    ]
    assert given_words[-1].split()[-1] in found.pod["spec"]["containers"][place]["command"][-1]


@given(pods())
def test_holdfasts_containers_are_admitted_wherever_the_training_container_is(before: Pod) -> None:
    """They run as its user if the pod states one, and never as root in a pod that must not."""
    found = result(before)
    if isinstance(found, Refused):
        return
    spec = before["spec"]
    (own,) = [each for each in spec["containers"] if each["name"] == found.record.container]
    asked = {**spec.get("securityContext", {}), **own.get("securityContext", {})}
    ours = [each for each in found.pod["spec"]["initContainers"] if each["name"] in pod_layout.CONTAINERS]
    assert len(ours) == len(pod_layout.CONTAINERS)
    for each in ours:
        has = {**spec.get("securityContext", {}), **each["securityContext"]}
        user = each["securityContext"].get("runAsUser")
        assert user == asked.get("runAsUser", None if asked.get("runAsNonRoot") else 0)
        assert has.get("runAsGroup") == asked.get("runAsGroup")
        assert not (has.get("runAsNonRoot") and user == 0), "the kubelet would not start it"
        assert has.get("runAsNonRoot") or not asked.get("runAsNonRoot") or asked.get("runAsUser") == 0
        assert has["capabilities"] == {"drop": ["ALL"]}
        assert has["allowPrivilegeEscalation"] is False


@given(pods())
def test_only_tolerations_of_the_cluster_itself_are_changed(before: Pod) -> None:
    own = before["spec"].get("tolerations", [])
    after = result(before).pod["spec"].get("tolerations", [])
    default = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for old, new in zip(own, after, strict=False):
        assert old == new or (old == {"key": old["key"], **default} and new["tolerationSeconds"] == 30)


@given(pods())
def test_a_pod_keeps_its_class(before: Pod) -> None:
    found = result(before)
    if isinstance(found, Injected) and not any(before["spec"].get("resources", {}).values()):
        assert guaranteed(found.pod["spec"]) == guaranteed(before["spec"])


@given(pods())
def test_an_injected_pod_has_each_of_holdfasts_parts_once(before: Pod) -> None:
    found = result(before)
    if isinstance(found, Refused):
        assert found.pod["metadata"]["annotations"][pod_layout.NOT_INJECTED] == found.why
        return
    spec = found.pod["spec"]
    assert [each["name"] for each in spec["initContainers"]][-2:] == list(pod_layout.CONTAINERS)
    names = [each["name"] for each in spec["volumes"]]
    assert [names.count(each) for each in pod_layout.VOLUMES] == [1] * len(pod_layout.VOLUMES)
    assert " ".join(str(each.get("command")) for each in spec["containers"]).count(pod_layout.LIBRARY) == 1
    assert pod_layout.NOT_INJECTED not in found.pod["metadata"]["annotations"]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.sampled_from(["", "a", "~", "/"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "b/c", "~d", ""]), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(JSON, JSON)
def test_a_patch_turns_any_document_into_any_other(before: Any, after: Any) -> None:
    given_before, given_after = {"x": before}, {"x": after}
    patch = json_patch(given_before, given_after)
    assert (
        repr(patched(given_before, patch)) == repr(given_after) or patched(given_before, patch) == given_after
    )
    assert json_patch(given_after, given_after) == []
