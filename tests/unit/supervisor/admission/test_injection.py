from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast import launch_commands
from holdfast.protocol import environment
from sidecar import config
from supervisor.admission import pod_layout
from supervisor.admission.injection import MAX_WHY, NotAsked, Refused, inject, json_patch, record_of
from tests.samples.growth import growth
from tests.unit.supervisor.admission.pods import (
    CONTEXT,
    Pod,
    container,
    injected,
    named,
    patched,
    pod,
    refusal,
    resources,
    sidecar,
    variables,
)

GUARANTEED = resources({"cpu": "8", "memory": "64Gi"}, {"cpu": "8", "memory": "64Gi"})
LAUNCH = ["-c", launch_commands.START, "/opt/holdfast/lib", "--warm"]


def training(given: Pod) -> Pod:
    return named(injected(given).pod["spec"]["containers"], "main")


def test_a_pod_that_does_not_opt_in_is_not_changed() -> None:
    assert inject({"spec": {}}, CONTEXT) == NotAsked()
    for value in ("false", None):
        given = pod()
        given["metadata"]["annotations"] = {pod_layout.INJECT: value, "holdfast.dev/nonsense": "x"}
        assert inject(given, CONTEXT) == NotAsked()


@pytest.mark.parametrize("value", [True, "yes", "True", ""])
def test_a_value_that_is_neither_true_nor_false_is_refused(value: object) -> None:
    given = pod()
    given["metadata"]["annotations"][pod_layout.INJECT] = value
    assert "expected 'true' or 'false' in quotes" in refusal(given)


def test_the_training_command_is_started_by_the_launcher_in_the_same_python() -> None:
    found = training(pod(container(("python3.12", "-u"), args=["train.py", "--x=$(POD)"])))
    assert found["command"] == [
        "python3.12",
        *LAUNCH,
        "auto",
        "--",
        "python3.12",
        "-u",
        "train.py",
        "--x=$(POD)",
    ]
    assert found["args"] == []


def test_torchrun_is_replaced_and_its_numbers_are_read() -> None:
    line = ("torchrun", "--nproc-per-node", "4", "--nnodes=2:2", "train.py", "-x")
    found = injected(pod(container(line), annotations={"warm": "spawn"}))
    (trains,) = found.pod["spec"]["containers"]
    assert trains["command"] == ["python3", *LAUNCH, "spawn", "--", "python3", "-u", "train.py", "-x"]
    assert (found.record.nproc, found.record.members) == (4, 2)
    assert "args" not in trains


@pytest.mark.parametrize(
    ("nnodes", "members"), [("2", 2), ("2:2", 2), ("1:4", None), ("0", None), ("x", None), ("$(N)", None)]
)
def test_the_size_of_the_group_is_known_only_if_it_is_fixed(nnodes: str, members: int | None) -> None:
    assert injected(pod(container(("torchrun", "--nnodes", nnodes, "x.py")))).record.members == members


def test_annotations_take_precedence_over_the_command() -> None:
    line = ("torchrun", "--nproc-per-node=$(N)", "--nnodes", "2", "x.py")
    found = injected(pod(container(line), annotations={"nproc-per-node": "3", "members": "5"}))
    assert (found.record.nproc, found.record.members) == (3, 5)


def test_a_pod_of_a_job_that_is_too_large_to_supervise_is_not_changed() -> None:
    line = ("torchrun", "--nnodes=4096", "--nproc-per-node=9", "x.py")
    assert "4096 pods of 9 ranks each, more than the 32,768 ranks" in refusal(pod(container(line)))
    assert injected(pod(container(line), annotations={"members": "3640"})).record.nproc == 9


@pytest.mark.parametrize("word", ["gpu", "auto"])
@pytest.mark.parametrize(("gpus", "nproc"), [("8", 8), (2, 2), (None, 1), ("0", 1)])
def test_there_is_one_rank_for_each_gpu_of_the_container(word: str, gpus: Any, nproc: int) -> None:
    limits = {} if gpus is None else {"nvidia.com/gpu": gpus}
    given = container(("torchrun", f"--nproc-per-node={word}", "x.py"), resources=resources(limits))
    assert injected(pod(given)).record.nproc == nproc


def test_ranks_known_only_in_the_running_pod_need_the_annotation() -> None:
    by_claim = container(
        ("torchrun", "--nproc-per-node=gpu", "x.py"), resources={"claims": [{"name": "gpus"}]}
    )
    by_cores = container(("torchrun", "--nproc-per-node=cpu", "x.py"))
    for given in (by_claim, by_cores):
        assert "set holdfast.dev/nproc-per-node to a number" in refusal(pod(given))
        assert injected(pod(given, annotations={"nproc-per-node": "2"})).record.nproc == 2


def test_the_training_container_gets_the_variables_of_the_launcher() -> None:
    found = training(
        pod(container(("torchrun", "--nproc-per-node=2", "x.py"), env=[{"name": "A", "value": "b"}]))
    )
    assert found["env"][0] == {"name": "A", "value": "b"}
    assert variables(found) == {
        "A": "b",
        environment.FIRST_STEP_S: "600.0",
        environment.LEAVE_S: "25",
        environment.DIRECTORY: "/run/holdfast",
        environment.LOGS: "/run/holdfast/logs",
        environment.MEMBER: {"fieldRef": {"fieldPath": "metadata.name"}},
        environment.NPROC: "2",
        environment.BIND: {"fieldRef": {"fieldPath": "status.podIP"}},
        environment.PY_SPY: "/opt/holdfast/bin/py-spy",
    }


def test_variables_that_accelerate_would_have_set_are_set() -> None:
    line = ("accelerate", "launch", "--num_processes=2", "--mixed_precision=bf16", "x.py")
    assert variables(training(pod(container(line))))["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_variables_that_the_user_may_set_keep_the_users_value() -> None:
    own = [
        {"name": name, "value": "/mine"} for name in (environment.LOGS, environment.BIND, environment.PY_SPY)
    ]
    found = variables(training(pod(container(env=own))))
    assert [found[each["name"]] for each in own] == ["/mine"] * 3


def test_a_variable_that_holdfast_must_set_may_not_be_set_by_the_user() -> None:
    given = container(env=[{"name": environment.DIRECTORY, "value": "/elsewhere"}])
    assert "sets HOLDFAST_DIRECTORY, which Holdfast sets itself" in refusal(pod(given))
    same = container(env=[{"name": environment.DIRECTORY, "value": "/run/holdfast"}])
    assert [each["name"] for each in training(pod(same))["env"]].count(environment.DIRECTORY) == 1


def test_a_sidecar_can_read_its_configuration() -> None:
    found = variables(sidecar(injected(pod(annotations={"hang-factor": "4"})).pod))
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    read = config.from_environment(texts)
    assert read.member == "$(POD_NAME).$(POD_UID)"
    assert (read.node, read.address, read.nproc, read.hang_factor) == ("$(NODE_NAME)", "$(POD_IP)", 1, 4.0)
    assert read.supervisor_url == "https://holdfast-supervisor.holdfast-system.svc:8443"
    assert read.reports_storage
    assert read.certificates == "PEM\n"
    assert str(read.token_file) == "/var/run/secrets/holdfast.dev/token"
    assert found["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_the_fields_of_the_pod_come_before_the_variables_that_refer_to_them() -> None:
    names = [each["name"] for each in sidecar(injected(pod()).pod)["env"]]
    for field in pod_layout.FIELDS:
        assert names.index(field) < names.index(environment.MEMBER)


def test_without_a_ca_the_sidecar_trusts_the_systems_cas() -> None:
    found = injected(pod(), replace(CONTEXT, ca=""))
    assert environment.CA not in variables(sidecar(found.pod))


def test_holdfasts_init_containers_come_last_and_the_sidecar_runs_as_long_as_the_pod() -> None:
    users = [{"name": "istio-init"}, {"name": "download"}]
    found = injected(pod(initContainers=users)).pod["spec"]["initContainers"]
    assert [each["name"] for each in found] == [
        "istio-init",
        "download",
        "holdfast-setup",
        "holdfast-sidecar",
    ]
    assert found[3]["restartPolicy"] == "Always"
    assert found[3]["livenessProbe"] == pod_layout.ALIVE_PROBE
    assert "livenessProbe" not in found[2]
    assert "restartPolicy" not in found[2]
    assert [each["args"] for each in found[2:]] == [
        ["holdfast", "install-runtime", "/opt/holdfast"],
        ["holdfast", "sidecar"],
    ]
    assert {(each["image"], each["imagePullPolicy"]) for each in found[2:]} == {
        ("holdfast:dev", "IfNotPresent")
    }


def test_the_volumes_are_mounted_at_their_paths() -> None:
    given = injected(pod(volumes=[{"name": "data", "emptyDir": {}}])).pod["spec"]
    assert [each["name"] for each in given["volumes"]] == ["data", *pod_layout.VOLUMES]
    memory = named(given["volumes"], pod_layout.MEMORY_VOLUME)
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    (source,) = named(given["volumes"], pod_layout.IDENTITY_VOLUME)["projected"]["sources"]
    assert source == {
        "serviceAccountToken": {"audience": "holdfast.dev", "expirationSeconds": 3600, "path": "token"}
    }
    mounts = {
        each["name"]: {mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]}
        for each in [*given["containers"], *given["initContainers"]]
    }
    code = {"holdfast-code": "/opt/holdfast"}
    shared = {"holdfast-memory": "/run/holdfast", "holdfast-checkpoints": "/var/lib/holdfast/checkpoints"}
    identity = {"holdfast-identity": "/var/run/secrets/holdfast.dev"}
    assert mounts == {
        "main": {**code, **shared},
        "holdfast-setup": code,
        "holdfast-sidecar": {**shared, **identity},
    }


@pytest.mark.parametrize(
    ("storage", "source", "subpath"),
    [
        (None, {"emptyDir": {}}, None),
        ("pvc://data", {"persistentVolumeClaim": {"claimName": "data"}}, None),
        ("pvc://data/a/b", {"persistentVolumeClaim": {"claimName": "data"}}, "a/b"),
        ("hostpath:///mnt/x", {"hostPath": {"path": "/mnt/x", "type": "DirectoryOrCreate"}}, None),
        ("s3://bucket/runs", {"emptyDir": {}}, None),  # for the copies from which ranks restore
    ],
)
def test_checkpoints_are_stored_where_the_annotation_says(
    storage: str | None, source: Pod, subpath: str | None
) -> None:
    found = injected(pod(annotations={"checkpoints": storage} if storage else {}))
    volume = named(found.pod["spec"]["volumes"], pod_layout.CHECKPOINT_VOLUME)
    assert volume == {"name": pod_layout.CHECKPOINT_VOLUME, **source}
    for each in (found.pod["spec"]["containers"][0], sidecar(found.pod)):
        assert named(each["volumeMounts"], pod_layout.CHECKPOINT_VOLUME).get("subPath") == subpath
    assert any("no checkpoints are written" in note for note in found.notes) == (storage is None)


def test_only_the_sidecar_gets_the_place_in_object_storage_and_the_credentials() -> None:
    asked = {"checkpoints": "s3://bucket/runs/a/", "checkpoints-secret": "gpt-s3"}
    found = injected(pod(annotations=asked))
    ours = sidecar(found.pod)
    assert named(ours["env"], "HOLDFAST_OBJECTS") == {
        "name": "HOLDFAST_OBJECTS",
        "value": "s3://bucket/runs/a",
    }
    assert ours["envFrom"] == [{"secretRef": {"name": "gpt-s3"}}]
    assert json.dumps(found.pod["spec"]).count("gpt-s3") == 1
    assert json.dumps(found.pod["spec"]).count("s3://") == 1
    assert "envFrom" not in sidecar(injected(pod(annotations={"checkpoints": "s3://bucket/a"})).pod)


def test_the_copy_of_a_checkpoint_counts_for_the_disk_that_a_pod_may_use() -> None:
    limited = container(resources={"limits": {"ephemeral-storage": "1Gi"}})
    asked = {"checkpoints": "s3://bucket/a", "state-size": "4Gi"}
    limits = sidecar(injected(pod(limited, annotations=asked)).pod)["resources"]["limits"]
    assert limits == {"ephemeral-storage": "4352Mi"}


def test_a_job_without_checkpoints_gets_no_note_about_storage() -> None:
    assert injected(pod(annotations={"checkpoint-every": "0"})).notes == ()


@pytest.mark.parametrize(
    ("of_pod", "own", "expected"),
    [
        ({}, {}, {"runAsUser": 0}),
        ({"runAsUser": 1000}, {}, {"runAsUser": 1000, "runAsNonRoot": True}),
        ({"runAsUser": 1000, "runAsGroup": 2}, {"runAsUser": 7},
         {"runAsUser": 7, "runAsGroup": 2, "runAsNonRoot": True}),
        ({"runAsNonRoot": True, "runAsUser": 5}, {"runAsUser": None},
         {"runAsUser": 5, "runAsNonRoot": True}),
        ({}, {"runAsGroup": 3}, {"runAsUser": 0, "runAsGroup": 3}),
        ({"fsGroup": 4, "supplementalGroups": [5]}, {}, {"runAsUser": 0}),
        # Only the image names the user: Holdfast's containers run as the user of their own image.
        ({"runAsNonRoot": True}, {}, {"runAsNonRoot": True}),
        ({}, {"runAsNonRoot": True}, {"runAsNonRoot": True}),
        ({"runAsNonRoot": True}, {"runAsNonRoot": False}, {"runAsUser": 0, "runAsNonRoot": False}),
        ({"runAsNonRoot": True}, {"runAsUser": 0, "runAsNonRoot": False},
         {"runAsUser": 0, "runAsNonRoot": False}),
        ({"seLinuxOptions": {"level": "a"}}, {"seLinuxOptions": {"level": "b"}},
         {"runAsUser": 0, "seLinuxOptions": {"level": "b"}}),
    ],
)  # fmt: skip
def test_holdfasts_containers_run_as_the_training_containers_user(
    of_pod: Pod, own: Pod, expected: Pod
) -> None:
    found = injected(pod(container(securityContext=own), securityContext=of_pod)).pod
    for each in found["spec"]["initContainers"]:
        assert each["securityContext"] == {
            **expected,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }


@pytest.mark.parametrize(
    ("of_pod", "who"),
    [
        ({"runAsUser": 1000}, "user 1000"),
        ({"runAsNonRoot": True}, "the sidecar's user, who is not root,"),
        ({}, None),
    ],
)
def test_a_directory_of_the_node_that_only_root_can_write_is_noted(of_pod: Pod, who: str | None) -> None:
    asked = {"checkpoints": "hostpath:///mnt/x"}
    notes = injected(pod(securityContext=of_pod, annotations=asked)).notes
    found = [each for each in notes if "creates /mnt/x as root" in each]
    assert len(found) == (who is not None)
    assert all(str(who) in each for each in found)
    of_claim = pod(securityContext=of_pod, annotations={"checkpoints": "pvc://data/x"})
    assert not [each for each in injected(of_claim).notes if "as root" in each]


def test_a_guaranteed_pod_stays_guaranteed_and_the_note_states_what_that_requests() -> None:
    found = injected(pod(container(resources=GUARANTEED), annotations={"checkpoints": "pvc://a"}))
    assert sidecar(found.pod)["resources"]["requests"] == {"cpu": "900m", "memory": "33280Mi"}
    assert sidecar(found.pod)["resources"]["limits"] == sidecar(found.pod)["resources"]["requests"]
    assert found.notes == (
        "the sidecar requests 33280Mi of memory, most of it for snapshots: set holdfast.dev/state-size to"
        " request only what the training state needs",
    )
    stated = injected(
        pod(container(resources=GUARANTEED), annotations={"checkpoints": "pvc://a", "state-size": "1Gi"})
    )
    assert sidecar(stated.pod)["resources"]["requests"]["memory"] == "3136Mi"
    assert stated.notes == ()
    assert stated.pod["spec"]["containers"][0]["resources"] == GUARANTEED


def test_an_init_container_without_limits_makes_the_pod_burstable() -> None:
    found = injected(pod(container(resources=GUARANTEED), initContainers=[{"name": "download"}])).pod
    assert "resources" not in sidecar(found)


def test_the_memory_volume_must_fit_into_the_training_containers_limit() -> None:
    limited = container(resources=resources({"memory": "8Gi"}))
    found = injected(pod(limited)).pod
    assert named(found["spec"]["volumes"], pod_layout.MEMORY_VOLUME)["emptyDir"]["sizeLimit"] == "4Gi"
    assert refusal(pod(limited, annotations={"state-size": "4Gi"})) == (
        "snapshots need 10304Mi of memory within the training container's limit of 8Gi: raise the limit, or"
        " lower holdfast.dev/state-size"
    )


def test_the_training_container_is_the_only_one_or_has_a_conventional_name() -> None:
    two = (container(), {"name": "logs", "image": "x"})
    assert injected(pod(*two)).record.container == "main"
    assert injected(pod({**container(), "name": "odd"})).record.container == "odd"
    mesh = ({"name": "istio-proxy"}, {**container(), "name": "odd"})
    assert injected(pod(*mesh)).record.container == "odd"
    assert (
        injected(
            pod({**container(), "name": "a"}, {"name": "b"}, annotations={"container": "a"})
        ).record.container
        == "a"
    )


def test_the_only_container_with_a_gpu_or_the_like_trains() -> None:
    for device in ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu", "aws.amazon.com/neuron"):
        trains = {**container(), "name": "a", "resources": resources({device: 1})}
        assert injected(pod({**container(), "name": "b"}, trains)).record.container == "a"
    plain = {**container(), "name": "b", "resources": resources({"rdma/hca": 1, "cpu": 1})}
    assert injected(pod(plain, trains)).record.container == "a"
    assert "b, a, c trains" in refusal(pod(plain, trains, {**trains, "name": "c"}))
    assert injected(pod({**trains, "name": "b"}, {**container(), "name": "main"})).record.container == "main"


def test_if_several_containers_may_train_the_user_must_choose_one() -> None:
    for names in (("a", "b"), ("main", "pytorch")):
        why = refusal(pod(*({**container(), "name": name} for name in names)))
        expected = f"it is unclear which of the containers {', '.join(names)} trains"
        assert why == f"{expected}: set holdfast.dev/container"
    assert refusal(pod(annotations={"container": "x"})) == (
        "holdfast.dev/container: invalid value 'x': expected one of main"
    )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"os": {"name": "windows"}}, "the pod is for Windows"),
        ({"nodeSelector": {"kubernetes.io/os": "windows"}}, "the pod is for Windows"),
        ({"volumes": [{"name": "holdfast-memory"}]}, "a volume holdfast-memory, a name that Holdfast needs"),
        ({"initContainers": [{"name": "holdfast-setup"}]}, "a container holdfast-setup, a name"),
        ({"ephemeralContainers": [{"name": "holdfast-sidecar"}]}, "a container holdfast-sidecar"),
        ({"containers": []}, "the pod has no containers"),
        ({"containers": None}, "the pod has no containers"),
        ({"containers": {}}, "containers is not a list of objects"),
        ({"securityContext": "root"}, "securityContext is not an object"),
        ({"tolerations": ["all"]}, "tolerations is not a list of objects"),
    ],
)
def test_pods_that_cannot_have_holdfast_are_refused(spec: Pod, reason: str) -> None:
    given = pod()
    given["spec"].update(spec)
    assert reason in refusal(given)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"command": ["python", 3]}, "command is not a list of strings: put each element in quotes"),
        ({"command": None}, "the container has no command"),
        ({"command": ["./start"]}, "does not know how './start' starts the training"),
        ({"resources": {"limits": {"memory": "much"}}}, "'much' is not a quantity"),
        (
            {"resources": {"limits": []}, "command": ["torchrun", "--nproc-per-node=gpu", "x"]},
            "limits is not an object",
        ),
        ({"resources": {"requests": {"cpu": "?"}}}, "'?' is not a quantity"),
        ({"env": [{"value": "x"}, "A=b"]}, "env is not a list of objects"),
    ],
)
def test_containers_that_holdfast_cannot_start_are_refused(fields: Pod, reason: str) -> None:
    assert reason in refusal(pod(container(**fields)))


@pytest.mark.parametrize(
    "path", ["/opt/holdfast", "/opt/holdfast/", "/run/holdfast/logs", "//var/lib/holdfast/checkpoints"]
)
def test_a_user_mount_at_one_of_holdfasts_paths_is_refused(path: str) -> None:
    given = container(volumeMounts=[{"name": "data", "mountPath": path}])
    assert "a path that Holdfast needs" in refusal(pod(given))


@pytest.mark.parametrize("path", ["/run", "/opt", "/opt/holdfast-data", "/"])
def test_other_mounts_are_accepted(path: str) -> None:
    mount = {"name": "data", "mountPath": path}
    assert training(pod(container(volumeMounts=[mount])))["volumeMounts"][0] == mount


@pytest.mark.parametrize("key", pod_layout.STATIC_POD_ANNOTATIONS)
def test_static_pods_are_refused(key: str) -> None:
    given = pod()
    given["metadata"]["annotations"][key] = "file"
    assert "the kubelet creates this pod from a file" in refusal(given)


@pytest.mark.parametrize("namespace", ["kube-system", "holdfast-system"])
def test_system_pods_are_never_injected(namespace: str) -> None:
    assert refusal(pod(), replace(CONTEXT, namespace=namespace)) == f"pods in {namespace} are never injected"


def test_a_refused_pod_is_unchanged_except_for_an_annotation_with_the_reason() -> None:
    given = pod(annotations={"hang-flor": "1s"})
    found = inject(given, CONTEXT)
    assert isinstance(found, Refused)
    assert found.why == "holdfast.dev/hang-flor: unknown annotation: did you mean 'holdfast.dev/hang-floor'?"
    path = "/metadata/annotations/holdfast.dev~1not-injected"
    assert found.patch == [{"op": "add", "path": path, "value": found.why}]
    assert patched(given, found.patch) == found.pod
    again = inject(found.pod, CONTEXT)
    assert isinstance(again, Refused)
    assert (again.pod, again.patch) == (found.pod, [])


def test_a_refusal_is_removed_once_the_pod_is_injected() -> None:
    given = pod()
    given["metadata"]["annotations"][pod_layout.NOT_INJECTED] = "for some reason"
    assert pod_layout.NOT_INJECTED not in injected(given).pod["metadata"]["annotations"]


AWAY = [
    {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
]


@pytest.mark.parametrize("before", [[], [{**each, "tolerationSeconds": 300} for each in AWAY]])
def test_a_pod_leaves_an_unresponsive_node_after_half_a_minute(before: list[Pod]) -> None:
    spot = {"key": "spot", "operator": "Exists"}
    assert injected(pod(tolerations=[spot, *before])).pod["spec"]["tolerations"] == [spot, *AWAY]


@pytest.mark.parametrize(
    "own",
    [
        [{"operator": "Exists"}],
        [{**AWAY[0], "tolerationSeconds": 60}, {**AWAY[1], "tolerationSeconds": 600}],
        [{"key": AWAY[0]["key"], "operator": "Exists"}, {**AWAY[1], "effect": ""}],
    ],
)
def test_the_users_own_tolerations_for_such_nodes_are_kept(own: list[Pod]) -> None:
    assert injected(pod(tolerations=own)).pod["spec"]["tolerations"] == own


def test_a_toleration_of_another_effect_does_not_affect_leaving() -> None:
    own = {"key": AWAY[0]["key"], "operator": "Exists", "effect": "NoSchedule"}
    assert injected(pod(tolerations=[own])).pod["spec"]["tolerations"] == [own, *AWAY]


def test_unrelated_fields_are_not_changed() -> None:
    given = pod(
        container(
            restartPolicy="Never", restartPolicyRules=[{"action": "Restart"}], livenessProbe={"exec": {}}
        ),
        hostNetwork=True,
        shareProcessNamespace=True,
        imagePullSecrets=[{"name": "s"}],
        schedulingGates=[{"name": "g"}],
        restartPolicy="Never",
    )
    before = copy.deepcopy(given)
    found = injected(given).pod
    assert given == before
    assert {key: found["spec"][key] for key in given["spec"] if key != "containers"} == {
        key: value for key, value in given["spec"].items() if key != "containers"
    }
    (after,), (own,) = found["spec"]["containers"], given["spec"]["containers"]
    assert {key: after[key] for key in own if key != "command"} == {
        key: value for key, value in own.items() if key != "command"
    }


def test_the_patch_only_adds_and_replaces() -> None:
    found = injected(pod(container(args=["x"]), volumes=[{"name": "a"}]))
    assert {each["op"] for each in found.patch} == {"add", "replace"}
    assert patched(pod(container(args=["x"]), volumes=[{"name": "a"}]), found.patch) == found.pod


def test_the_supervisor_finds_the_pod_by_a_label_beside_those_of_the_user() -> None:
    given = pod()
    given["metadata"]["labels"] = {"app": "llama"}
    for each in (given, pod()):
        expected = {**each["metadata"].get("labels", {}), "holdfast.dev/member": "true"}
        assert injected(each).pod["metadata"]["labels"] == expected


def test_an_annotation_records_what_was_done() -> None:
    found = injected(pod(container(("torchrun", "--nproc-per-node=2", "x.py"))))
    annotations = found.pod["metadata"]["annotations"]
    assert json.loads(annotations[pod_layout.INJECTED]) == {
        "container": "main",
        "digest": found.record.digest,
        "members": None,
        "nproc": 2,
        "version": "0.1.0",
    }
    assert record_of(annotations) == found.record


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "{}", '{"version":"1","container":"a","nproc":"2","members":null,"digest":""}',
     '{"version":"1","container":"a","nproc":0,"members":null,"digest":""}',
     '{"version":"1","container":"a","nproc":true,"members":null,"digest":""}',
     '{"version":"1","container":"a","nproc":1,"members":-1,"digest":""}',
     '{"version":1,"container":"a","nproc":1,"members":1,"digest":""}',
     '{"version":"1","container":"a","nproc":1,"members":1,"digest":"","x":NaN}',
     "[" * 5_000, '{"x":' * 2_000, '{"nproc":' + "9" * 5_000 + "}",
     '{"version":"1","container":"a","nproc":1,"members":1,"digest":"' + "x" * 16_384 + '"}'],
)  # fmt: skip
def test_an_annotation_that_holdfast_did_not_write_is_not_a_record(text: str) -> None:
    assert record_of({pod_layout.INJECTED: text}) is None
    assert record_of({}) is None


def test_the_digest_changes_only_with_the_additions() -> None:
    def digest(given: Pod, image: str = CONTEXT.image) -> str:
        return injected(given, replace(CONTEXT, image=image)).record.digest

    first = digest(pod())
    assert digest(pod(volumes=[{"name": "data"}], priority=3)) == first
    assert digest(pod(container(("python", "other.py")))) != first
    assert digest(pod(), image="holdfast:other") != first
    assert digest(pod(annotations={"hang-factor": "4"})) != first


def test_a_second_call_changes_nothing() -> None:
    first = injected(pod(container(("torchrun", "--nproc-per-node=2", "--nnodes=3", "x.py"))))
    again = injected(first.pod)
    assert (again.pod, again.patch, again.record) == (first.pod, [], first.record)


def test_defaults_that_the_api_server_fills_in_are_kept() -> None:
    found = injected(pod(container(args=["x"]))).pod
    del found["spec"]["containers"][0]["args"]  # an empty list is not kept
    for each in found["spec"]["initContainers"]:
        each.update(terminationMessagePath="/dev/termination-log", terminationMessagePolicy="File")
        each["volumeMounts"].append({"name": "kube-api-access", "mountPath": "/var/run/secrets"})
        each["env"].insert(0, {"name": "ADDED", "value": "by another webhook"})
    named(found["spec"]["volumes"], pod_layout.IDENTITY_VOLUME)["projected"]["defaultMode"] = 420
    for each in found["spec"]["containers"][0]["env"]:
        if "valueFrom" in each:
            each["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
    assert injected(found).patch == []


def test_after_another_webhook_holdfasts_containers_are_last_again_and_fit_the_changed_pod() -> None:
    found = injected(pod(container(resources=GUARANTEED), annotations={"state-size": "1Gi"})).pod
    found["spec"]["initContainers"].append({"name": "istio-init", "resources": resources({"cpu": "1"})})
    found["spec"]["containers"].insert(0, {"name": "istio-proxy", "resources": resources({"cpu": "2"})})
    again = injected(found)
    assert [each["name"] for each in again.pod["spec"]["initContainers"]] == [
        "istio-init", "holdfast-setup", "holdfast-sidecar",
    ]  # fmt: skip
    assert sidecar(again.pod)["resources"] == {"requests": {"cpu": "100m"}, "limits": {"cpu": "900m"}}
    assert patched(found, again.patch) == again.pod
    assert injected(again.pod).patch == []


def test_a_new_version_of_holdfast_takes_over_a_copied_pod() -> None:
    copied = injected(pod(container(("torchrun", "--nproc-per-node=2", "x.py")))).pod
    new = injected(copied, replace(CONTEXT, image="holdfast:new", version="2"))
    assert sidecar(new.pod)["image"] == "holdfast:new"
    assert (new.record.version, new.record.nproc) == ("2", 2)
    assert len(new.pod["spec"]["initContainers"]) == 2


def test_a_launcher_whose_annotation_is_missing_is_not_wrapped_again() -> None:
    for line in (("python", "x.py"), ("bash", "-c", "cd /a && python x.py")):
        found = injected(pod(container(line))).pod
        del found["metadata"]["annotations"][pod_layout.INJECTED]
        for kind in ("initContainers", "volumes"):
            del found["spec"][kind]
        found["spec"]["containers"][0]["volumeMounts"] = []
        assert "but holdfast.dev/injected is missing" in refusal(found)


def test_an_annotation_without_a_launcher_is_ignored() -> None:
    given = pod()
    given["metadata"]["annotations"][pod_layout.INJECTED] = injected(pod()).record.text()
    assert injected(given).pod == injected(pod()).pod


def test_a_shell_around_the_command_is_kept() -> None:
    line = ("bash", "-lc", "cd /app && exec torchrun --nproc_per_node=2 train.py --lr $LR")
    found = injected(pod(container(line)))
    (trains,) = found.pod["spec"]["containers"]
    start = f"cd /app && exec python3 -c '{launch_commands.START}' /opt/holdfast/lib --warm auto --"
    assert trains["command"] == ["bash", "-lc", f"{start} python3 -u train.py --lr $LR"]
    assert injected(found.pod).patch == []


def test_a_patch_contains_only_differences() -> None:
    before = {"a": [{}, {"b": 2, "gone": 0}], "c/d": {"~": 1}, "e": True, "f": [{}, {}, {}], "h": [1, 2]}
    after = {"a": [{}, {"b": 3}, {}], "c/d": {"~": 2}, "e": 1, "f": [{}], "g": None, "h": [1]}
    patch = json_patch(before, after)
    assert patch == [
        {"op": "replace", "path": "/a/1/b", "value": 3},
        {"op": "remove", "path": "/a/1/gone"},
        {"op": "add", "path": "/a/2", "value": {}},
        {"op": "replace", "path": "/c~1d/~0", "value": 2},
        {"op": "replace", "path": "/e", "value": 1},
        {"op": "remove", "path": "/f/2"},
        {"op": "remove", "path": "/f/1"},
        {"op": "replace", "path": "/h", "value": [1]},
        {"op": "add", "path": "/g", "value": None},
    ]
    assert patched(before, patch) == after


@pytest.mark.parametrize(("filler", "is_noted"), [(100_000, True), ((256 << 10) - 700, False)])
def test_the_reason_for_a_refusal_does_not_make_the_api_server_refuse_the_pod(
    filler: int, is_noted: bool
) -> None:
    notes = {
        pod_layout.INJECT: "true",
        "filler": "x" * filler,
        **{f"holdfast.dev/x{n}": "" for n in range(20)},
    }
    given = {
        "metadata": {"annotations": notes},
        "spec": {"containers": [{"name": "t", "command": ["python"]}]},
    }
    found = inject(given, CONTEXT)
    assert isinstance(found, Refused)
    assert len(found.why) == MAX_WHY
    after = found.pod["metadata"]["annotations"]
    assert after.get(pod_layout.NOT_INJECTED) == (found.why if is_noted else None)
    assert sum(len(key) + len(value) for key, value in after.items()) <= 256 << 10
    assert bool(found.patch) == is_noted


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [100, 400, 700, 900])
def test_a_pod_that_is_nested_deeply_is_injected_or_refused(depth: int) -> None:
    """The parser of the webhook accepts some 900 levels. Copying them takes more stack than parsing them."""
    found = inject(pod(container(extra=nested(depth))), CONTEXT)
    if depth > 500:
        assert isinstance(found, Refused)
        assert found.why == "the pod is nested too deeply"
        assert found.pod["metadata"]["annotations"][pod_layout.NOT_INJECTED] == found.why
        assert [each["path"] for each in found.patch] == ["/metadata/annotations/holdfast.dev~1not-injected"]


def test_a_record_that_is_nested_deeply_does_not_prevent_an_injection() -> None:
    given = pod()
    given["metadata"]["annotations"][pod_layout.INJECTED] = "[" * 5_000
    assert injected(given).record.container == "main"


@pytest.mark.parametrize("kind", ["initContainers", "volumes", "containers"])
def test_a_name_that_is_not_a_text_is_refused(kind: str) -> None:
    given = pod()
    if kind == "containers":
        given["spec"]["containers"][0]["env"] = [{"name": []}]
    else:
        given["spec"][kind] = [{"name": {}}]
    assert refusal(given) == "name is not a string"


def test_the_time_to_choose_a_container_is_proportional_to_their_number() -> None:
    def choosing(count: int) -> Callable[[], object]:
        given = pod(*({"name": f"c{n}"} for n in range(count)))
        return lambda: refusal(given)

    assert growth(choosing(1_500), choosing(6_000)) < 8


@pytest.mark.parametrize(("nnodes", "noted"), [("1:4", True), ("2:2", False), ("2", False)])
def test_a_range_of_nodes_is_noted_because_a_run_keeps_its_size(nnodes: str, noted: bool) -> None:
    result = injected(pod(container(("torchrun", f"--nnodes={nnodes}", "train.py"))))
    assert (f"--nnodes={nnodes}: a run keeps" in " ".join(result.notes)) is noted
