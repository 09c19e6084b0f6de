from __future__ import annotations

import re

import pytest

from supervisor.cluster.adoption.workload_kinds import (
    InvalidKindTable,
    PodSource,
    WorkloadKind,
    read,
    shipped,
)

KINDS = shipped()
ROWS = (*KINDS.owners, *KINDS.pods)
ROW = (
    '[[kind]]\nkind = "X"\ngroups = ["x.org"]\nfailure = "f"\nsuccess = "s"\nsource = "o"\nafter_stop = "a"\n'
)


def name(row: WorkloadKind) -> str:
    return f"{row.kind}.{row.groups[0]}/{','.join(row.versions)}"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_every_row_states_what_the_owner_counts_and_names_its_source(row: WorkloadKind) -> None:
    assert row.failure.endswith(".")
    assert row.success.endswith(".")
    assert row.after_stop.endswith(".")
    assert row.halt.rpartition(".")[2] in ("", "suspend", "replicas")
    assert row.source


@pytest.mark.parametrize("row", KINDS.owners, ids=name)
def test_every_owner_has_a_size_or_names_the_owner_below_that_has_it(row: WorkloadKind) -> None:
    assert bool(row.size) != bool(row.below)
    assert not row.below or any(other.kind == row.below and other.size for other in KINDS.owners)
    assert bool(row.size) == bool(row.templates)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_replica_types_are_in_lower_case_and_either_train_or_do_not(row: WorkloadKind) -> None:
    types = (*row.trains, *row.idle)
    assert len(set(types)) == len(types)
    assert all(each == each.lower() for each in types)
    assert row.parts or not (row.trains or row.part_name)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_rank_that_a_controller_sets_is_never_an_index(row: WorkloadKind) -> None:
    sources = {source for dimension in row.index for source in dimension} | set(KINDS.fallback_index)
    variables = {source.key for source in sources if source.place == "env"}
    assert not variables & {"RANK", "WORLD_SIZE", "LOCAL_RANK", *row.ignored}


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_paths_are_fields_joined_by_dots(row: WorkloadKind) -> None:
    pairs = [path for pair in row.agree for path in pair]
    for path in (row.parts, row.part_name, row.halt, *row.size, *pairs, *row.templates):
        assert re.fullmatch(r"[A-Za-z]*(\.[A-Za-z]+)*", path)


def test_each_kind_of_a_version_has_one_row() -> None:
    found = [
        (row.kind, group, version)
        for row in KINDS.owners
        for group in row.groups
        for version in row.versions or [""]
    ]
    assert len(set(found)) == len(found)


def test_a_row_is_found_by_the_group_and_not_by_the_kind_alone() -> None:
    ours, volcanos = KINDS.find("batch/v1", "Job"), KINDS.find("batch.volcano.sh/v1alpha1", "Job")
    assert ours is not None
    assert volcanos is not None
    assert (ours.parts, volcanos.parts) == ("", "spec.tasks")
    assert KINDS.find("v1", "Job") is None


def test_a_row_applies_only_to_the_versions_that_it_names() -> None:
    old, new = KINDS.find("kubeflow.org/v1", "MPIJob"), KINDS.find("kubeflow.org/v2beta1", "MPIJob")
    assert old is not new
    assert KINDS.find("kubeflow.org/v3", "MPIJob") is None


def test_pods_and_supervisions_are_links_between_a_pod_and_its_workload() -> None:
    assert KINDS.is_link("v1", "Pod")
    assert KINDS.is_link("holdfast.dev/v1alpha1", "Supervision")
    assert not KINDS.is_link("apps/v1", "Pod")
    assert KINDS.find("v1", "Pod") is None


def test_a_source_names_its_place() -> None:
    row = read(ROW + 'index = [["label:a/b", "name:"], ["env:N"]]').owners[0]
    assert row.index == ((PodSource("label", "a/b"), PodSource("name", "")), (PodSource("env", "N"),))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kind = [", "workload_kinds.toml"),
        ('[[kind]]\nkind = "X"', "missing: ['groups', 'failure', 'success', 'source', 'after_stop']"),
        (ROW + "sise = []", "unknown: ['sise']"),
        (ROW + 'size = "spec.n"', "X.size: 'spec.n': expected list"),
        (ROW + "size = [1]", "X.size: 1: expected str"),
        (ROW + 'size_default = "1"', "X.size_default: '1': expected int"),
        (ROW + 'index = ["label:a"]', "X.index: 'label:a': expected list"),
        (ROW + 'index = [["lable:a"]]', "X.index: 'lable:a': expected PLACE:NAME"),
        (ROW + 'index = [["label:"]]', "X.index: 'label:'"),
        (ROW + 'index = [["name:a"]]', "X.index: 'name:a'"),
        (
            ROW + 'ignored = ["RANK"]\nindex = [["env:RANK"]]',
            "RANK is listed both as a source and as ignored",
        ),
        (ROW + 'agree = ["a"]', "X.agree: ['a']: expected dict"),
    ],
)
def test_a_table_with_a_mistake_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidKindTable, match=re.escape(told)):
        read(text)
