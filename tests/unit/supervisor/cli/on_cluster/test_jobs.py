from __future__ import annotations

import time

import pytest

from supervisor.cli.on_cluster import jobs
from tests.unit.supervisor.cli.on_cluster.stand_in import ApiStandIn, supervision
from tests.unit.supervisor.cli.on_cluster.test_connection import Printed
from tests.unit.supervisor.cli.on_cluster.test_job_source import document, printed
from tests.unit.supervisor.status_samples import incident, status

FIELDS = {
    "schema", "namespace", "name", "kind", "members", "nproc_per_node", "phase", "generation", "step", "ettr",
    "incidents", "last_incident", "exit_code", "created", "updated", "age_s", "current",
    "standbys",
}  # fmt: skip


def test_the_jobs_of_one_or_all_namespaces_are_listed(capsys: Printed, server: ApiStandIn) -> None:
    server.job("b")
    server.job("a", incidents=2, recent=[incident(1), incident(2)])
    server.job("c", "other", phase="ended", view=status(exit_code=3))
    head, *rows = printed("jobs", capsys).splitlines()
    assert head.split()[:3] == ["NAME", "KIND", "RANKS"]
    assert [each.split()[0] for each in rows] == ["a", "b"]
    assert rows[0].endswith("i-0002: rank 1 was killed by SIGKILL at step 812 (2 in all)")
    assert "PyTorchJob  2 x 1  1,234  99.21 %" in rows[1]
    head, *rows = printed("jobs -A", capsys).splitlines()
    assert head.split()[:2] == ["NAMESPACE", "NAME"]
    assert [each.split()[:2] for each in rows] == [["other", "c"], ["research", "a"], ["research", "b"]]
    assert "ended with exit code 3" in rows[0]
    found = document("jobs -n other --json", capsys)
    assert [(each["name"], each["exit_code"]) for each in found] == [("c", 3)]
    assert {*found[0]} == FIELDS


def test_standbys_have_a_column_if_a_job_has_any(capsys: Printed, server: ApiStandIn) -> None:
    server.job("a")
    assert "STANDBYS" not in printed("jobs", capsys)
    server.job("b", standbys={"wanted": 2, "ready": 1, "summary": "1/2", "problem": "no room"})
    head, *rows = printed("jobs", capsys).splitlines()
    assert head.split()[:4] == ["NAME", "KIND", "RANKS", "STANDBYS"]
    assert [each.split()[5] for each in rows] == ["-", "1/2"]
    assert [each["standbys"] and each["standbys"]["ready"] for each in document("jobs --json", capsys)] == [
        None,
        1,
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("jobs", "no jobs in namespace 'research': `holdfast jobs -A` lists the jobs of all namespaces\n"),
        (
            "jobs -A",
            "no jobs on this cluster: run `holdfast doctor` to find out why a pod is not supervised\n",
        ),
        ("jobs --json", "[]\n"),
    ],
)
def test_an_empty_list_of_jobs_is_reported(capsys: Printed, server: ApiStandIn, line: str, said: str) -> None:
    assert printed(line, capsys) == said


def test_a_new_job_has_a_line_of_dashes() -> None:
    made = supervision(phase=None, step=None, view=None, recent=None, incidents=None, spec={"owner": {}})
    made["metadata"] = {"name": "gpt", "namespace": "research"}
    _, row = jobs.lines([jobs.row_of(made)], 0.0, with_namespace=True)
    assert row.split() == [
        "research",
        "gpt",
        *["-", "2", "x", "1", "-", "-", "-", "not", "taken", "over", "yet", "-"],
    ]


def test_a_status_that_is_older_than_it_should_be_has_its_age_and_a_warning(
    capsys: Printed, server: ApiStandIn
) -> None:
    """Without a supervisor, nothing else distinguishes the last status from a new one."""
    now_s = time.time()
    server.job("fresh")
    assert "ago" not in printed("jobs", capsys)
    server.job("late", view=status(updated=now_s - 20))
    server.job("old", view=status(updated=now_s - 300))
    server.job("over", phase="ended", view=status(phase="ended", exit_code=0, updated=now_s - 9000))
    _, fresh, late, old, over, warning = printed("jobs", capsys).splitlines()
    assert "running  " in fresh
    assert "running, 2" in late
    assert "running, 5 min" in old
    assert "ended with exit code 0" in over
    assert warning.startswith("warning: the status of 1 job is 5 min")
    found = {each["name"]: each for each in document("jobs --json", capsys)}
    assert {name: each["current"] for name, each in found.items()} == {
        "fresh": True, "late": True, "old": False, "over": True
    }  # fmt: skip
    assert 300 <= found["old"]["age_s"] < 400


def test_a_step_is_a_whole_number_and_an_unknown_ettr_is_called_so(
    capsys: Printed, server: ApiStandIn
) -> None:
    server.job(step=0, view=status(step=0, ettr=None, updated=time.time()))
    _, row = printed("jobs", capsys).splitlines()
    assert row.split()[5:7] == ["0", "unknown"]
    server.job(step=12_345_678)
    assert " 12,345,678 " in printed("jobs", capsys)


def test_a_phase_has_the_same_name_everywhere(capsys: Printed, server: ApiStandIn) -> None:
    server.job(phase="forming", step=0, view=status(phase="forming", step=None, updated=time.time()))
    assert " forming " in printed("jobs", capsys)
    assert printed("status --job gpt", capsys).startswith("job research/gpt: forming\n")
