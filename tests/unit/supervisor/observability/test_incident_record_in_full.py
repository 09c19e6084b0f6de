from __future__ import annotations

from dataclasses import replace
from typing import Any

from supervisor.observability.incident_record import record, superseded
from supervisor.view.model import InterruptedWork, OpenIncident
from tests.unit.supervisor.job_views import S, fault
from tests.unit.supervisor.observability.test_incident_record import DECIDED, MARKS, OPEN

HANG = replace(fault("hang", 1, detail="it hangs", message="text", position=7), hung="it is stopped")
CUTS = (
    InterruptedWork(0, 5, 5, 1.5),
    InterruptedWork(1, 5, 4, 0.25, early=True),
    InterruptedWork(2, 5, 5, 0.0),
)
WHOLE = replace(
    DECIDED,
    faults=(HANG, replace(HANG, rank=-1)),
    cause=HANG,
    looked_ns=int(91.5 * S),
    evidence=("first", "second"),
    cut=CUTS,
    at_least=True,
    own_state=True,
    measure="restart it",
)


def told(rank: int, **given: Any) -> dict[str, Any]:
    usual = {"kind": "hang", "rank": rank, "member": "m1", "step": 5, "detail": "it hangs", "message": "text"}
    return {**usual, "position": 7, **given}


def timeline(**at_s: float) -> list[dict[str, Any]]:
    return [{"what": what.replace("_", " "), "at_s": at} for what, at in at_s.items()]


EXPECTED: dict[str, Any] = {
    "schema": 1,
    "id": "i-0007",
    "kind": "hang",
    "rank": 1,
    "member": "m1",
    "step": 5,
    "generation": 2,
    "at": 1234.568,
    "detected_s": 1.0,
    "recovered_s": 7.0,
    "lost_steps": 1,
    "lost_at_least": True,
    "own_state": True,
    "remedy": "restart",
    "why": "because",
    "resume": {"step": 5, "source": "slot", "generation": 2},
    "cut_short": [
        {"rank": 0, "step": 5, "before_commit": False, "after_s": 1.5, "again": True},
        {"rank": 1, "step": 5, "before_commit": True, "after_s": 0.25, "again": False},
    ],
    "evidence": ["first", "second"],
    "faults": [told(1, hung="it is stopped"), told(-1)],
    "decision": {"action": "restart", "why": "because", "measure": "restart it"},
    "timeline": timeline(
        fault=0.0,
        noticed=1.0,
        looked=1.5,
        secured=2.0,
        decided=3.0,
        started=4.0,
        joined=5.0,
        restored=6.0,
        first_step=7.0,
    ),
    "stacks": [{"ranks": [0, 1], "stack": "stack"}],
    "message": "text",
    "open": False,
    "overtaken_by": None,
}


def test_the_record_of_an_incident_has_exactly_these_fields() -> None:
    assert record(WHOLE, MARKS) == EXPECTED


def test_the_record_of_an_overtaken_incident_names_the_one_that_overtook_it() -> None:
    note = "i-0012 began before the first new step"
    before = timeline(fault=0.0, noticed=1.0, looked=1.5, secured=2.0, decided=3.0)
    assert superseded(WHOLE, replace(OPEN, number=12)) == {
        **EXPECTED,
        "recovered_s": None,
        "timeline": before,
        "overtaken_by": "i-0012",
        "evidence": ["first", "second", note],
    }


def test_the_record_of_an_incident_without_a_fault_has_exactly_these_fields() -> None:
    bare = OpenIncident(7, 2, 90 * S, 89 * S, 0.0, cut=CUTS[:1])
    assert record(bare, None) == {
        **EXPECTED,
        "kind": "",
        "rank": None,
        "member": "",
        "step": -1,
        "at": 0.0,
        "detected_s": 0.0,
        "recovered_s": None,
        "lost_steps": None,
        "lost_at_least": False,
        "own_state": False,
        "remedy": "",
        "why": "",
        "resume": None,
        "cut_short": [{**EXPECTED["cut_short"][0], "again": False}],
        "evidence": [],
        "faults": [],
        "decision": {"action": "", "why": ""},
        "timeline": timeline(fault=0.0, noticed=0.0),
        "stacks": [],
        "message": "",
        "open": True,
    }


def test_an_incident_is_over_once_it_is_closed() -> None:
    def over(incident: OpenIncident, marks: Any = None) -> tuple[bool, float | None]:
        found = record(incident, marks)
        return found["open"], found["recovered_s"]

    closed = replace(WHOLE, closed_ns=98 * S)
    assert over(WHOLE) == (True, None)
    assert over(closed) == (False, 8.0)
    assert over(closed, MARKS) == (False, 7.0)
    assert over(replace(closed, remedy="stop")) == (False, None)
    assert over(replace(closed, remedy="stop"), MARKS) == (False, 7.0)
    zero = replace(WHOLE, cause=replace(HANG, rank=0))
    assert record(zero, None)["rank"] == 0
    assert record(replace(zero, cause=replace(HANG, rank=-1)), None)["rank"] is None
