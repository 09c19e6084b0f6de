from __future__ import annotations

import importlib
from typing import Any

import pytest

from holdfast.errors import BadInput
from supervisor.admission import manifest, pod_layout
from supervisor.admission.manifest import ManifestNote, inject_manifest
from tests.unit.supervisor.admission.pods import CONTEXT, injected, pod

yaml = pytest.importorskip("yaml")

TEMPLATE = """\
metadata:
  annotations:
    holdfast.dev/inject: "true"  # opts in
    holdfast.dev/checkpoints: pvc://data
spec:
  restartPolicy: Never
  containers:
  - name: pytorch
    image: trainer
    command: [torchrun, --nproc-per-node=2, train.py]
"""
OTHERS = """\
# A claim that stays as it is.
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name:   data}   # odd spaces
spec:   {accessModes: [ReadWriteMany]}
"""


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


def workload(kind: str, before: str, by: int, template: str = TEMPLATE) -> str:
    return f"apiVersion: x/v1\nkind: {kind}\nmetadata:\n  name: llama\n{before}{indented(template, by)}"


def loaded(text: str) -> list[Any]:
    return [each for each in yaml.safe_load_all(text) if each is not None]


def templates(value: Any) -> list[Any]:
    """Return all parts of a document that have containers."""
    if isinstance(value, list):
        return [found for each in value for found in templates(each)]
    if not isinstance(value, dict):
        return []
    if "containers" in value.get("spec", {}):
        return [value]
    return [found for each in value.values() for found in templates(each)]


KINDS = [
    ("Pod", "", 0),
    ("Deployment", "spec:\n  template:\n", 4),
    ("StatefulSet", "spec:\n  template:\n", 4),
    ("ReplicaSet", "spec:\n  template:\n", 4),
    ("DaemonSet", "spec:\n  template:\n", 4),
    ("Job", "spec:\n  parallelism: 2\n  template:\n", 4),
    ("CronJob", "spec:\n  jobTemplate:\n    spec:\n      template:\n", 8),
    ("JobSet", "spec:\n  replicatedJobs:\n  - name: w\n    template:\n      spec:\n        template:\n", 10),
    ("PyTorchJob", "spec:\n  pytorchReplicaSpecs:\n    Worker:\n      replicas: 2\n      template:\n", 8),
    ("TFJob", "spec:\n  tfReplicaSpecs:\n    Worker:\n      template:\n", 8),
    ("MPIJob", "spec:\n  mpiReplicaSpecs:\n    Launcher:\n      template:\n", 8),
    ("LeaderWorkerSet", "spec:\n  leaderWorkerTemplate:\n    size: 2\n    workerTemplate:\n", 6),
    ("Job", "spec:\n  tasks:\n  - name: w\n    replicas: 2\n    template:\n", 6),  # Volcano's
    ("RayCluster", "spec:\n  workerGroupSpecs:\n  - groupName: w\n    template:\n", 6),
    ("RayJob", "spec:\n  rayClusterSpec:\n    headGroupSpec:\n      template:\n", 8),
    ("SomeOperator", "spec:\n  deep:\n  - podTemplate:\n", 6),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "by"), KINDS)
def test_the_pod_template_of_each_kind_is_injected(kind: str, before: str, by: int) -> None:
    text = workload(kind, before, by)
    if kind == "Pod":
        text = "apiVersion: v1\nkind: Pod\n" + TEMPLATE.replace("metadata:", "metadata:\n  name: llama")
    after, notes = inject_manifest(text, CONTEXT)
    (found,) = templates(loaded(after))
    assert found["metadata"]["annotations"][pod_layout.INJECTED]
    assert found["spec"]["containers"][0]["command"][:2] == ["python3", "-c"]
    assert [each["name"] for each in found["spec"]["initContainers"]] == list(pod_layout.CONTAINERS)
    assert [each.injected for each in notes] == [True]
    assert notes[0].place.startswith(f"{kind} llama")
    assert notes[0].text == "injected, 2 ranks in the container pytorch"


def test_the_result_equals_that_of_the_injector_for_the_template() -> None:
    after, _ = inject_manifest(workload("Job", "spec:\n  template:\n", 4), CONTEXT)
    assert loaded(after)[0]["spec"]["template"] == injected(yaml.safe_load(TEMPLATE)).pod


def test_injecting_a_manifest_twice_is_the_same_as_once() -> None:
    once, _ = inject_manifest(OTHERS + "---\n" + workload("Job", "spec:\n  template:\n", 4), CONTEXT)
    assert inject_manifest(once, CONTEXT)[0] == once


def test_documents_that_are_not_injected_stay_byte_for_byte() -> None:
    job = workload("Job", "spec:\n  template:\n", 4)
    asleep = job.replace('"true"', '"false"')
    text = f"# Ours\n---\n{OTHERS}--- # the job\n{job}---\r\n{asleep}---\n\n# the end\n"
    after, notes = inject_manifest(text, CONTEXT)
    assert after.startswith(f"# Ours\n---\n{OTHERS}--- # the job\napiVersion")
    assert after.endswith(f"---\r\n{asleep}---\n\n# the end\n")
    assert len(notes) == 1
    assert inject_manifest(OTHERS, CONTEXT) == (OTHERS, ())
    for empty in ("", "---\n", "# nothing\n", "%YAML 1.2\n---\na: 1\n...\n", "--- {a: 1}\n---\n- 1\n"):
        assert inject_manifest(empty, CONTEXT) == (empty, ())


def test_a_document_that_starts_on_its_separator_line_is_also_injected() -> None:
    text = yaml.safe_dump(
        {**pod(), "metadata": {**pod()["metadata"], "name": "a"}}, default_flow_style=True, width=9999
    )
    after, notes = inject_manifest(f"--- {text}", CONTEXT)
    assert after.startswith("---\napiVersion: v1\n")
    assert notes[0].place == "Pod a"


def test_a_refused_template_is_unchanged_and_the_note_says_why() -> None:
    text = workload("Job", "spec:\n  template:\n", 4).replace("torchrun", "./start")
    after, notes = inject_manifest(text, CONTEXT)
    assert after == text
    assert [each.injected for each in notes] == [False]
    assert str(notes[0]).startswith(
        "Job llama spec.template: not injected: Holdfast does not know how './start'"
    )


def test_an_annotation_on_the_workload_instead_of_its_pods_is_reported() -> None:
    template = TEMPLATE.replace('    holdfast.dev/inject: "true"  # opts in\n', "")
    text = workload("Job", "spec:\n  template:\n", 4, template).replace(
        "  name: llama\n", "  name: llama\n  annotations: {holdfast.dev/inject: 'true'}\n"
    )
    assert inject_manifest(text, CONTEXT) == (
        text,
        (
            ManifestNote(
                "Job llama spec.template",
                "not injected: holdfast.dev/inject is an annotation of the Job: move it to the pod template",
                injected=False,
                requested=False,
            ),
        ),
    )


@pytest.mark.parametrize(
    ("spec", "command", "ranks"),
    [
        ("  nprocPerNode: '4'\n", "[torchrun, x.py]", 4),
        ("  nprocPerNode: 4\n", "[torchrun, x.py]", 4),
        ("  nprocPerNode: '4'\n  elasticPolicy: {nProcPerNode: 3}\n", "[torchrun, x.py]", 3),
        ("  elasticPolicy: {minReplicas: 1}\n", "[torchrun, x.py]", 8),
        ("", "[torchrun, x.py]", 8),  # the operator's default is auto
        ("  nprocPerNode: '4'\n", "[torchrun, --nproc-per-node=2, x.py]", 2),
        ("  nprocPerNode: '4'\n", "[python, x.py]", 1),
    ],
)
def test_a_pytorchjob_has_the_ranks_that_its_operator_passes_to_torchrun(
    spec: str, command: str, ranks: int
) -> None:
    template = TEMPLATE.replace("[torchrun, --nproc-per-node=2, train.py]", command)
    template += "    resources: {limits: {nvidia.com/gpu: 8}}\n"
    head = f"spec:\n{spec}  pytorchReplicaSpecs:\n    Worker:\n      template:\n"
    text, notes = inject_manifest(workload("PyTorchJob", head, 8, template), CONTEXT)
    assert notes[0].text.startswith(f"injected, {ranks} rank")
    assert inject_manifest(text, CONTEXT)[0] == text


def test_an_object_that_opts_in_without_a_pod_template_is_reported() -> None:
    text = "kind: TrainJob\nmetadata: {name: llama}\nspec:\n  overrides:\n  - &a\n    - metadata:\n"
    text += "        annotations: {holdfast.dev/inject: 'true'}\n  - *a\n"
    assert inject_manifest(text, CONTEXT) == (
        text,
        (
            ManifestNote(
                "TrainJob llama",
                "not injected: its pod template is in another object,"
                " so only the webhook can inject its pods",
                injected=False,
            ),
        ),
    )
    assert inject_manifest(text.replace("'true'", "'false'"), CONTEXT)[1] == ()


def test_an_object_that_opts_out_gets_no_advice_to_move_its_annotation() -> None:
    text = "kind: Pod\n" + TEMPLATE.replace('"true"', '"false"')
    assert inject_manifest(text, CONTEXT) == (text, ())


def test_the_objects_of_a_list_are_injected_and_named() -> None:
    items = [
        pod(),
        {"kind": "Service", "spec": {}},
        {"kind": "Job", "metadata": {"name": "b"}, "spec": {"template": pod()}},
        3,
    ]
    after, notes = inject_manifest(yaml.safe_dump({"kind": "List", "items": items}), CONTEXT)
    assert len(templates(loaded(after))) == 2
    assert [each.place for each in notes if "injected" in each.text] == [
        "Pod train-",
        "Job b spec.template",
    ]


def test_each_of_several_templates_has_its_own_note() -> None:
    text = workload("PyTorchJob", "spec:\n  pytorchReplicaSpecs:\n    Master:\n      template:\n", 8)
    text += "    Worker:\n      template:\n" + indented(TEMPLATE.replace("torchrun", "mpirun"), 8)
    after, notes = inject_manifest(text, CONTEXT)
    assert len(templates(loaded(after))) == 2
    assert [(each.place.rpartition(".")[0], each.injected) for each in notes] == [
        ("PyTorchJob llama spec.pytorchReplicaSpecs.Master", True),
        ("PyTorchJob llama spec.pytorchReplicaSpecs.Worker", False),
    ]


def test_the_namespace_of_the_object_is_used() -> None:
    text = workload("Job", "  namespace: kube-system\nspec:\n  template:\n", 4)
    after, notes = inject_manifest(text, CONTEXT)
    assert after == text
    assert notes[0].text == "not injected: pods in kube-system are never injected"


def test_string_values_stay_strings() -> None:
    template = (
        TEMPLATE
        + """\
    env:
    - {name: DATE, value: 2026-11-25}
    - {name: ON, value: "on"}
    - {name: NUMBER, value: "1e3"}
    - name: SCRIPT
      value: |
        line one
        line two: 3
    - &shared {name: SHARED, value: "0777"}
    - *shared
"""
    )
    after, _ = inject_manifest(workload("Job", "spec:\n  template:\n", 4, template), CONTEXT)
    found = yaml.load(after, Loader=manifest._loader(yaml))["spec"]["template"]["spec"]["containers"][0][
        "env"
    ]
    assert [each.get("value") for each in found[:6]] == [
        "2026-11-25", "on", "1e3", "line one\nline two: 3\n", "0777", "0777",
    ]  # fmt: skip
    assert "&" not in after.replace("&&", "")
    assert "          value: |\n            line one\n" in after


@pytest.mark.parametrize(
    "text",
    ["a: [1", "a: b: c", "\t- a", "{{ .Values.x }}: {{ y }}", "a: *nothing", "!!python/object:os.x {}"],
)
def test_invalid_yaml_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match=r"^the manifest is not YAML: .") as raised:
        inject_manifest(text, CONTEXT)
    assert "\n" not in str(raised.value)


def test_an_endlessly_nested_document_is_bad_input_or_unchanged() -> None:
    endless = "&a {template: *a, spec: [*a]}"
    assert inject_manifest(endless, CONTEXT) == (endless, ())
    with pytest.raises(BadInput):
        inject_manifest("[" * 400, CONTEXT)


def test_without_pyyaml_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        BadInput, match=r"PyYAML is needed to read manifests: pip install 'holdfast\[cluster\]'"
    ):
        inject_manifest("", CONTEXT)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ('annotations: {holdfast.dev/injekt: "true"}', "holdfast.dev/injekt: unknown: did you mean"),
        ('annotations: {holdfast.io/inject: "true"}', "holdfast.io/inject: unknown: did you mean"),
        ('labels: {holdfast.dev/inject: "true"}', "is set as a label, but must be an annotation"),
        ("annotations: {holdfast.dev/hang-floor: 3m}", "has no effect without the annotation"),
    ],
)
def test_a_request_that_was_misspelt_or_forgotten_is_reported(metadata: str, why: str) -> None:
    template = TEMPLATE.replace(TEMPLATE[: TEMPLATE.index("spec:")], f"metadata: {{{metadata}}}\n")
    text = workload("Job", "spec:\n  template:\n", 4, template)
    after, (note,) = inject_manifest(text, CONTEXT)
    assert after == text
    assert why in note.text
    assert not note.injected


@pytest.mark.parametrize(
    "metadata",
    ["{}", "{annotations: {holdfast.dev/inject: 'false', holdfast.dev/warm: cold}}", "{labels: {a: b}}"],
)
def test_a_template_that_was_not_meant_to_request_holdfast_is_not_reported(metadata: str) -> None:
    template = TEMPLATE.replace(TEMPLATE[: TEMPLATE.index("spec:")], f"metadata: {metadata}\n")
    text = workload("Job", "spec:\n  template:\n", 4, template)
    assert inject_manifest(text, CONTEXT) == (text, ())


def test_a_template_with_an_anchor_is_injected_at_each_of_its_places() -> None:
    text = (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: llama}\nspec:\n"
        "  nprocPerNode: '2'\n  pytorchReplicaSpecs:\n    Master:\n      template: &same\n"
        + indented(TEMPLATE, 8)
        + "    Worker:\n      template: *same\n"
    )
    after, notes = inject_manifest(text, CONTEXT)
    assert [each.place for each in notes if "ranks" in each.text] == [
        "PyTorchJob llama spec.pytorchReplicaSpecs.Master.template",
        "PyTorchJob llama spec.pytorchReplicaSpecs.Worker.template",
    ]
    (document,) = loaded(after)
    master, worker = (each["template"] for each in document["spec"]["pytorchReplicaSpecs"].values())
    assert master == worker
    assert pod_layout.INJECTED in worker["metadata"]["annotations"]


def test_anchors_that_refer_to_anchors_are_refused_before_they_are_expanded() -> None:
    lines = ["a0: &a0 {x: {}}", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    with pytest.raises(BadInput, match=r"ConfigMap huge has more than 100,000 parts"):
        inject_manifest("kind: ConfigMap\nmetadata: {name: huge}\n" + "\n".join(lines), CONTEXT)


def test_the_problem_that_a_check_finds_is_reported() -> None:
    text = workload("Job", "spec:\n  template:\n", 4)
    seen: list[str] = []

    def check(owner: dict[str, Any], path: str, template: dict[str, Any]) -> str:
        seen.append(path)
        assert pod_layout.INJECTED in template["metadata"]["annotations"]
        return f"{owner['kind']} is too small"

    _, notes = inject_manifest(text, CONTEXT, check)
    assert notes[-1] == ManifestNote("Job llama spec.template", "Job is too small", injected=False)
    assert seen == [" spec.template"]
