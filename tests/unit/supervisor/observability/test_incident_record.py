from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from holdfast.protocol.launcher_messages import StartTimes
from supervisor.observability import incident_record
from supervisor.view.model import OpenIncident, ResumePoint
from tests.unit.supervisor.job_views import S, fault

CAUSE = fault("crash", detail="rank 1 was killed", message="x" * 9000)
OPEN = OpenIncident(7, 2, 90 * S, 91 * S, 1234.5678, (fault("victim", 0), CAUSE), reached=6)
DECIDED = replace(
    OPEN,
    secured_ns=92 * S,
    decided_ns=93 * S,
    cause=CAUSE,
    remedy="restart",
    why="because",
    resume=ResumePoint(5, 2, "slot"),
    lost=1,
    stacks=(((0, 1), "stack"),),
)
MARKS = StartTimes(94 * S, 95 * S, 96 * S, 97 * S)


def outcome(found: dict[str, Any]) -> tuple[object, ...]:
    return found["open"], found["recovered_s"], found["lost_steps"], found["remedy"]


def test_an_open_incident_has_no_outcome() -> None:
    found = incident_record.record(OPEN, None)
    assert outcome(found) == (True, None, None, "")
    assert (found["id"], found["kind"], found["rank"], found["step"]) == ("i-0007", "victim", 0, 5)
    assert (found["detected_s"], found["at"], found["generation"]) == (1.0, 1234.568, 2)
    assert outcome(incident_record.record(DECIDED, None)) == (True, None, 1, "restart")


def test_an_incident_is_over_with_the_first_new_step() -> None:
    found = incident_record.record(DECIDED, MARKS)
    assert outcome(found) == (False, 7.0, 1, "restart")
    assert (found["kind"], found["rank"], found["member"], found["why"]) == ("crash", 1, "m1", "because")
    assert found["resume"] == {"step": 5, "source": "slot", "generation": 2}
    assert found["stacks"] == [{"ranks": [0, 1], "stack": "stack"}]
    assert [(each["what"], each["at_s"]) for each in found["timeline"]] == [
        ("fault", 0.0),
        ("noticed", 1.0),
        ("secured", 2.0),
        ("decided", 3.0),
        ("started", 4.0),
        ("joined", 5.0),
        ("restored", 6.0),
        ("first step", 7.0),
    ]


def test_a_run_that_has_finished_without_another_step_has_recovered() -> None:
    found = incident_record.record(replace(DECIDED, closed_ns=98 * S), None)
    assert outcome(found) == (False, 8.0, 1, "restart")


def test_a_run_that_was_stopped_has_not_recovered() -> None:
    found = incident_record.record(replace(DECIDED, closed_ns=98 * S, remedy="stop"), None)
    assert outcome(found) == (False, None, 1, "stop")


def test_an_incident_that_another_one_overtook_is_over_and_names_it() -> None:
    found = incident_record.superseded(DECIDED, replace(OPEN, number=8))
    assert outcome(found) == (False, None, 1, "restart")
    assert found["overtaken_by"] == "i-0008"
    assert found["evidence"] == ["i-0008 began before the first new step"]


def test_a_fault_without_a_single_rank_names_none() -> None:
    found = incident_record.record(replace(OPEN, faults=(fault("restore", -1, member="m1"),)), None)
    assert (found["rank"], found["member"]) == (None, "m1")


def test_the_record_is_json_of_bounded_size() -> None:
    found = json.loads(json.dumps(incident_record.record(DECIDED, MARKS)))
    assert len(found["faults"][1]["message"]) == incident_record.MAX_MESSAGE_CHARS


def test_an_incident_without_a_fault_still_has_a_record() -> None:
    found = incident_record.record(replace(OPEN, faults=()), None)
    assert (found["kind"], found["rank"], found["step"]) == ("", None, 6)


def test_the_parts_of_sentences_are_recorded_if_they_are_known() -> None:
    assert incident_record.record(DECIDED, MARKS)["decision"] == {"action": "restart", "why": "because"}
    hung = replace(OPEN, faults=(replace(fault("hang", 1), hung="it is stopped"),), measure="restart it")
    found = incident_record.record(hung, None)
    assert found["decision"]["measure"] == "restart it"
    assert found["faults"][0]["hung"] == "it is stopped"
    nobody = replace(hung, faults=(replace(hung.faults[0], rank=-1),))
    assert "hung" not in incident_record.record(nobody, None)["faults"][0]


def test_the_timeline_has_the_time_when_the_survivors_were_secured_and_not_that_of_the_next_decision() -> (
    None
):
    waited = replace(DECIDED, survived_ns=DECIDED.noticed_ns, manned_ns=DECIDED.decided_ns)
    at_s = {each["what"]: each["at_s"] for each in incident_record.record(waited, None)["timeline"]}
    assert at_s["secured"] == at_s["noticed"] < at_s["manned"] == at_s["decided"]
    older = incident_record.record(DECIDED, None)["timeline"]
    assert "manned" not in {each["what"] for each in older}
