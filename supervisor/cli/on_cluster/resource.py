"""Read a job's status and incidents from its Supervision, in the form of a run's files. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.fileio.strict_json import mapping
from supervisor.kubernetes.client import KubernetesObject
from supervisor.observability import short_status
from supervisor.observability.incident_record import SCHEMA

# These fields are written with each decision, so they can be newer than the published status.
_NEWER = ("phase", "generation", "incidents")


def status_of(found: KubernetesObject) -> dict[str, Any] | None:
    """Return a job's status, in the form of status.json; None if the job has no status yet."""
    summary = mapping(found.get("status"))
    if not summary.get("phase"):
        return None
    metadata = found["metadata"]
    newer = {name: summary[name] for name in _NEWER if name in summary}
    view = view_of(found)
    if view is None:
        view = {
            "schema": SCHEMA,
            "step": summary.get("step"),
            "message": summary.get("message") or "",
            "exit_code": summary.get("exitCode"),
        }
    if standbys := mapping(summary.get("standbys")):
        newer["standbys"] = dict(standbys)
    return {**view, **newer, "run": f"{metadata['namespace']}/{metadata['name']}"}


def view_of(found: KubernetesObject) -> dict[str, Any] | None:
    """Return the published status within a Supervision; None if it is missing or unreadable."""
    return short_status.decode(mapping(found.get("status")).get("view"))


def recent_of(found: KubernetesObject) -> list[dict[str, Any]]:
    """Return the last incidents in a Supervision, oldest first."""
    recent = mapping(found.get("status")).get("recent")
    listed = recent if isinstance(recent, list) else []
    return [dict(each) for each in listed if isinstance(each, Mapping) and each.get("id")]
