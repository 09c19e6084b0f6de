"""The requests that change a Node. Pure.

The API treats a node's taints as one value (`x-kubernetes-list-type: atomic`). A server-side apply of
Holdfast's taint alone would therefore replace all others. So one merge patch writes the taint and the record.
It contains the other taints unchanged, and is conditional on the version in which they were read. The
condition is part of a list with keys, and is applied as Holdfast's own field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.nodes.names import CONDITION, RECORD, REQUEST, REQUESTED_BY, TAINT
from supervisor.nodes.node_objects import KnownNode
from supervisor.quarantine import stored
from supervisor.quarantine.model import NO_NEW_WORK, OPERATOR, NodeView, Quarantine

MAX_MESSAGE = 1000  # characters of the reason in the record and the condition


@dataclass(frozen=True, slots=True)
class DecisionNote:
    """Who decided, and why. Only people read it.

    `by` is "holdfast", "operator", or "operator" and the user's name.
    """

    by: str
    why: str


def main_patch(node: KnownNode, after: NodeView, note: DecisionNote | None, at: str) -> dict[str, Any]:
    """Return the merge patch that turns `node` into `after`. Without `note`, the previous note is kept.

    `at` is the time of the decision, as Kubernetes writes it. If the node's version has changed since it was
    read, the API server refuses the patch with a conflict.
    """
    last_decision: Mapping[str, str] = node.last_decision
    if note is not None:
        last_decision = {"by": note.by, "why": note.why[:MAX_MESSAGE], "at": at}
    record = {**stored.to_json(after), **{key: value for key, value in last_decision.items() if value}}
    annotations: dict[str, str | None] = {RECORD: json.dumps(record, separators=(",", ":"))}
    if node.request is not None:
        annotations[REQUEST] = None
        if node.request.by:
            annotations[REQUESTED_BY] = None
    body: dict[str, Any] = {
        "metadata": {"resourceVersion": node.view.version, "annotations": annotations},
    }
    taints = taints_after(node.taints, after.quarantine)
    if taints != list(node.taints):
        body["spec"] = {"taints": taints}
    return body


def taints_after(taints: tuple[Mapping[str, Any], ...], held: Quarantine | None) -> list[Mapping[str, Any]]:
    """Return the node's taints, with Holdfast's taint set according to `held`, and all others unchanged."""
    ours = [each for each in taints if each.get("key") == TAINT]
    if held is None:
        return [each for each in taints if each.get("key") != TAINT]
    mine = {"key": TAINT, "value": taint_value(held), "effect": held.effect}
    if len(ours) == 1 and {key: ours[0].get(key) for key in mine} == mine:
        return list(taints)
    return [*(each for each in taints if each.get("key") != TAINT), mine]


def taint_value(held: Quarantine) -> str:
    """Return the action that the node waits for, or who has taken it out."""
    return OPERATOR if OPERATOR in held.sources and held.action == "none" else held.action


def condition_of(node: KnownNode) -> Mapping[str, Any] | None:
    """Return Holdfast's condition if it must be written; None if it is not needed or is already correct."""
    held, known = node.view.quarantine, node.condition
    if not node.last_decision or node.view.refused or (held is None and known is None):
        return None
    is_out = held is not None and held.effect == NO_NEW_WORK
    wanted = {
        "type": CONDITION,
        "status": "True" if is_out else "False",
        "reason": _reason(held, node.last_decision.get("by", "")),
        "message": node.last_decision.get("why", ""),
    }
    if known is not None and all(known.get(key, "") == value for key, value in wanted.items()):
        return None
    same = known is not None and known.get("status") == wanted["status"]
    changed = known.get("lastTransitionTime") if same and known is not None else node.last_decision.get("at")
    return {**wanted, "lastTransitionTime": changed} if changed else wanted


def status_apply(node: KnownNode, condition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object to apply to the node's status."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name},
        "status": {"conditions": [dict(condition)]},
    }


def _reason(held: Quarantine | None, by: str) -> str:
    if held is None:
        return "ReleasedByOperator" if by.partition(" ")[0] == OPERATOR else "Released"
    if held.effect != NO_NEW_WORK:
        return "Avoided"
    return "".join(word.capitalize() for word in taint_value(held).split("_")) or "Quarantined"
