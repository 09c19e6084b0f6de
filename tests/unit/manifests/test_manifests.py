"""The manifests agree with the code and with each other, and grant no more rights than needed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from holdfast.process.network import UNUSED_PORT
from supervisor.admission import pod_layout, webhook
from supervisor.cluster import main
from supervisor.cluster.adoption import workload_kinds
from supervisor.cluster.supervision import contents, status_fields
from supervisor.kubernetes import certificates
from supervisor.nodes import names
from tests.samples.documented_rights import documented_rights
from tests.unit.manifests.kubernetes_files import (
    BASE,
    OVERLAYS,
    Object,
    containers,
    installed,
    load,
    of_kind,
    pods,
    resources,
    restricted_violations,
)

CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "MutatingWebhookConfiguration",
    "Namespace",
    "PriorityClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
NODES = "holdfast-nodes"  # the namespace of the node agent
AGENT = "holdfast-nodeagent"
READ = {"get", "list", "watch"}
Notes = dict[str, str] | None  # the annotations of a Node; None if there is no Node
PROGRAMS = {"holdfast-supervisor": "supervisor", "holdfast-webhook": "webhook"}


def rules(kind: str) -> list[Object]:
    return [rule for role in of_kind(kind).values() for rule in role["rules"]]


def verbs(role: Object, group: str, resource: str) -> set[str]:
    """Return the verbs that a role allows on a resource, whatever the object's name."""
    return {
        verb
        for rule in role["rules"]
        if group in rule["apiGroups"] and resource in rule["resources"]
        for verb in rule["verbs"]
    }


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("folder", [BASE, *sorted(each for each in OVERLAYS.iterdir() if each.is_dir())])
def test_a_kustomization_names_every_file_of_its_folder(folder: Any) -> None:
    wanted = load(folder / "kustomization.yaml")[0]
    named = {*wanted["resources"], *(each["path"] for each in wanted.get("patches", []))}
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert {name for name in named if name.endswith(".yaml")} == files


def test_every_object_is_in_a_namespace_of_holdfast_or_has_a_recognizable_name() -> None:
    found = installed()
    assert len(found) > 20
    for each in found:
        name = each["metadata"]["name"]
        if each["kind"] in CLUSTER_WIDE:
            assert "namespace" not in each["metadata"], name
            assert name.startswith("holdfast") or name.endswith("holdfast.dev"), name
        else:
            expected = NODES if name == AGENT else pod_layout.NAMESPACE
            assert each["metadata"]["namespace"] == expected, name


def test_the_namespace_admits_restricted_pods_only() -> None:
    labels = of_kind("Namespace")[pod_layout.NAMESPACE]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_restricted_probed_and_bounded(name: str) -> None:
    (pod,) = pods(of_kind("Deployment")[name])
    assert restricted_violations(pod) == []
    (container,) = containers(pod)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["args"] == ["holdfast", "cluster", PROGRAMS[name]]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert container["resources"]["limits"].keys() == {"memory"}
    assert container["image"] == "holdfast", "manifests/default replaces this name"
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    needed = {"POD_NAME", "POD_NAMESPACE", "POD_IP", *({"POD_UID"} if PROGRAMS[name] == "supervisor" else ())}
    assert fields == {each: pod_layout.FIELDS[each] for each in needed}
    assert pod["spec"]["serviceAccountName"] in of_kind("ServiceAccount")
    assert pod["spec"]["priorityClassName"] in of_kind("PriorityClass")


def test_a_violation_of_the_restricted_standard_is_detected() -> None:
    container = {
        "name": "c",
        "ports": [{"hostPort": 80}],
        "securityContext": {"capabilities": {"add": ["X"]}},
    }
    volumes = [{"name": "v", "hostPath": {"path": "/"}}]
    assert restricted_violations(
        {"spec": {"hostPID": True, "containers": [container], "volumes": volumes}}
    ) == [
        "hostPID",
        "volume v",
        "may run as root",
        "no seccomp profile",
        "c may gain privileges",
        "c keeps capabilities",
        "c is root or has a port of the host",
    ]


def test_selectors_select_the_intended_pods_and_ports() -> None:
    all_programs = {**of_kind("Deployment"), **of_kind("DaemonSet")}
    programs = {name: next(pods(each)) for name, each in all_programs.items()}
    labels = {name: pod["metadata"]["labels"] for name, pod in programs.items()}
    for kind in ("Deployment", "DaemonSet", "Service", "PodDisruptionBudget", "NetworkPolicy"):
        for name, each in of_kind(kind).items():
            spec = each["spec"]
            selector = spec.get("selector", spec.get("podSelector"))
            selected = [of for of in labels if matches(selector.get("matchLabels", selector), labels[of])]
            assert selected == [name], (kind, name)
    for name, service in of_kind("Service").items():
        open_ports = {each["name"] for each in containers(programs[name])[0]["ports"]}
        assert {each["targetPort"] for each in service["spec"]["ports"]} == open_ports
        policy = of_kind("NetworkPolicy")[name]["spec"]
        ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert ports - {UNUSED_PORT} == open_ports


def test_only_other_supervisors_may_probe_the_unused_port() -> None:
    policies = of_kind("NetworkPolicy")
    found = {
        name: [rule for rule in each["spec"]["ingress"] if {"port": UNUSED_PORT} in rule["ports"]]
        for name, each in policies.items()
    }
    ours = policies["holdfast-supervisor"]["spec"]["podSelector"]
    assert found.pop("holdfast-supervisor") == [
        {"from": [{"podSelector": ours}], "ports": [{"port": UNUSED_PORT}]}
    ]
    assert not any(found.values())


def test_members_find_the_supervisor_at_the_address_that_the_injector_sets() -> None:
    service = of_kind("Service")[pod_layout.SUPERVISOR_SERVICE]
    assert service["spec"]["clusterIP"] == "None"
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert ports["members"] == pod_layout.SUPERVISOR_PORT
    (pod,) = pods(of_kind("Deployment")["holdfast-supervisor"])
    inside = {each["name"]: each["containerPort"] for each in containers(pod)[0]["ports"]}
    assert inside["members"] == pod_layout.SUPERVISOR_PORT, "a headless Service does not translate ports"


def test_the_webhook_is_called_for_annotated_pods_only_and_never_blocks_one() -> None:
    (configuration,) = of_kind("MutatingWebhookConfiguration").values()
    (hook,) = configuration["webhooks"]
    (condition,) = hook["matchConditions"]
    annotation = f'object.metadata.?annotations[?"{pod_layout.INJECT}"].orValue("") == "true"'
    assert condition["expression"] == annotation
    expressions = hook["namespaceSelector"]["matchExpressions"]
    (excluded,) = (each["values"] for each in expressions if each["key"] == "kubernetes.io/metadata.name")
    assert set(excluded) == set(pod_layout.SYSTEM_NAMESPACES)
    assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == (
        "Ignore",
        "None",
        3,
    )
    assert "caBundle" not in hook["clientConfig"], (
        "an empty one would replace the bundle that the webhook has set"
    )
    called = hook["clientConfig"]["service"]
    service = of_kind("Service")[called["name"]]
    assert called["namespace"] == service["metadata"]["namespace"]
    assert called["port"] in [each["port"] for each in service["spec"]["ports"]]


def test_no_rule_has_a_wildcard() -> None:
    for rule in (*rules("ClusterRole"), *rules("Role")):
        assert not any("*" in text for values in rule.values() for text in values), rule
        assert rule.keys() <= {"apiGroups", "resources", "resourceNames", "verbs"}


def test_only_these_permissions_apply_to_all_namespaces() -> None:
    changes = {
        (role["metadata"]["name"], resource): set(rule["verbs"]) - READ
        for role in of_kind("ClusterRole").values()
        for rule in role["rules"]
        for resource in rule["resources"]
        if set(rule["verbs"]) - READ
    }
    assert changes == {
        ("holdfast-supervisor", "pods"): {"create", "delete"},
        ("holdfast-supervisor", "pods/eviction"): {"create"},
        ("holdfast-supervisor", "supervisions"): {"create", "update", "patch", "delete"},
        ("holdfast-supervisor", "supervisions/status"): {"update", "patch"},
        ("holdfast-supervisor", "tokenreviews"): {"create"},
        ("holdfast-supervisor", "events"): {"create", "patch"},
        ("holdfast-supervisor", "nodes"): {"patch"},
        ("holdfast-supervisor", "nodes/status"): {"patch"},
        ("holdfast-webhook", "mutatingwebhookconfigurations"): {"patch"},
        (AGENT, "nodes/status"): {"patch"},
        ("holdfast-edit", "supervisions"): {"patch", "update"},
    }


def test_permissions_on_secrets_and_other_single_objects_name_the_object() -> None:
    """A `create` cannot be limited to a name. All other verbs on these resources are."""
    single = {"secrets", "leases", "mutatingwebhookconfigurations"}
    for rule in (*rules("ClusterRole"), *rules("Role")):
        if single.intersection(rule["resources"]) and rule["verbs"] != ["create"]:
            assert len(rule["resourceNames"]) == 1, rule
        elif "create" in rule["verbs"]:
            assert "resourceNames" not in rule, rule


def test_the_supervisor_reads_the_owner_of_every_kind_of_workload() -> None:
    role = of_kind("ClusterRole")["holdfast-supervisor"]
    wanted = {
        (group, f"{row.kind.lower()}s") for row in workload_kinds.shipped().owners for group in row.groups
    }
    assert len(wanted) > 12
    for group, resource in wanted:
        assert "get" in verbs(role, group, resource), (group, resource)
    readable = {
        (group, resource)
        for rule in role["rules"]
        if rule["verbs"] == ["get"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert readable <= wanted


def test_every_binding_binds_a_role_and_an_account_that_exist() -> None:
    accounts = {(each["metadata"]["namespace"], name) for name, each in of_kind("ServiceAccount").items()}
    for kind in ("ClusterRole", "Role"):
        for binding in of_kind(f"{kind}Binding").values():
            assert binding["roleRef"]["kind"] == kind
            assert binding["roleRef"]["name"] in of_kind(kind)
            assert {(each["namespace"], each["name"]) for each in binding["subjects"]} <= accounts


def test_names_and_ports_match_the_code() -> None:
    named = {each for rule in rules("Role") for each in rule.get("resourceNames", [])}
    assert named == {certificates.AUTHORITY_SECRET, pod_layout.SUPERVISOR_LEASE, names.CONFIG}
    (pod,) = pods(of_kind("Deployment")["holdfast-supervisor"])
    ports = {each["name"]: each["containerPort"] for each in containers(pod)[0]["ports"]}
    assert ports["http"] == main.HEALTH_PORT
    assert set(of_kind("MutatingWebhookConfiguration")) == {webhook.CONFIGURATION}
    (pod,) = pods(of_kind("Deployment")[webhook.SERVICE])
    assert [each["containerPort"] for each in containers(pod)[0]["ports"]] == [webhook.PORT]


def test_the_policy_on_changes_of_nodes_names_what_the_code_writes() -> None:
    policy = of_kind("ValidatingAdmissionPolicy")["holdfast-node-changes"]
    binding = of_kind("ValidatingAdmissionPolicyBinding")["holdfast-node-changes"]
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    spec = policy["spec"]
    assert spec["failurePolicy"] == "Fail"
    (condition,) = spec["matchConditions"]
    account = f"system:serviceaccount:{pod_layout.NAMESPACE}:holdfast-supervisor"
    assert condition["expression"] == f'request.userInfo.username == "{account}"'
    ours = next(each["expression"] for each in spec["variables"] if each["name"] == "ours")
    assert ours == json.dumps([names.RECORD, names.REQUEST, names.REQUESTED_BY])
    text = " ".join(each["expression"] for each in spec["validations"])
    assert f'"{names.TAINT}"' in text
    assert f'"{names.CONDITION}"' in text


# The fields of NodeSpec and NodeStatus up to Kubernetes 1.35, of which the API server may ignore some
SPEC = {"configSource", "externalID", "podCIDR", "podCIDRs", "providerID", "taints", "unschedulable"}
STATUS = {
    "addresses", "allocatable", "capacity", "conditions", "config", "daemonEndpoints", "declaredFeatures",
    "features", "images", "nodeInfo", "phase", "runtimeHandlers", "volumesAttached", "volumesInUse",
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "fields", "ours"), [("spec", SPEC, "taints"), ("status", STATUS, "conditions")]
)
def test_the_policy_on_changes_of_nodes_compares_each_field_with_the_old_one(
    part: str, fields: set[str], ours: str
) -> None:
    spec = of_kind("ValidatingAdmissionPolicy")["holdfast-node-changes"]["spec"]
    compared = {
        name
        for rule in spec["validations"]
        for name, old in re.findall(
            rf"object\.\??{part}\.\?(\w+)\S* == oldObject\.\??{part}\.\?(\w+)", rule["expression"]
        )
        if name == old
    }
    assert compared == fields - {ours}


def _cel_holds(expression: str, old: Notes, new: Notes, user: str = "") -> bool:
    """Evaluate an expression of `node-requests.yaml` on the annotations of a Node, as Python.

    The expressions read nothing else of the Node. What the translation does not know is a syntax error.
    """
    notes = {"object": new, "oldObject": old, "request": user}
    python = re.sub(
        r"\b(object|oldObject)\.metadata\.(\?annotations\.orValue\(\{\}\)|annotations)", r"\1", expression
    )
    python = re.sub(r"(\w+)\[\?(.+?)\]\.orValue\(\"\"\)", r'\1.get(\2, "")', python)
    python = re.sub(r"(\[[^\]]*\])\.exists\((\w+),(.*)\)$", r"any((\3) for \2 in \1)", python)
    for cel, word in (
        ("&&", " and "),
        ("||", " or "),
        ("null", "None"),
        ("request.userInfo.username", "request"),
    ):
        python = python.replace(cel, word)
    return bool(eval(python, {"__builtins__": {"any": any}, **notes}))


ASKED, ASKED_BY = names.REQUEST, names.REQUESTED_BY
ALICES = {ASKED: "quarantine: Xid 79", ASKED_BY: "alice"}


@pytest.mark.parametrize(
    ("old", "new", "is_allowed"),
    [
        (ALICES, {ASKED: "release"}, False),
        (ALICES, {ASKED: "quarantine: Xid 79"}, False),
        (ALICES, {**ALICES, ASKED: "release"}, False),
        (ALICES, {ASKED: "release", ASKED_BY: "bob"}, True),
        (ALICES, {}, True),
        (ALICES, {**ALICES, "other": "x"}, True),
        ({}, ALICES, False),
        (None, ALICES, False),
        (None, {ASKED: "release"}, True),
        ({}, {ASKED: "release"}, True),
        ({ASKED: "quarantine: x"}, {ASKED: "release"}, True),
        ({}, {ASKED: "release", ASKED_BY: "bob"}, True),
    ],
)
def test_bob_can_neither_request_as_alice_nor_replace_her_request_without_a_name(
    old: Notes, new: Notes, is_allowed: bool
) -> None:
    spec = of_kind("ValidatingAdmissionPolicy")["holdfast-requested-by"]["spec"]
    applies = all(_cel_holds(each["expression"], old, new) for each in spec["matchConditions"])
    (rule,) = spec["validations"]
    assert (not applies or _cel_holds(rule["expression"], old, new, "bob")) == is_allowed


def test_the_resource_has_the_fields_that_the_supervisor_writes() -> None:
    definition = of_kind("CustomResourceDefinition")["supervisions.holdfast.dev"]["spec"]
    (version,) = definition["versions"]
    names = (definition["group"], version["name"], definition["names"]["kind"])
    assert names == (contents.GROUP, contents.VERSION, contents.KIND)
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    published = {"step": 1, "ettr": 0.5, "last_incident": {}, "message": "", "exit_code": 0}
    written = {*status_fields.summary(published, []), "memory", "phase", "generation", "incidents", "epoch"}
    assert written <= status.keys(), "the API server silently drops other fields"
    paths = [each["jsonPath"].split(".") for each in version["additionalPrinterColumns"]]
    assert {path[2] for path in paths if path[1] == "status"} <= status.keys()


def test_only_the_default_and_the_overlays_choose_an_image() -> None:
    (chosen,) = load(BASE.parent / "default" / "kustomization.yaml")[0]["images"]
    assert (chosen["name"], chosen["newTag"]) == ("holdfast", "dev")
    assert "images" not in load(BASE / "kustomization.yaml")[0]
    for folder in OVERLAYS.iterdir():
        assert load(folder / "kustomization.yaml")[0]["resources"][0] == "../../default"
        assert list(resources(folder)) or load(folder / "kustomization.yaml")[0]["patches"]


def test_the_documentation_lists_every_right_of_each_role_and_no_other() -> None:
    """A test on a cluster asks the API server the same questions."""
    roles = {**of_kind("ClusterRole"), **of_kind("Role")}
    bindings = [*of_kind("ClusterRoleBinding").values(), *of_kind("RoleBinding").values()]
    granted = {
        (subject["name"].removeprefix("holdfast-"), *right)
        for binding in bindings
        for subject in binding["subjects"]
        for right in rights(role_of(binding), binding["kind"] == "RoleBinding")
    }
    for name in ("view", "edit"):
        granted |= {(name, *right) for right in rights(roles[f"holdfast-{name}"], False)}
    stated = {
        (each.role, each.verb, each.resource, each.group, each.name, each.where == "own")
        for each in documented_rights()
        if each.allowed
    }
    # Reading pods anywhere includes the supervisor's own namespace.
    assert stated - {("supervisor", "get", "pods", "", "", True)} == granted


def role_of(binding: Object) -> Object:
    """Return the role that a binding names. A Role and a ClusterRole may have the same name."""
    found: Object = of_kind(binding["roleRef"]["kind"])[binding["roleRef"]["name"]]
    return found


def rights(role: Object, is_own: bool) -> set[tuple[str, str, str, str, bool]]:
    """Return the verb, resource, group and name of each right, and whether it is only for one namespace."""
    return {
        (verb, resource, group, name, is_own)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for group in rule["apiGroups"]
        for name in rule.get("resourceNames", [""])
    }
