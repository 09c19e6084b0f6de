"""The agent's report as JSON: the contract of `/v1/health` and `holdfast node check --json`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.node_report import SCHEMA
from nodeagent.agent.agent import MEMORY, Published, Released
from nodeagent.agent.sensor_threads import NOT_YET, SensorStatus
from nodeagent.model import (
    DRIVER,
    ENTITY_KINDS,
    NODE,
    Action,
    HealthFinding,
    HealthVerdict,
    Level,
    kind_of,
    word,
)
from nodeagent.sensing.sensor import Omission


def health_report(published: Published, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current health of the node.

    `about` holds the constant fields: node, boot, policy, versions.
    """
    level, action = worst(published.verdicts)
    return {
        "schema": SCHEMA,
        **about,
        "state_id": published.state_id,
        "at_s": round(published.at_s, 3),
        "level": word(level),
        "action": word(action),
        **published.clean_time.as_json(published.at_s),
        **published.clean_time.needs_as_json(),
        "unsteady_s": round(published.recent_faults.of_node_s(published.at_s), 1),
        "released": _released(published.released),
        "driver": dict(published.facts.get(DRIVER, {})),
        "gpus": [{"entity": e, **f} for e, f in sorted(published.facts.items()) if e != DRIVER],
        "entities": [_entity_report(each, published) for each in published.verdicts],
        "sensors": [sensor_report(each) for each in published.sensors],
        "dropped": published.dropped,
        "problems": list(published.problems),
    }


def _released(released: Released | None) -> dict[str, Any] | None:
    if released is None:
        return None
    return {"until_s": round(released.until_s, 3), "closed": released.closed}


UNKNOWN = "unknown"  # the level of a node without known faults if some check could not be evaluated


def check_report(
    published: Published,
    about: Mapping[str, Any],
    open_questions: Iterable[tuple[str, str, str]],
    for_s: float,
    *,
    unread: Iterable[str] = (),
    allow_blind: bool = False,
) -> dict[str, Any]:
    """Return `health_report` for a short run, which must not report unjudged checks as healthy.

    `undecided` lists the checks that could not be decided in the run (`open_questions`: entity, check, why),
    what the sensors have left out so far but may still see, why a saved state could not be read (`unread`),
    and the sensors that are blind. If it is not empty, an otherwise healthy node has the level `unknown`;
    with `allow_blind`, blind sensors do not count. `for_s` is the duration of the run.
    """
    found = health_report(published, about)
    undecided = [
        *_unread(unread),
        *({"entity": e, "check": c, "why": why} for e, c, why in open_questions),
        *(
            _open_omission(omission)
            for each in published.sensors
            for omission in each.left_out
            if omission.is_open
        ),
    ]
    blind = [
        {"entity": f"sensor/{each.name}", "check": "", "why": _why_blind(each, for_s)}
        for each in published.sensors
        if not each.sees and not each.nothing_there
    ]
    if not any(each.observations for each in published.sensors):
        blind.append({"entity": NODE, "check": "", "why": f"no sensor has observed anything in {for_s:g} s"})
    counted = undecided if allow_blind else [*undecided, *blind]
    return {
        **found,
        "level": _level(published, bool(counted)),
        "looked_s": for_s,
        "undecided": [*undecided, *blind],
    }


def watch_report(published: Published, about: Mapping[str, Any], unread: Sequence[str]) -> dict[str, Any]:
    """Return `health_report` for a watch that has just begun.

    Without its saved state (`unread`: why), an otherwise healthy node has the level `unknown`, because only
    that state may show a fault.
    """
    found = health_report(published, about)
    return {**found, "level": _level(published, bool(unread)), "undecided": _unread(unread)}


def _open_omission(omission: Omission) -> dict[str, str]:
    is_entity = kind_of(omission.what) in ENTITY_KINDS
    entity, check = (omission.what, "") if is_entity else (NODE, omission.what)
    return {"entity": entity, "check": check, "why": omission.why}


def _unread(whys: Iterable[str]) -> list[dict[str, str]]:
    return [{"entity": MEMORY, "check": "", "why": why} for why in whys]


def _level(published: Published, is_undecided: bool) -> str:
    level, _ = worst(published.verdicts)
    return UNKNOWN if is_undecided and level is Level.HEALTHY else word(level)


def _why_blind(status: SensorStatus, for_s: float) -> str:
    if status.why == NOT_YET:
        return f"it has not answered in {for_s:g} s"
    return status.why


def worst(verdicts: Sequence[HealthVerdict]) -> tuple[Level, Action]:
    """Return the node's level, and the greatest action among the entities at that level."""
    level = max((each.level for each in verdicts), default=Level.HEALTHY)
    action = max((each.action for each in verdicts if each.level == level), default=Action.NONE)
    return level, action


def _entity_report(verdict: HealthVerdict, published: Published) -> dict[str, Any]:
    return {
        "entity": verdict.entity,
        "level": word(verdict.level),
        "action": word(verdict.action),
        "findings": [_finding_report(each, published) for each in verdict.findings],
    }


def _finding_report(each: HealthFinding, published: Published) -> dict[str, Any]:
    return {
        "check": each.check,
        "code": each.code,
        "level": word(each.level),
        "action": word(each.action),
        "since_s": round(each.since_s, 3),
        "last_s": round(each.last_s, 3),
        "sign_s": round(each.last_s, 3) if each.of_events else None,
        "recent_s": round(published.recent_faults.of_finding_s(each, published.at_s), 1),
        "why": each.why,
        "evidence": list(each.evidence),
        "clears": each.clears,
        "sources": list(each.sources),
        "origins": list(each.origins),
        "device": each.device,
        "lasting": each.lasting,
        "remedy": word(each.remedy),
        "overridden": each.overridden,
    }


def sensor_report(each: SensorStatus) -> dict[str, Any]:
    return {
        "name": each.name,
        "sees": each.sees,
        "why": each.why,
        "calls": each.calls,
        "observations": each.observations,
        "call_s": round(each.call_s, 6),
        "in_call": each.in_call,
        "left_out": [{"what": one.what, "why": one.why} for one in each.left_out],
    }
