"""Build the status fields of a Supervision: the stored decision, and what users read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from holdfast.protocol.foreign_text import shortened
from supervisor.cluster.supervision import held_state
from supervisor.cluster.supervision.contents import here
from supervisor.observability import short_status
from supervisor.view.model import Done, JobState
from supervisor.wording import ettr

MAX_RECENT = 10  # incidents in the resource
MAX_INCIDENT_BYTES = 3 << 10
MAX_FIELD_BYTES = 200  # the limit for each field of an incident that is too large even with shortened texts
DRILL_DONE = "carried out"  # the result of a drill that was not refused


def decided(after: JobState, ledger: Any, decision: str, why: str) -> dict[str, Any]:
    return {
        "memory": held_state.encode(after, ledger, here()),
        "phase": after.phase,
        "generation": after.generation,
        "incidents": after.incidents,
        "decision": decision,
        "why": why[:MAX_INCIDENT_BYTES],
    }


def end(memory: JobState, ledger: Any) -> dict[str, Any]:
    """Return the status fields for a run that has ended: its last state, and its result for users."""
    message = memory.why[:MAX_INCIDENT_BYTES]
    return {
        **decided(memory, ledger, Done.__name__, memory.why),
        "message": message,
        "exitCode": memory.exit_code,
    }


def summary(
    published: Mapping[str, Any],
    incidents: Sequence[Mapping[str, Any]],
    standbys: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the status fields for users, from a published status, the last incidents and the standbys."""
    last = published.get("last_incident") or (incidents[-1] if incidents else None)
    values = {
        "step": published.get("step"),
        # "unknown" replaces an earlier number, which would no longer be true
        "ettr": ettr(published["ettr"]) if "ettr" in published else None,
        "lastIncident": _line(last) if isinstance(last, Mapping) else "",
        "message": str(published.get("message") or "")[:MAX_INCIDENT_BYTES],
        "exitCode": published.get("exit_code"),
        "recent": [_bounded(each) for each in incidents[-MAX_RECENT:]],
    }
    found = {name: value for name, value in values.items() if value is not None}
    if standbys:
        found["standbys"] = {**standbys, **_readiness(published, int(standbys["wanted"]))}
    return {**found, "view": short_status.encode(published)}  # "" if it is too large, never an outdated one


def _readiness(published: Mapping[str, Any], wanted: int) -> dict[str, Any]:
    """Return how many members without ranks could take over ranks at once, including the owner's pods."""
    members = published.get("members") or ()
    ready = sum(each["role"] == "standby" and each["connected"] and each["parked"] > 0 for each in members)
    return {"ready": ready, "summary": f"{ready}/{wanted}"}


def announcement(memory: JobState) -> dict[str, Any]:
    """Return the status fields for users at the start of a run, before its first decision."""
    made = {"phase": memory.phase, "generation": memory.generation, "step": 0}
    return {**made, "exitCode": None, "message": "", "decision": "", "why": ""}


def _bounded(incident: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an incident in about `MAX_INCIDENT_BYTES`, without stacks and with long texts shortened."""
    for most in (1000, 300, 100):
        if _size(incident) <= MAX_INCIDENT_BYTES:
            break
        incident = {**_shortened(incident, most), "stacks": []}
    if _size(incident) <= MAX_INCIDENT_BYTES:
        return incident
    return {name: each for name, each in incident.items() if _size(each) <= MAX_FIELD_BYTES}


def _shortened(value: Any, most_bytes: int) -> Any:
    if isinstance(value, str):
        return shortened(value, most_bytes)
    if isinstance(value, list):
        return [_shortened(each, most_bytes) for each in value]
    if isinstance(value, Mapping):
        return {name: _shortened(each, most_bytes) for name, each in value.items()}
    return value


def _line(incident: Mapping[str, Any]) -> str:
    rank = incident.get("rank")
    where = f" of rank {rank}" if type(rank) is int and rank >= 0 else ""
    step = incident.get("step")
    at = f" at step {step}" if type(step) is int and step >= 0 else ""  # -1 means unknown
    return f"{incident.get('id')}: {incident.get('kind')}{where}{at}"


def _size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":")))
