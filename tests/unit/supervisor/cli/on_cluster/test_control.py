"""stop and inject for a job on a cluster. The stand-in's `changed` and `read` act as the supervisor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from supervisor.cli import control as local
from supervisor.cli.on_cluster import control, job_source, stopped_owner
from tests.unit.supervisor.cli.on_cluster.stand_in import ApiStandIn
from tests.unit.supervisor.cli.on_cluster.test_connection import Printed, refused
from tests.unit.supervisor.cli.on_cluster.test_job_source import document, printed
from tests.unit.supervisor.status_samples import status

DOUBT = "the fault may have been injected: see `holdfast incidents`"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "READ_S", 0.01)
    monkeypatch.setattr(job_source, "READ_S", 0.01)
    monkeypatch.setattr(local, "_POLL_S", 0.01)
    monkeypatch.setattr(control, "DRILL_S", 5.0)


def answers(result: str) -> Any:
    """Return a function that answers each drill as a supervisor does."""

    def change(found: dict[str, Any]) -> None:
        found["status"] |= {"drilled": found["spec"]["drill"]["number"], "drillResult": result}

    return change


@pytest.mark.parametrize(("line", "how"), [("stop --job gpt", "graceful"), ("stop --now --job gpt", "now")])
def test_stop_writes_to_the_spec_and_waits_until_the_job_has_ended(
    capsys: Printed, server: ApiStandIn, line: str, how: str
) -> None:
    job = server.job()
    phases = iter(["saving", "saving", "stopping"])

    def read(found: dict[str, Any]) -> None:
        if "stop" not in found["spec"]:
            return
        phase = next(phases, "ended")
        if phase == "ended" == found["status"]["phase"]:  # the last status follows a little later
            view = status(phase="ended", exit_code=130, message="stopped, as requested\nmore")
            found["status"]["view"] = json.dumps(view)
        found["status"]["phase"] = phase

    server.read = read
    shown = printed(line, capsys).splitlines()
    assert shown[:4] == [
        "stopping job research/gpt",
        "saving a checkpoint",
        "stopping",
        "ended: stopped, as requested",
    ]
    assert shown[4:] == stopped_owner.follow_up(job["spec"], "research", "gpt").lines()
    assert job["spec"]["stop"] == how


def test_after_a_run_that_finished_before_it_was_stopped_the_owner_has_its_result(
    capsys: Printed, server: ApiStandIn
) -> None:
    server.job()
    view = status(phase="ended", exit_code=0, message="all ranks have finished", updated=1.0)
    server.changed = lambda found: found["status"].update(phase="ended", view=json.dumps(view))
    assert printed("stop --job gpt", capsys).splitlines()[-1] == "ended: all ranks have finished"


def test_the_members_that_have_not_ended_are_named_and_so_are_the_next_steps(
    capsys: Printed, server: ApiStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "STOP_S", 0.05)
    left = "stopped as requested; 2 members that were ordered to end have not ended: gpt-0, gpt-1"
    server.job(phase="stopping", view=status(phase="stopping", message=left, unended=2))
    shown = printed("stop --job gpt", capsys, 1).splitlines()
    assert f"message: {left}" in shown
    assert any("kubectl -n research delete" in line for line in shown)
    found = document("stop --job gpt --json", capsys, 1)
    assert (found["ended"], found["unended"]) == (False, 2)
    assert found["owner"]["delete"].startswith("kubectl -n research delete ")


def test_a_job_that_is_deleted_while_stopping_has_ended(capsys: Printed, server: ApiStandIn) -> None:
    server.job()
    server.changed = lambda _: server.objects.clear()
    found = document("stop --job gpt --json", capsys)
    assert (found["run"], found["ended"]) == ("research/gpt", True)


def test_a_job_that_does_not_end_is_reported(
    capsys: Printed, server: ApiStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "STOP_S", 0.05)
    server.job()
    assert "`holdfast stop --now`" in printed("stop --job gpt", capsys, 1)


@pytest.mark.parametrize("line", ["stop --job gpt", "inject kill --job gpt"])
def test_a_job_that_has_ended_is_not_asked_to_stop(capsys: Printed, server: ApiStandIn, line: str) -> None:
    server.job(phase="ended", view=status(phase="ended", exit_code=0))
    said = refused(line, capsys)
    assert said == f"{line.split()[0]}: job research/gpt is not running (it ended with exit code 0)"
    assert all(method == "GET" for method, _, _ in server.requests)


def test_inject_writes_a_drill_with_a_new_number_and_prints_the_result(
    capsys: Printed, server: ApiStandIn
) -> None:
    job = server.job(drilled=6, drillResult="carried out", spec={"drill": {"number": 4, "what": "kill"}})
    server.changed = answers("carried out")
    assert "kill sent to rank 1 of job research/gpt;" in printed("inject kill --rank 1 --job gpt", capsys)
    assert job["spec"]["drill"] == {"number": 7, "what": "kill", "rank": 1}
    found = document("inject hang --job gpt --json", capsys)
    assert found == {"schema": 1, "run": "research/gpt", "injected": "hang", "rank": 0}
    assert job["spec"]["drill"]["number"] == 8


def test_two_concurrent_requests_get_two_numbers(capsys: Printed, server: ApiStandIn) -> None:
    job = server.job()

    def other(found: dict[str, Any]) -> None:
        """Write another user's drill after this user's command has read the resource."""
        server.after_read = lambda _: None
        found["spec"]["drill"] = {"number": 1, "what": "nan"}
        server.touch(found)

    server.changed = answers("carried out")
    server.after_read = other
    printed("inject kill --job gpt", capsys)
    assert job["spec"]["drill"]["number"] == 2


def test_a_refusal_is_one_line_with_the_supervisors_reason(capsys: Printed, server: ApiStandIn) -> None:
    server.job()
    server.changed = answers("rank 9: this run has ranks 0 to 1")
    said = refused("inject kill --rank 9 --job gpt", capsys)
    assert said == "inject was refused: rank 9: this run has ranks 0 to 1"


def test_an_unresponsive_supervisor_is_waited_for_only_for_a_limited_time(
    capsys: Printed, server: ApiStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "DRILL_S", 0.05)
    server.job()
    said = refused("inject kill --job gpt", capsys)
    silent = "inject: the supervisor of job research/gpt has not read the request within 0.05 s"
    assert said == f"{silent}; {DOUBT}"
    server.changed = answers("")
    said = refused("inject kill --job gpt", capsys)
    assert "has not reported the result within 0.05 s" in said


@pytest.mark.parametrize(
    ("drilled", "missed"), [(0, "the fault was injected"), (1, f"the result was reported; {DOUBT}")]
)
def test_a_run_that_ends_before_the_drill_is_not_waited_for(
    capsys: Printed, server: ApiStandIn, monkeypatch: pytest.MonkeyPatch, drilled: int, missed: str
) -> None:
    monkeypatch.setattr(control, "DRILL_S", 3600.0)
    server.job()
    server.changed = lambda found: found["status"].update(phase="ended", drilled=drilled, drillResult="")
    said = refused("inject kill --job gpt", capsys)
    assert said == f"inject: job research/gpt has ended before {missed}"


def test_another_drill_or_the_end_of_the_resource_leaves_the_outcome_unknown(
    capsys: Printed, server: ApiStandIn
) -> None:
    server.job()
    server.changed = lambda found: found["status"].update(drilled=99, drillResult="carried out")
    said = refused("inject kill --job gpt", capsys)
    assert said == f"inject: another drill of job research/gpt has replaced this one; {DOUBT}"
    server.job()
    server.changed = lambda _: server.objects.clear()
    assert refused("inject kill --job gpt", capsys) == "inject: job research/gpt was deleted in the meantime"


def test_a_resource_that_changes_at_every_attempt_is_given_up(
    capsys: Printed, server: ApiStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "DRILL_TRIES", 2)
    server.job()
    server.after_read = server.touch
    assert refused("inject kill --job gpt", capsys).endswith("changed during each of 2 attempts: try again")


def test_a_lost_answer_to_a_drill_leaves_the_outcome_unknown(capsys: Printed, server: ApiStandIn) -> None:
    server.job()
    server.after_read = lambda _: setattr(server, "refusal", 503)
    said = refused("inject kill --job gpt", capsys)
    assert said == f"inject: HTTP 503: no; {DOUBT}"
