from __future__ import annotations

import pytest

from supervisor.cli.on_cluster import jobs
from tests.unit.supervisor.cli.on_cluster.stand_in import ApiStandIn, supervision
from tests.unit.supervisor.cli.on_cluster.test_connection import Printed
from tests.unit.supervisor.cli.on_cluster.test_job_source import document, printed
from tests.unit.supervisor.status_samples import incident, status

FIELDS = {
    "schema", "namespace", "name", "kind", "members", "nproc_per_node", "phase", "generation", "step", "ettr",
    "incidents", "last_incident", "exit_code", "created",
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
