"""Builds the patch of the Node object. Pure.

One strategic merge patch of the status subresource contains everything: it merges conditions by their type,
and the API server accepts annotations there too, as it does from the kubelet. So the agent needs only one
permission, and that permission does not extend to the node's taints.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.node_report import REPORT, REPORT_AT
from nodeagent.publishing.conditions import NodeCondition


@dataclass(frozen=True, slots=True)
class Transitions:
    """The statuses that were published, and since when, in seconds since 1970."""

    since_s: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # by type: status, time

    def after(self, found: Iterable[NodeCondition], wall_s: float) -> Transitions:
        """Return the transitions after these conditions are published."""
        known = {each.type: self.since_s.get(each.type, ("", 0.0)) for each in found}
        return Transitions(
            {
                each.type: known[each.type] if known[each.type][0] == each.status else (each.status, wall_s)
                for each in found
            }
        )


def node_patch(
    found: Iterable[NodeCondition], transitions: Transitions, wall_s: float, report: str | None
) -> dict[str, Any]:
    """Return the patch.

    Args:
        found: The conditions.
        transitions: What `Transitions.after` returned for them.
        wall_s: The time, in seconds since 1970.
        report: The text of the report; None to leave the published report and its time unchanged.
    """
    patch: dict[str, Any] = {
        "status": {
            "conditions": [
                {
                    "type": each.type,
                    "status": each.status,
                    "reason": each.reason,
                    "message": each.message,
                    "lastHeartbeatTime": _seconds(wall_s),
                    "lastTransitionTime": _seconds(transitions.since_s[each.type][1]),
                }
                for each in found
            ]
        }
    }
    if report is not None:
        patch["metadata"] = {"annotations": {REPORT: report, REPORT_AT: microseconds(wall_s)}}
    return patch


def microseconds(wall_s: float) -> str:
    """Return a time as RFC 3339 in UTC with microseconds."""
    return _utc(wall_s).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _seconds(wall_s: float) -> str:
    return _utc(wall_s).strftime("%Y-%m-%dT%H:%M:%SZ")


def _utc(wall_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(wall_s, datetime.timezone.utc)
