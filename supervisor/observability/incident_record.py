"""Build the record of an incident as JSON: its faults, its remedy with the reason, its times and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from holdfast.protocol.launcher_messages import StartTimes
from supervisor.view.model import Fault, OpenIncident

MAX_MESSAGE_CHARS = 4000  # how much of each fault's message is recorded, counted from its end
# The version of the JSON format of status, incidents and checkpoints. Fields may be added but never change.
SCHEMA = 1
# The stages of a recovery, in order. The records of incidents contain the names, so do not rename any.
RecoveryStage: TypeAlias = Literal[
    "fault",
    "noticed",
    "looked",
    "secured",
    "manned",
    "decided",
    "started",
    "joined",
    "restored",
    "first step",
]


def incident_id(number: int) -> str:
    """Return the ID of an incident in records, messages and file names, such as "i-0001"."""
    return f"i-{number:04d}"


def record(incident: OpenIncident, marks: StartTimes | None) -> dict[str, Any]:
    """Return the incident as JSON. `marks` has the start times up to the first new step; None before it.

    `lost_steps` is null if the number is not known yet, if the script keeps its own state, or if all members
    that knew the group's last step are gone.
    """
    cause = incident.cause or (incident.faults[0] if incident.faults else None)
    recovered_ns = marks.first_step_ns if marks is not None else 0
    if incident.remedy != "stop":  # the group may have resumed without a step left to do
        recovered_ns = recovered_ns or incident.closed_ns
    return {
        "schema": SCHEMA,
        "id": incident_id(incident.number),
        "kind": cause.kind if cause else "",
        "rank": cause.rank if cause and cause.rank >= 0 else None,
        "member": cause.member if cause else "",
        "step": cause.step if cause else incident.reached,
        "generation": incident.generation,
        "at": round(incident.wall_s, 3),
        "detected_s": _since(incident, incident.noticed_ns),
        "recovered_s": _since(incident, recovered_ns) if recovered_ns else None,
        "lost_steps": incident.lost,
        "lost_at_least": incident.at_least,
        "own_state": incident.own_state,
        **_world_size(incident),
        "remedy": incident.remedy,
        "why": incident.why,
        "resume": _resume(incident),
        **({"skipped_steps": list(incident.skipped)} if incident.skipped else {}),
        "cut_short": _cut_short(incident),
        "evidence": list(incident.evidence),
        "faults": [_fault(each) for each in incident.faults],
        "decision": _decision(incident),
        "timeline": _timeline(incident, marks),
        "stacks": [{"ranks": list(ranks), "stack": stack} for ranks, stack in incident.stacks],
        "message": cause.message if cause else "",
        "open": marks is None and not incident.closed_ns,
        "overtaken_by": None,
    }


def superseded(incident: OpenIncident, by: OpenIncident) -> dict[str, Any]:
    """Return the record of an overtaken incident: the incident `by` began before the first new step."""
    found = record(incident, None)
    note = f"{incident_id(by.number)} began before the first new step"
    evidence = [*found["evidence"], note]
    return {**found, "open": False, "overtaken_by": incident_id(by.number), "evidence": evidence}


def unrecorded_end(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an incident that ended without its supervisor recording the end.

    It is therefore unknown how long the recovery took.
    """
    note = "another supervisor took over before the end of this incident was recorded"
    return {**found, "open": False, "evidence": [*(found.get("evidence") or ()), note]}


def _since(incident: OpenIncident, at_ns: int) -> float:
    return round(max(0, at_ns - incident.fault_ns) / 1e9, 6)


def _cut_short(incident: OpenIncident) -> list[dict[str, Any]]:
    """Return the work that the fault interrupted. `again` is true if the group repeats it."""
    step = incident.resume.step if incident.resume is not None else None
    return [
        {
            "rank": each.rank,
            "step": each.step,
            "before_commit": each.early,
            "after_s": each.after_s,
            "again": step is not None and step <= each.at_most,
        }
        for each in incident.cut
        if each.after_s
    ]


def _world_size(incident: OpenIncident) -> dict[str, Any]:
    """Return the numbers of ranks before and after the incident, if it changed."""
    if len(incident.resized) != 2:
        return {}
    before, after = incident.resized
    return {"world_size": {"before": before, "after": after}}


def _resume(incident: OpenIncident) -> dict[str, Any] | None:
    if incident.resume is None:
        return None
    found = incident.resume
    return {"step": found.step, "source": found.source, "generation": found.generation}


def _decision(incident: OpenIncident) -> dict[str, Any]:
    """Return the decision. `measure`, if known, is the part of `why` after the cause."""
    measure = {"measure": incident.measure} if incident.measure else {}
    return {"action": incident.remedy, "why": incident.why, **measure}


def _fault(fault: Fault) -> dict[str, Any]:
    """Return a fault. `hung`, if known, is the part of `detail` that describes what a hung rank is doing."""
    hung = {"hung": fault.hung} if fault.hung and fault.rank >= 0 else {}
    return {
        "kind": fault.kind,
        "rank": fault.rank,
        "member": fault.member,
        "step": fault.step,
        "detail": fault.detail,
        "message": fault.message[-MAX_MESSAGE_CHARS:],
        "position": fault.position,
        **hung,
    }


def _timeline(incident: OpenIncident, marks: StartTimes | None) -> list[dict[str, Any]]:
    stages: list[tuple[RecoveryStage, int]] = [
        ("fault", incident.fault_ns),
        ("noticed", incident.noticed_ns),
        ("looked", incident.looked_ns),
        ("secured", incident.survived_ns or incident.secured_ns),
        ("manned", incident.manned_ns),
        ("decided", incident.decided_ns),
    ]
    if marks is not None:
        stages += [
            ("started", marks.started_ns),
            ("joined", marks.joined_ns),
            ("restored", marks.restored_ns),
            ("first step", marks.first_step_ns),
        ]
    return [{"what": what, "at_s": _since(incident, at)} for what, at in stages if at]
