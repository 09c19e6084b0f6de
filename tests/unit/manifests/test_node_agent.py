"""The node agent has no more privileges than its sensors need, and its policy matches the code."""

from __future__ import annotations

import re
from typing import Any

from holdfast.node_report import REPORT, REPORT_AT
from nodeagent.cli import options
from nodeagent.publishing import conditions
from tests.unit.manifests.kubernetes_files import (
    OVERLAYS,
    Object,
    containers,
    load,
    of_kind,
    pods,
    restricted_violations,
)

NAME, NAMESPACE = "holdfast-nodeagent", "holdfast-nodes"


def agents_pod() -> Object:
    (pod,) = pods(of_kind("DaemonSet")[NAME])
    return pod


def test_the_agent_has_a_namespace_of_its_own() -> None:
    labels = of_kind("Namespace")[NAMESPACE]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"
    programs = [*of_kind("Deployment").values(), *of_kind("DaemonSet").values()]
    inside = [each["metadata"]["name"] for each in programs if each["metadata"]["namespace"] == NAMESPACE]
    assert inside == [NAME]
    assert of_kind("ServiceAccount")[NAME]["metadata"]["namespace"] == NAMESPACE


def test_the_agent_departs_from_the_restricted_profile_in_two_points_only() -> None:
    """It is user 0 without capabilities, and it mounts three paths of the host."""
    pod = agents_pod()
    assert restricted_violations(pod) == [
        "volume state",
        "volume machine-id",
        "volume logs",
        "may run as root",
    ]
    (container,) = containers(pod)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    paths = {each["name"]: each["hostPath"]["path"] for each in pod["spec"]["volumes"]}
    assert paths == {
        "state": "/var/lib/holdfast/nodes", "machine-id": "/etc/machine-id", "logs": "/var/log",
    }  # fmt: skip
    (state,) = (each for each in container["volumeMounts"] if not each.get("readOnly"))
    assert (state["mountPath"], state["subPathExpr"]) == (str(options.ROOT_STATE), f"$({options.NODE_NAME})")


def test_the_agent_runs_on_every_node_whatever_its_taints() -> None:
    spec = agents_pod()["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["priorityClassName"] in of_kind("PriorityClass")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


def test_the_agent_is_probed_on_a_listener_of_its_own_and_publishes() -> None:
    (container,) = containers(agents_pod())
    words = [each.replace("$(POD_IP)", "10.0.0.1") for each in container["args"]]
    assert words[:2] == ["holdfast", "node"]
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"][:2]}
    assert fields == {options.NODE_NAME: "spec.nodeName", "POD_IP": "status.podIP"}
    asked = options.parse([*words[2:], "--node-name", "n", "--api-server", "10.0.0.2:443"])
    assert (asked.command, asked.publish, asked.test) == ("serve", True, False)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {
        "http": options.split(asked.listen)[1], "probes": options.split(asked.probe_listen)[1],
    }  # fmt: skip
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "probes"
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "logs")
    assert str(asked.journal_dir).startswith(mount["mountPath"] + "/")
    assert {each["name"]: each.get("value") for each in container["env"][2:]} == {
        "NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility",
    }  # fmt: skip


def test_the_policy_names_the_agents_account_and_what_the_agent_writes() -> None:
    policy = of_kind("ValidatingAdmissionPolicy")[NAME]["spec"]
    (condition,) = policy["matchConditions"]
    assert f"'system:serviceaccount:{NAMESPACE}:{NAME}'" in condition["expression"]
    variables = {each["name"]: each["expression"] for each in policy["variables"]}
    assert quoted(variables["annotations"]) == {REPORT, REPORT_AT}
    assert quoted(variables["conditions"]) == {conditions.GPU, conditions.TRAINING}
    assert policy["failurePolicy"] == "Fail"
    binding = of_kind("ValidatingAdmissionPolicyBinding")[NAME]["spec"]
    assert binding == {"policyName": NAME, "validationActions": ["Deny"]}


def quoted(expression: str) -> set[str]:
    return set(re.findall(r"'([^']+)'", expression))


def test_the_kernel_log_overlay_adds_the_device_and_the_privilege_to_read_it_and_nothing_else() -> None:
    (patch,) = load(OVERLAYS / "kernel-log" / "kmsg.yaml")
    assert (patch["kind"], patch["metadata"]) == ("DaemonSet", {"name": NAME, "namespace": NAMESPACE})
    spec: dict[str, Any] = patch["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container.pop("name") == containers(agents_pod())[0]["name"]
    assert container == {
        "securityContext": {"privileged": True, "allowPrivilegeEscalation": True, "capabilities": None},
        "volumeMounts": [{"name": "kmsg", "mountPath": "/dev/kmsg", "readOnly": True}],
    }
    assert spec["volumes"] == [{"name": "kmsg", "hostPath": {"path": "/dev/kmsg", "type": "CharDevice"}}]
