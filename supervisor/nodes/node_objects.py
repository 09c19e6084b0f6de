"""Read Node objects: what the kubelet, the agent, an operator and an earlier leader have written. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.fileio import strict_json
from holdfast.fileio.strict_json import RejectedJson, mapping
from holdfast.node_report import REPORT, REPORT_AT
from supervisor.nodes.names import (
    CONDITION,
    RACK,
    READY,
    RECORD,
    REQUEST,
    REQUESTED_BY,
    TAINT,
    VERDICTS,
)
from supervisor.quarantine import stored
from supervisor.quarantine.model import NodeView
from supervisor.quarantine.stored import BadState

# The API allows 256 KiB of annotations per object. An agent's report has at most 32 KiB.
MAX_REPORT = MAX_RECORD = 128 << 10
MAX_WHY = 300  # characters of an operator's or an agent's reason
MAX_NAME = 200  # characters of a user's name
_RELEASE, _QUARANTINE, _WITH_DRAIN = "release", "quarantine", "quarantine+drain"
_KEPT_METADATA = ("name", "uid", "resourceVersion", "deletionTimestamp")
_KEPT_ANNOTATIONS = (RECORD, REQUEST, REQUESTED_BY, REPORT, REPORT_AT)
_KEPT_LABELS = (RACK,)
_KEPT_CONDITIONS = (READY, CONDITION, *VERDICTS)


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """An operator's request. If it cannot be understood, `refused` gives the reason."""

    kind: str  # "release" or "quarantine"
    why: str = ""
    drain: bool = False
    refused: str = ""
    by: str = ""  # the user who asks; "" if the request does not name one


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A Node object.

    `view` contains what is stored on the node, but not its agent's report (`agent_reports`). `last_decision`
    is the part of the record that only people read: who decided last, why and when.
    """

    view: NodeView
    uid: str
    boot_id: str
    machine_id: str
    report: str | None  # the agent's report; None if there has never been an agent
    report_at: str  # when the agent wrote it, by the agent's clock; only for people
    taints: tuple[Mapping[str, Any], ...]
    condition: Mapping[str, Any] | None  # Holdfast's own condition
    request: OperatorRequest | None
    last_decision: Mapping[str, str]
    verdict: str | None = None  # see `verdict_of`
    verdict_times: tuple[str, ...] = ()  # see `verdict_times_of`
    calm_times: tuple[str, ...] = ()  # see `calm_times_of`

    @property
    def name(self) -> str:
        return self.view.name

    @property
    def is_tainted(self) -> bool:
        """True if the node has Holdfast's taint, no matter who has set it."""
        return any(each.get("key") == TAINT for each in self.taints)

    @property
    def is_ours(self) -> bool:
        """True if the node belongs to the pool.

        A node without an agent does not belong to the pool, because nothing is known about its health. It
        does belong to the pool if an operator or Holdfast has taken it out, because nothing else would
        release it.
        """
        is_held = self.view.quarantine is not None or bool(self.view.refused)
        return self.report is not None or self.is_tainted or is_held or self.request is not None


def prune(
    found: Mapping[str, Any], labels: Iterable[str] = (), conditions: Iterable[str] = ()
) -> Mapping[str, Any]:
    """Return only the parts of a Node that `read` reads. A Node can list hundreds of images.

    `labels` and `conditions` name further parts to keep, for other observers of the same object.
    """
    metadata, spec, status = (mapping(found.get(part)) for part in ("metadata", "spec", "status"))
    kept = {key: metadata[key] for key in _KEPT_METADATA if key in metadata}
    kept_types = (*_KEPT_CONDITIONS, *conditions)
    for part, names in (("labels", (*_KEPT_LABELS, *labels)), ("annotations", _KEPT_ANNOTATIONS)):
        values = mapping(metadata.get(part))
        kept[part] = {key: values[key] for key in names if key in values}
    info = mapping(status.get("nodeInfo"))
    return {
        "metadata": kept,
        "spec": {key: spec[key] for key in ("taints", "unschedulable") if key in spec},
        "status": {
            "conditions": [each for each in status.get("conditions") or () if each.get("type") in kept_types],
            "nodeInfo": {key: info[key] for key in ("bootID", "machineID") if key in info},
        },
    }


def read(found: Mapping[str, Any]) -> KnownNode:
    """Return the content of a Node object. If any part is unreadable, the node is `refused`. Never raises."""
    try:
        return _read(found)
    except Exception as error:  # one unexpected Node must not affect the other nodes
        return _unreadable(found, f"the Node is unreadable: {error!r}"[:MAX_WHY])


def _unreadable(found: Mapping[str, Any], why: str) -> KnownNode:
    """Return a node with nothing but its identity. It counts as out, because it may have a taint."""
    metadata = mapping(found.get("metadata"))
    view = NodeView(
        str(metadata.get("name", "")),
        version=str(metadata.get("resourceVersion", "")),
        refused=why,
        cordoned=True,
    )
    last_decision = {"by": "", "why": why, "at": ""}
    return KnownNode(view, str(metadata.get("uid", "")), "", "", None, "", (), None, None, last_decision)


def _read(found: Mapping[str, Any]) -> KnownNode:
    metadata, spec, status = (mapping(found.get(part)) for part in ("metadata", "spec", "status"))
    notes, info = mapping(metadata.get("annotations")), mapping(status.get("nodeInfo"))
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    view = NodeView(
        str(metadata["name"]),
        rack=str(mapping(metadata.get("labels")).get(RACK, "")),
        cordoned=spec.get("unschedulable") is True,
        ready=conditions.get(READY, {}).get("status") == "True",
        version=str(metadata.get("resourceVersion", "")),
    )
    taints = tuple(spec.get("taints") or ())
    last_decision: Mapping[str, str] = {}
    if RECORD in notes:
        try:
            record = _parsed(notes[RECORD], MAX_RECORD)
            view = stored.from_json(view, record)
            last_decision = {key: str(record.get(key) or "") for key in ("by", "why", "at")}
        except (BadState, ValueError) as error:
            # If the node has the taint, it counts as out, and Holdfast does not release it.
            is_out = view.cordoned or any(each.get("key") == TAINT for each in taints)
            view = replace(view, refused=f"annotation {RECORD} is unreadable: {error}", cordoned=is_out)
            last_decision = {"by": "", "why": view.refused, "at": ""}
    return KnownNode(
        view,
        str(metadata.get("uid", "")),
        str(info.get("bootID") or ""),
        str(info.get("machineID") or ""),
        notes.get(REPORT),
        str(notes.get(REPORT_AT, "")),
        taints,
        conditions.get(CONDITION),
        replace(read_request(notes[REQUEST]), by=_one_line(notes.get(REQUESTED_BY)))
        if REQUEST in notes
        else None,
        last_decision,
        verdict_of(found),
        verdict_times_of(found),
        calm_times_of(found),
    )


def verdict_of(found: Mapping[str, Any]) -> str | None:
    """Return a clause that says what the agent finds wrong with a node; "" if it reports no fault.

    Return None for a node without an agent.
    """
    verdicts = _verdicts(found)
    for each in verdicts:
        if each.get("status") == "False":
            return str(each.get("message") or each.get("reason") or "a fault")[:MAX_WHY].rstrip(".")
    return "" if verdicts else None


def verdict_times_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return when the agent began to report each fault, as it wrote the time; "" for an unknown time."""
    bad = (each for each in _verdicts(found) if each.get("status") == "False")
    return tuple(str(each.get("lastTransitionTime") or "") for each in bad)


def calm_times_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return when each verdict without a fault began, in the form of `verdict_times_of`."""
    calm = (each for each in _verdicts(found) if each.get("status") != "False")
    return tuple(str(each.get("lastTransitionTime") or "") for each in calm)


def _verdicts(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    conditions = mapping(found.get("status")).get("conditions") or ()
    return [each for each in conditions if mapping(each).get("type") in VERDICTS]


def read_request(text: str) -> OperatorRequest:
    """Return the request in the annotation's text."""
    kind, colon, why = (part.strip() for part in text.partition(":"))
    if kind == _RELEASE and not colon:
        return OperatorRequest(_RELEASE)
    if kind in (_QUARANTINE, _WITH_DRAIN) and why:
        return OperatorRequest(_QUARANTINE, " ".join(why.split())[:MAX_WHY], kind == _WITH_DRAIN)
    expected = f"{_RELEASE!r}, '{_QUARANTINE}: WHY' or '{_WITH_DRAIN}: WHY'"
    return OperatorRequest("", refused=f"{REQUEST} is {text[:80]!r}; expected {expected}")


def request_text(request: OperatorRequest) -> str:
    """Return the annotation's text for a request; `read_request` reads it."""
    if request.kind == _RELEASE:
        return _RELEASE
    return f"{_WITH_DRAIN if request.drain else _QUARANTINE}: {request.why}"


def parsed_report(text: str) -> Mapping[str, Any]:
    """Return an agent's report as JSON. Raises `ValueError`, whose message says what is wrong."""
    return _parsed(text, MAX_REPORT)


def _parsed(text: object, most: int) -> Mapping[str, Any]:
    if not isinstance(text, str) or len(text) > most:
        raise ValueError(f"it has more than {most} characters")
    try:
        found = json.loads(text, parse_int=strict_json.integer)
    except RejectedJson as error:
        raise ValueError(f"it {error}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:40]!r} is not JSON") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{text[:40]!r} is not a JSON object")
    return found


def _one_line(text: object) -> str:
    return " ".join(str(text or "").split())[:MAX_NAME]
