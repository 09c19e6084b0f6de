"""After a stop, the user learns what the owner does next, and gets the commands that end or suspend it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from supervisor.cli.on_cluster.stopped_owner import follow_up
from supervisor.cluster.adoption.workload_kinds import WorkloadKind, shipped


def spec(kind: str, version: str) -> dict[str, Any]:
    return {"owner": {"apiVersion": version, "kind": kind, "name": "gpt", "uid": "u"}}


@pytest.mark.parametrize(
    ("kind", "version", "suspend"),
    [
        ("Job", "batch/v1", 'patch job/gpt --type merge -p \'{"spec": {"suspend": true}}\''),
        ("StatefulSet", "apps/v1", "scale statefulset/gpt --replicas=0"),
        (
            "PyTorchJob",
            "kubeflow.org/v1",
            "patch pytorchjob.kubeflow.org/gpt --type merge"
            ' -p \'{"spec": {"runPolicy": {"suspend": true}}}\'',
        ),
        (
            "JobSet",
            "jobset.x-k8s.io/v1alpha2",
            'patch jobset.jobset.x-k8s.io/gpt --type merge -p \'{"spec": {"suspend": true}}\'',
        ),
    ],
)
def test_the_commands_delete_or_suspend_the_owner_of_this_kind(kind: str, version: str, suspend: str) -> None:
    found = follow_up(spec(kind, version), "research", "gpt-2")
    row = shipped().find(version, kind)
    assert row is not None
    assert found.does == row.after_stop
    assert found.suspend == f"kubectl -n research {suspend}"
    assert found.delete == f"kubectl -n research delete {found.owner}"
    assert found.train_again == (
        'kubectl -n research patch supervision/gpt-2 --type merge -p \'{"spec": {"stop": ""}}\''
    )


def test_the_output_says_first_what_happens_next() -> None:
    first, delete, suspend, again = follow_up(spec("Job", "batch/v1"), "research", "gpt", "prod").lines()
    assert first == (
        "job/gpt continues to exist: it creates new pods in place of the pods that have ended,"
        " until spec.backoffLimit is used up, and then fails."
    )
    assert delete == "to end job/gpt:             kubectl --context prod -n research delete job/gpt"
    assert suspend.startswith("to suspend job/gpt:         kubectl --context prod -n research patch job/gpt ")
    assert again.startswith(
        "before it may train again:  kubectl --context prod -n research patch supervision/"
    )


@pytest.mark.parametrize("row", shipped().owners, ids=lambda row: f"{row.kind}.{row.groups[0]}")
def test_every_kind_has_commands_that_a_shell_reads_as_whole_words(row: WorkloadKind) -> None:
    version = f"{row.groups[0]}/{(row.versions or ('v1',))[0]}"
    found = follow_up(spec(row.kind, version), "research", "gpt")
    assert bool(found.suspend) == bool(row.halt)
    for command in filter(None, (found.delete, found.suspend, found.train_again)):
        words = shlex.split(command)
        if "-p" in words:
            assert json.loads(words[-1])["spec"]


def test_pods_without_an_owner_are_deleted_by_the_user() -> None:
    found = follow_up({"owner": {"kind": "", "name": "gpt"}}, "research", "gpt")
    assert (found.owner, found.suspend, found.train_again) == ("", "", "")
    assert found.delete == "kubectl -n research delete pod POD ..."
    assert len(found.lines()) == 2


def test_an_owner_that_a_user_has_edited_is_quoted() -> None:
    found = follow_up({"owner": {"kind": "Weird", "name": "a; rm -rf /", "uid": "u"}}, "research", "gpt")
    assert shlex.split(found.delete)[-1] == "weird/a; rm -rf /"
    assert found.suspend == ""
