"""Reduces the agent's report to the parts that the supervisor reads, so that it fits an annotation. Pure.

The result is the report of `/v1/health`, in the same schema, without the fields that only people read. If it
is too long, the findings that the supervisor ranks lowest are left out, and `left_out` counts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.node_report import DEGRADED, MAX_WORD, UNHEALTHY, is_corroborated, remedy_of, severity

MAX_BYTES = 32 << 10  # all annotations of an object together may take 256 KiB

_NODE = ("schema", "node", "machine_id", "boot_id", "booted_s", "version", "at_s", "clean_s", "quiet_s")
_NODE_MORE = ("calmed_s", "clean_needs", "quiet_needs", "released", "state_id")
_FINDING = (
    "check", "code", "level", "action", "since_s", "last_s", "sign_s", "sources", "origins", "device",
    "lasting", "overridden",
)  # fmt: skip

_Found = tuple[str, dict[str, Any]]  # the entity and the finding


def compact(report: Mapping[str, Any], most_bytes: int = MAX_BYTES) -> str:
    """Return the JSON text of a `health_report` for the annotation: ASCII, at most `most_bytes` long.

    A report of 256 GPUs without findings fits in any case.
    """
    found = list(_findings(report))
    text = _text(report, found, 0)
    if len(text) <= most_bytes:
        return text
    by_rank = sorted(range(len(found)), key=lambda at: _rank(found[at]), reverse=True)

    def of_the_worst(count: int) -> str:
        kept = sorted(by_rank[:count])  # in the order of the report
        return _text(report, [found[at] for at in kept], len(found) - count)

    fits, too_many = 0, len(found)
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if len(of_the_worst(count)) <= most_bytes:
            fits = count
        else:
            too_many = count
    return of_the_worst(fits)


def _text(report: Mapping[str, Any], found: Sequence[_Found], left_out: int) -> str:
    by_entity: dict[str, list[dict[str, Any]]] = {}
    for entity, finding in found:
        by_entity.setdefault(entity, []).append(finding)
    kept = {name: _cut(report[name]) for name in (*_NODE, *_NODE_MORE)}
    if report.get("unsteady_s"):
        kept["unsteady_s"] = report["unsteady_s"]
    kept["gpus"] = [
        {name: _cut(gpu[name]) for name in ("uuid", "serial") if gpu.get(name)} for gpu in report["gpus"]
    ]
    kept["entities"] = [{"entity": entity, "findings": each} for entity, each in by_entity.items()]
    kept["sensors"] = [{"name": _cut(each["name"]), "sees": each["sees"]} for each in report["sensors"]]
    if left_out:
        kept["left_out"] = left_out
    return json.dumps(kept, separators=(",", ":"))


def _findings(report: Mapping[str, Any]) -> Iterator[_Found]:
    for entity in report["entities"]:
        for each in entity["findings"]:
            if each["level"] in (DEGRADED, UNHEALTHY):  # findings of other levels change nothing
                kept = {name: _cut(each[name]) for name in _FINDING}
                yield _cut(entity["entity"]), {**kept, **_more(each, report["at_s"])}


def _more(finding: Mapping[str, Any], at_s: float) -> dict[str, Any]:
    """Return the fields that most findings do not need, where they tell more than the others do."""
    found: dict[str, Any] = {}
    remedy = finding.get("remedy", "none")
    if remedy not in ("none", finding["action"]):
        found["remedy"] = _cut(remedy)
    # A fault that has persisted for longer than its recent time is confirmed by its age.
    if finding.get("recent_s", 0.0) > at_s - finding["since_s"]:
        found["recent_s"] = finding["recent_s"]
    return found


def _rank(found: _Found) -> tuple[bool, tuple[bool, bool, int], float]:
    """Rank by level, then as the supervisor does, then by age; the newest may be the only one not waived."""
    _, finding = found
    corroborated = is_corroborated(finding["overridden"], finding["origins"] or finding["sources"])
    action = remedy_of(finding["action"], finding.get("remedy", "")) or finding["action"]
    rank = severity(is_corroborated=corroborated, is_lasting=finding["lasting"], action=action)
    return finding["level"] == UNHEALTHY, rank, finding["since_s"]


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value[:MAX_WORD]
    return [_cut(each) for each in value] if isinstance(value, list) else value
