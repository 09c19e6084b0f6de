"""status, incidents, explain and checkpoints of a job on a cluster."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from supervisor import __main__ as program
from tests.unit.supervisor.cli.on_cluster.stand_in import ApiStandIn
from tests.unit.supervisor.cli.on_cluster.test_connection import Printed, refused
from tests.unit.supervisor.status_samples import incident, opened, status


def printed(line: str, capsys: Printed, code: int = 0) -> str:
    assert program.main(line.split()) == code
    return capsys.readouterr().out


def document(line: str, capsys: Printed, code: int = 0) -> Any:
    return json.loads(printed(line, capsys, code))


def test_status_shows_a_job_as_it_shows_a_run(capsys: Printed, server: ApiStandIn) -> None:
    server.job(view=status(updated=time.time()))
    lines = printed("status --job gpt", capsys).splitlines()
    assert lines[0] == "job research/gpt: running"
    assert any(each.startswith("  progress    step 1,234") for each in lines)
    assert not any("directory" in each for each in lines)
    found = document("status --job research/gpt --json", capsys)
    assert (found["schema"], found["run"], found["alive"]) == (1, "research/gpt", True)
    assert {*status()} <= {*found}


def test_an_old_status_is_not_shown_as_current(capsys: Printed, server: ApiStandIn) -> None:
    server.job(view=status(updated=time.time() - 90))
    assert "running, 90 s ago; its supervisor does not respond" in printed("status --job gpt", capsys)


def test_the_phase_of_the_last_decision_is_newer_than_that_of_the_status(
    capsys: Printed, server: ApiStandIn
) -> None:
    server.job(phase="securing", generation=4, view=status(updated=time.time()))
    assert printed("status --job gpt", capsys).startswith("job research/gpt: securing the state")


def test_a_truncated_status_has_its_main_fields(capsys: Printed, server: ApiStandIn) -> None:
    server.job(phase="ended", view=None, exitCode=3, message="rank 1 failed")
    lines = printed("status --job gpt", capsys)
    assert lines.startswith("job research/gpt: ended with exit code 3")
    assert "rank 1 failed" in lines


def test_a_job_without_a_supervisor_has_no_status_yet(capsys: Printed, server: ApiStandIn) -> None:
    server.job(phase=None, view=None, recent=None)
    assert printed("status --job gpt", capsys) == "job research/gpt is starting and has no status yet\n"


@pytest.mark.parametrize(
    "line",
    [
        "status --job gpt",
        "status --job other/gpt",
        "status --job gpt -n other",
        "status --job gpt --context second",
    ],
)
def test_the_namespace_comes_from_the_name_the_option_or_the_context(
    capsys: Printed, server: ApiStandIn, line: str
) -> None:
    for namespace in ("research", "other", "default"):
        server.job(namespace=namespace)
    printed(line, capsys)
    wanted = "other" if "other" in line else "default" if "second" in line else "research"
    assert server.requests[0][1].split("/")[5] == wanted


def test_an_unknown_job_is_named_with_the_most_similar_one(capsys: Printed, server: ApiStandIn) -> None:
    lists = "`holdfast jobs -A` lists all jobs"
    assert refused("status --job gpt", capsys) == f"no job 'gpt' in namespace 'research': {lists}"
    server.job("gpt-large")
    said = refused("explain last --job gpt-lagre", capsys)
    assert said == f"no job 'gpt-lagre' in namespace 'research': did you mean 'gpt-large'? {lists}"
    server.denied.add(("list", "supervisions"))
    assert refused("status --job gpt-lagre", capsys).endswith(f"'research': {lists}")


def test_incidents_are_those_in_the_resource_and_the_open_one(capsys: Printed, server: ApiStandIn) -> None:
    server.job(
        incidents=12,
        recent=[incident(10), incident(11)],
        view=status(open_incident=opened(12), updated=time.time()),
    )
    found = document("incidents --job gpt --json", capsys)
    assert [each["id"] for each in found] == ["i-0010", "i-0011", "i-0012"]
    assert program.main(["incidents", "--job", "gpt"]) == 0
    out, err = capsys.readouterr()
    assert "i-0011" in out
    assert err == "holdfast: the resource of job research/gpt holds only the last 2 incidents\n"


def test_an_incident_is_explained(capsys: Printed, server: ApiStandIn) -> None:
    server.job()
    assert "What was decided" in printed("explain last --job gpt", capsys)
    assert document("explain 1 --job gpt --json", capsys)["id"] == "i-0001"
    assert "unknown incident '7'" in refused("explain 7 --job gpt", capsys)


def test_checkpoints_are_those_that_the_pods_report(capsys: Printed, server: ApiStandIn) -> None:
    note = "checkpoint step-00001300 is not used: manifest.json is missing"
    server.job(view=status(passed_over=[note]))
    assert printed("checkpoints --job gpt", capsys, 1).splitlines() == [
        "newest usable: step-00001200 (step 1,200)",
        "damaged: step-00001300: manifest.json is missing",
        "older checkpoints are not listed, because the supervisor cannot read the job's storage",
    ]
    newest, damaged = document("checkpoints --job gpt --json", capsys, 1)
    assert (newest["step"], newest["newest_whole"], newest["verified"]) == (1200, True, False)
    assert (newest["generation"], newest["bytes"], newest["created"]) == (None, None, None)
    assert (damaged["name"], damaged["fault"]) == ("step-00001300", "manifest.json is missing")


def test_missing_checkpoints_and_failing_storage_are_reported(capsys: Printed, server: ApiStandIn) -> None:
    server.job(view=status(checkpoint={"step": None, "path": None, "error": "No space left on device"}))
    out = printed("checkpoints --job gpt", capsys)
    assert out.startswith("the job's pods have reported no usable checkpoint\nstorage error: No space")
    server.job(view=status(checkpoint=None))
    assert document("checkpoints --job gpt --json", capsys) == []


def test_the_content_of_checkpoints_cannot_be_verified_remotely(capsys: Printed, server: ApiStandIn) -> None:
    assert refused("checkpoints --verify --job gpt", capsys).startswith("--verify needs --run-dir DIR")
    assert server.requests == []


def test_an_incident_of_a_job_whose_status_is_old_is_explained_with_a_warning(
    capsys: Printed, server: ApiStandIn
) -> None:
    server.job(view=status(updated=time.time() - 300))
    for line in ("explain last --job gpt", "explain last --job gpt --json", "incidents --job gpt"):
        assert program.main(line.split()) == 0
        assert "holdfast: the status of job research/gpt is 5 min" in capsys.readouterr().err
    server.job()
    assert program.main(["explain", "last", "--job", "gpt"]) == 0
    assert capsys.readouterr().err == ""
    old = server.job(view=status(updated=time.time() - 300))
    assert "the supervisor may not be running" in printed("status --job gpt", capsys)
    found = document("status --job gpt --json", capsys)
    assert (found["current"], found["age_s"] >= 300) == (False, True)
    old["status"]["view"] = json.dumps(status(updated=time.time() - 15))
    assert printed("status --job gpt", capsys).startswith("job research/gpt: running, 1")
