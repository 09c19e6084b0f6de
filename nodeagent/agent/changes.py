"""Determines which findings were raised, changed or cleared since the last report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nodeagent.model import Action, HealthFinding, Level, word

FindingKey = tuple[str, str, int]  # entity, check, code or -1
RAISED, WORSE, BETTER, CLEARED = "raised", "worse", "better", "cleared"


@dataclass(frozen=True, slots=True)
class ReportedFinding:
    """The last reported state of a finding, which is kept across restarts to detect changes."""

    level: Level
    action: Action
    since_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """One change to report."""

    at_s: float
    kind: str  # RAISED, WORSE, BETTER, CLEARED
    entity: str
    check: str
    code: int | None
    level: Level
    action: Action
    why: str
    evidence: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def finding_key(finding: HealthFinding) -> FindingKey:
    return finding.entity, finding.check, -1 if finding.code is None else finding.code


def find_changes(
    reported: Mapping[FindingKey, ReportedFinding], findings: Iterable[HealthFinding], now_s: float
) -> tuple[tuple[Change, ...], dict[FindingKey, ReportedFinding]]:
    """Return the changes since the last report, and the reported state after them.

    A finding that persists, or that an additional sensor reports, is not reported again.
    """
    found: list[Change] = []
    after: dict[FindingKey, ReportedFinding] = {}
    for each in findings:
        before = reported.get(finding_key(each))
        now = ReportedFinding(each.level, each.action, each.since_s if before is None else before.since_s)
        kind = _kind(before, now)
        if kind is not None:
            found.append(_change(now_s, kind, each))
        after[finding_key(each)] = now
    for (entity, check, code), before in reported.items():
        if (entity, check, code) not in after:
            number = None if code < 0 else code
            why = f"it was active for {now_s - before.since_s:.0f} s"
            found.append(Change(now_s, CLEARED, entity, check, number, Level.HEALTHY, Action.NONE, why))
    return tuple(found), after


def _kind(before: ReportedFinding | None, now: ReportedFinding) -> str | None:
    if before is None:
        return RAISED
    old, new = (before.level, before.action), (now.level, now.action)
    if new == old:
        return None
    return WORSE if new > old else BETTER


def _change(now_s: float, kind: str, each: HealthFinding) -> Change:
    return Change(
        now_s, kind, each.entity, each.check, each.code, each.level, each.action,
        each.why, each.evidence, each.sources,
    )  # fmt: skip


def change_as_json(change: Change) -> dict[str, Any]:
    """Return a change in the JSON form that the API, the history and the log share."""
    return {
        "at_s": round(change.at_s, 6),
        "kind": change.kind,
        "entity": change.entity,
        "check": change.check,
        "code": change.code,
        "level": word(change.level),
        "action": word(change.action),
        "why": change.why,
        "evidence": list(change.evidence),
        "sources": list(change.sources),
    }
