"""Stores all evidence as JSON and restores it, including evidence that earlier agents stored. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from nodeagent.evaluation import company
from nodeagent.evaluation.bursts import (
    MAX_BURSTS,
    MAX_MARKS,
    MOMENT_S,
    Burst,
    EventBursts,
    loaded_spans,
    union_bursts,
)
from nodeagent.evaluation.company import CONTAINMENT_XIDS, TOGETHER_S
from nodeagent.evaluation.events import AFTER_S, BEFORE_S
from nodeagent.evaluation.evidence import (
    Event,
    Evidence,
    HeldSeries,
    Variants,
    is_end_mark,
)
from nodeagent.evaluation.samples import SampleSeries
from nodeagent.model import NODE, VERDICT_XID
from nodeagent.policy.rules import HealthPolicy


def dump(evidence: Evidence) -> dict[str, Any]:
    """Return all evidence as JSON; an evaluator that loads it returns the same findings.

    Earlier agents read only `series` and `events`, so everything that they do not know has a separate key.
    """
    return {
        "series": [
            [*place, held.series.dump(), sorted(held.heard), held.text]
            for place, held in evidence.series.items()
        ],
        "events": _rows(evidence.events),
        "grown": _rows(evidence.grown),
        "heard": [
            *([*place, None, "", _times(held.heard)] for place, held in evidence.series.items()),
            *(
                [*event, name, _times(each.heard)]
                for store in evidence.stores
                for event, variants in store.items()
                for name, each in variants.items()
            ),
        ],
        "unseen": [
            [*place, *unseen_s]
            for place, held in evidence.series.items()
            if any(unseen_s := [each.unseen_s for each in held.series.base])
        ],
        "shown": [
            [*place, *shown]
            for place, held in evidence.series.items()
            if set(shown := [each.shown for each in held.series.base]) != {None}
        ],
        "inherited": _spans_rows(evidence.events, lambda each: each.inherited),
        "recurring": _spans_rows(evidence.events, lambda each: each.recurring),
        "moments": _spans_rows(
            evidence.events, lambda each: _earlier_moments(each) if each.moments != each.spans else ()
        ),
        "company": [
            [*event, name, [[list(codes), times] for codes, times in each.company.items()]]
            for store in evidence.stores
            for event, variants in store.items()
            for name, each in variants.items()
            if each.company is not None
        ],
        "boots": [
            [name, each.moments]
            for name, each in evidence.events.get((NODE, "boot", 0), {}).items()
            if len(each.moments) >= MAX_BURSTS
        ],
        # the same for other marks
        "marks": [
            [*event, name, each.moments]
            for event, variants in evidence.events.items()
            for name, each in variants.items()
            if each.exact and event[1] != "boot" and len(each.moments) > MAX_BURSTS
        ],
        "ended": [
            [*place, held.series.ended_s]
            for place, held in evidence.series.items()
            if held.series.ended_s > -inf
        ],
        "gone": [[entity, at_s] for entity, at_s in evidence.gone_s.items()],
        "devices": evidence.devices.dump(),
        "models": evidence.models.dump(),
        "branch": evidence.branch,
        "first_look_s": None if evidence.first_look_s == -inf else evidence.first_look_s,
        "knew_more": evidence.knew_more,
    }


def without_texts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return dumped evidence without the sensors' texts; it leads to the same findings, without texts."""
    rows = {
        each: [[*event, [spans, [], sources]] for *event, (spans, _, sources) in raw[each]]
        for each in ("events", "grown")
    }
    return {**raw, **rows, "series": [[*series, ""] for *series, _ in raw["series"]]}


def load(evidence: Evidence, policy: HealthPolicy, raw: Any) -> None:
    """Restore the dumped evidence. Raises ValueError, TypeError or KeyError if it is malformed.

    Evidence of checks that the policy no longer has is omitted.
    """
    heard = {
        (str(entity), str(check), None if code is None else int(code), str(variant)): times
        for entity, check, code, variant, times in raw.get("heard", ())
    }
    inherited, recurring, moments = (
        {
            (str(entity), str(check), int(code), str(variant)): spans
            for entity, check, code, variant, spans in raw.get(each, ())
        }
        for each in ("inherited", "recurring", "moments")
    )
    marks = {
        (str(entity), str(check), int(code), str(variant)): spans
        for entity, check, code, variant, spans in raw.get("marks", ())
    }
    for entity, check, series, sources, text in raw["series"]:
        if str(check) in policy.rules:
            held = HeldSeries(SampleSeries.load(series), text=str(text))
            held.series.fit(policy.rules[str(check)])
            times = {str(s): float(t) for s, t in heard.get((str(entity), str(check), None, ""), ())}
            held.heard = {str(each): times.get(str(each), held.last_s) for each in sources}
            evidence.series[str(entity), str(check)] = held
            evidence.entities.add(str(entity))
    for entity, check, *unseen_s in raw.get("unseen", ()):  # an earlier version did not measure it
        if (known := evidence.series.get((entity, check))) is not None:
            low, high = (
                replace(each, unseen_s=float(s)) for each, s in zip(known.series.base, unseen_s, strict=True)
            )
            known.series.base = (low, high)
    for entity, check, *values in raw.get("shown", ()):
        if (known := evidence.series.get((entity, check))) is not None:
            low, high = (
                replace(each, shown=None if value is None or not each.active else float(value))
                for each, value in zip(known.series.base, values, strict=True)
            )
            known.series.base = (low, high)
    for store, rows in ((evidence.events, raw["events"]), (evidence.grown, raw.get("grown", ()))):
        for entity, check, code, variant, bursts in rows:
            event = (str(entity), str(check), int(code))
            if policy.is_event(event[1]) is (store is evidence.events) and policy.has_check(event[1]):
                key = (*event, str(variant))
                if store is evidence.grown and variant:
                    float(variant)  # the amount; a malformed one must raise here, not at each judgement
                rest = inherited.get(key, ()), recurring.get(key, ()), moments.get(key, ())
                made = EventBursts.load(bursts, heard.get(key, ()), *rest)
                made.exact = is_end_mark(event, str(variant))
                if key in marks and made.exact:
                    made.moments = loaded_spans(marks[key], MAX_MARKS)
                if event[1] == "boot":
                    _load_boots(made, [each[1] for each in raw.get("boots", ()) if each[0] == variant])
                store.setdefault(event, {})[str(variant)] = made
                evidence.entities.add(event[0])
    if "grown" not in raw:
        _note_standing_growth(evidence, policy)
    _load_company(evidence, raw)
    evidence.recall_recent()
    for entity, check, ended_s in raw.get("ended", ()):
        if (known := evidence.series.get((entity, check))) is not None:
            known.series.ended_s = float(ended_s)
    evidence.gone_s = {str(entity): float(at_s) for entity, at_s in raw.get("gone", ())}
    evidence.renew()
    evidence.models.load(raw.get("models", ()))
    if evidence.branch is None and raw.get("branch") is not None:
        evidence.branch = int(raw["branch"])
    evidence.devices.load(raw.get("devices", ()))
    first_look_s = raw.get("first_look_s")
    evidence.first_look_s = -inf if first_look_s is None else float(first_look_s)
    evidence.knew_more = bool(raw.get("knew_more", False))


def _load_company(evidence: Evidence, raw: Mapping[str, Any]) -> None:
    """Restore what was reported with the events; derive it from the moments if an earlier agent stored them.

    Agents that stored no moments merged only events within a burst, so they are compared as those did.
    """
    for entity, check, code, variant, groups in raw.get("company", ()):
        event = (str(entity), str(check), int(code))
        for store in evidence.stores:
            if (known := store.get(event, {}).get(str(variant))) is not None:
                known.company = {
                    tuple(int(each) for each in codes): loaded_spans(times) for codes, times in groups
                }
    are_known = "moments" not in raw
    for event, variants in evidence.events.items():
        if event[1] not in ("xid", "sxid"):
            continue
        is_verdict = event[1:] == ("xid", VERDICT_XID)
        for name, each in variants.items():
            if each.company is None and is_verdict:
                others = _moments_of_xids(evidence, event[0], lambda code: code != VERDICT_XID)
                each.company = company.of_others(each, others, AFTER_S, BEFORE_S)
            elif each.company is None and not name:
                details = [other for other_name, other in variants.items() if other_name]
                each.company = company.of_plain(each, details, are_known=are_known)
    for event, amounts in evidence.grown.items():
        for each in amounts.values():
            if each.company is None:
                others = _moments_of_xids(evidence, event[0], lambda code: code in CONTAINMENT_XIDS)
                each.company = company.of_others(each, others, TOGETHER_S, TOGETHER_S)


def _moments_of_xids(
    evidence: Evidence, entity: str, is_wanted: Callable[[int], bool]
) -> list[tuple[int, list[Burst]]]:
    return [
        (code, [moment for each in variants.values() for moment in each.moments])
        for (other, check, code), variants in evidence.events.items()
        if other == entity and check == "xid" and is_wanted(code)
    ]


def _note_standing_growth(evidence: Evidence, policy: HealthPolicy) -> None:
    """Record lasting counter growth that an earlier agent saw but did not record as growth."""
    for (entity, check), held in evidence.series.items():
        rule = policy.rules[check]
        unhealthy = held.series.levels(rule)[1]
        if rule.lasts and rule.unhealthy is not None and unhealthy.active:
            at_s = unhealthy.since_s
            made = EventBursts([(at_s, at_s)], heard=dict.fromkeys(held.heard, at_s))
            evidence.grown[entity, check, 0] = {"": made}


def _earlier_moments(bursts: EventBursts) -> list[Burst]:
    """Return the moments as an earlier agent keeps them: the oldest of very many marks merged into one."""
    return union_bursts([bursts.moments], MOMENT_S) if bursts.exact else bursts.moments


def _load_boots(made: EventBursts, kept: Sequence[Any]) -> None:
    """Restore the boots.

    An earlier agent kept `MAX_BURSTS` of them. The oldest one may represent several boots, and the node was
    not off for all of the time that it covers.
    """
    if kept:
        made.moments = loaded_spans(kept[0], MAX_MARKS)
    elif len(made.moments) == MAX_BURSTS:
        made.moments = [(made.moments[0][1],) * 2, *made.moments[1:]]


def _times(heard: Mapping[str, float]) -> list[list[Any]]:
    return [[source, at_s] for source, at_s in sorted(heard.items())]


def _spans_rows(
    store: Mapping[Event, Variants], spans_of: Callable[[EventBursts], Iterable[Burst]]
) -> list[list[Any]]:
    return [
        [*event, name, spans]
        for event, variants in store.items()
        for name, each in variants.items()
        if (spans := [list(span) for span in spans_of(each)])
    ]


def _rows(store: Mapping[Event, Variants]) -> list[list[Any]]:
    return [
        [*event, name, bursts.dump()]
        for event, variants in store.items()
        for name, bursts in variants.items()
    ]
