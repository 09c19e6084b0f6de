"""Evaluates one event of one entity: its bursts, its recurrence, the driver's verdict, its end. Pure.

Events within three minutes of each other are one burst, regardless of the sensor that reports them. A fault
writes hundreds of lines, two sensors see each of them, and after a restart some are read again. Bursts are
unions of intervals, so neither order nor repetition makes a difference, and their memory use is bounded.

Xid 154 is the driver's verdict on the Xid that it accompanies; it replaces the table's level and action
unless an operator has set them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from nodeagent.model import VERDICT_XID, Action, HealthFinding, Level, Observation, duration, word
from nodeagent.policy.meanings import MOST_BURSTS
from nodeagent.policy.rules import CLEARS_IN_WORDS, Clears, HealthPolicy, Meaning

GAP_S = 180.0  # Meta and Azure report storms of hundreds of lines over minutes; gpud also merges them
MAX_BURSTS = MOST_BURSTS
MAX_TEXTS = 3
MAX_SOURCES = 4
Burst = tuple[float, float]  # first and last event
BEFORE_S = 2.0  # the verdict may arrive before its code
AFTER_S = 10.0  # the verdict follows its code immediately, so a later one concerns a different code
EPSILON_S = 1e-6


@dataclass(slots=True)
class EventBursts:
    """All bursts of one event of one entity, oldest first, and the newest texts."""

    spans: list[Burst] = field(default_factory=list)
    texts: list[tuple[float, str]] = field(default_factory=list)  # newest last
    sources: list[str] = field(default_factory=list)

    def add(self, seen: Observation) -> bool:
        """Add an event. Return False if it changes nothing."""
        before = (self.spans, self.texts, self.sources)
        self.spans = join_burst(self.spans, (seen.at_s, seen.at_s))
        if seen.text:
            texts = {text: at_s for at_s, text in self.texts}
            texts[seen.text] = max(seen.at_s, texts.get(seen.text, seen.at_s))
            self.texts = sorted((at_s, text) for text, at_s in texts.items())[-MAX_TEXTS:]
        self.sources = sorted({*self.sources, seen.source})[:MAX_SOURCES]
        return before != (self.spans, self.texts, self.sources)

    def dump(self) -> list[Any]:
        """Return the bursts as JSON, for `load`."""
        return [[list(span) for span in self.spans], [list(each) for each in self.texts], self.sources]

    @classmethod
    def load(cls, raw: Any) -> EventBursts:
        """Restore the dumped bursts. Raises ValueError or TypeError if they are malformed."""
        spans, texts, sources = raw
        return cls(
            [(float(first), float(last)) for first, last in spans[:MAX_BURSTS]],
            [(float(at_s), str(text)) for at_s, text in texts[:MAX_TEXTS]],
            [str(source) for source in sources[:MAX_SOURCES]],
        )


def join_burst(spans: list[Burst], new: Burst) -> list[Burst]:
    """Return the newest of `spans` and `new`, merging spans within `GAP_S` of each other."""
    merged: list[Burst] = []
    for first, last in sorted([*spans, new]):
        if merged and first - merged[-1][1] <= GAP_S:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged[-MAX_BURSTS:]


def union_bursts(all_spans: list[list[Burst]]) -> list[Burst]:
    """Return the bursts of more than one series, merged as if they were a single series."""
    merged: list[Burst] = []
    for spans in all_spans:
        for span in spans:
            merged = join_burst(merged, span)
    return merged


def driver_verdict(
    burst: Burst, verdicts: Mapping[str, EventBursts], policy: HealthPolicy
) -> tuple[Level, Action] | None:
    """Return the driver's newest verdict on a burst, or the most severe of several equally new ones."""
    last_s = burst[1] + AFTER_S
    found = [
        (min(span[1], last_s), meaning.level, meaning.action)
        for name, each in verdicts.items()
        if name and (meaning := policy.meaning("xid", VERDICT_XID, name))
        for span in each.spans
        if _together(burst, span)
    ]
    return max(found)[1:] if found else None


def sends_verdict(meaning: Meaning, branch: int | None) -> bool:
    """Return True if a driver of `branch` sends a verdict with the code."""
    return meaning.verdict_since is not None and (branch is None or branch >= meaning.verdict_since)


def all_overridden(verdict: Burst, others: Iterable[tuple[Meaning, Sequence[Burst]]]) -> bool:
    """Return True if a verdict of the driver concerns only codes that the operator has overridden."""
    with_it = [meaning for meaning, spans in others if any(_together(span, verdict) for span in spans)]
    return bool(with_it) and all(meaning.overridden for meaning in with_it)


def _together(burst: Burst, verdict: Burst) -> bool:
    return verdict[1] >= burst[0] - BEFORE_S and verdict[0] <= burst[1] + AFTER_S


@dataclass(frozen=True, slots=True)
class EndMarks:
    """The times of the events that clear findings, oldest first."""

    resets: Sequence[float] = ()  # resets of the GPU by any means except a boot
    boots: Sequence[float] = ()
    replaced: Sequence[float] = ()
    cleared: Sequence[float] = ()  # by an operator


def event_finding(
    entity: str,
    check: str,
    code: int,
    variants: Mapping[str, EventBursts],
    verdicts: Mapping[str, EventBursts],
    marks: EndMarks,
    policy: HealthPolicy,
    branch: int | None,
    now_s: float,
) -> tuple[HealthFinding | None, float]:
    """Return the finding for one code of one entity, and when it clears without new evidence.

    The finding is None if it has cleared.

    Args:
        variants: The code's bursts, by variant.
        verdicts: The driver's verdicts on the entity (Xid 154), by variant.
        branch: The driver's branch, such as 575; None if it is unknown.
    """
    seen = _informative(variants)
    if (check, code) == ("xid", VERDICT_XID):
        seen = _newest(seen)
    meant = {name: policy.meaning(check, code, name, branch) for name in seen}
    spans = union_bursts([each.spans for each in seen.values()])
    again = {name: _recurred(meant[name], seen[name].spans, spans) for name in seen}
    ends = {name: _end_s(seen[name].spans[-1][1], meant[name], again[name], marks) for name in seen}
    live = [name for name in seen if now_s < ends[name]]
    if not live:
        return None, inf
    worst = max(live, key=lambda n: (meant[n].level, meant[n].action, again[n], n))
    meaning, recurs = meant[worst], meant[worst].recurs
    first_s, last_s = spans[-1]
    awaits = check == "xid" and code != VERDICT_XID and sends_verdict(meaning, branch)
    verdict = driver_verdict(spans[-1], verdicts, policy) if awaits else None
    level, action, why, overridden_by = _judge(meaning, verdict)
    if recurs and again[worst] and (recurs.level, recurs.action) > (level, action):
        level, action = recurs.level, recurs.action
        why = f"{why}; {again[worst]} times within {duration(recurs.within_s)}"
    texts = sorted({each for name in seen for each in seen[name].texts})[-MAX_TEXTS:]
    sources = tuple(sorted({s for each in variants.values() for s in each.sources}))
    label = f"Xid {code}" if check == "xid" else f"SXid {code}" if check == "sxid" else ""
    found = HealthFinding(
        entity=entity,
        check=check,
        code=code if label else None,
        level=level,
        action=action,
        since_s=first_s,
        last_s=last_s,
        why=f"{label}: {why}" if label else why,
        evidence=tuple(text for _, text in texts),
        clears=_clears(meaning),
        sources=sources,
        lasting=ends[worst] == inf,
        overridden=overridden_by,
    )
    return found, min(ends[name] for name in live)


def _newest(verdicts: Mapping[str, EventBursts]) -> Mapping[str, EventBursts]:
    """Keep only the driver's newest verdict, which replaces the earlier ones."""
    name = max(verdicts, key=lambda each: (verdicts[each].spans[-1][1], each))
    return {name: verdicts[name]}


def _informative(variants: Mapping[str, EventBursts]) -> Mapping[str, EventBursts]:
    """Omit bursts without a variant if another sensor has reported them with one."""
    plain = variants.get("")
    if plain is None or len(variants) == 1:
        return variants
    others = union_bursts([each.spans for name, each in variants.items() if name])
    uncovered = [span for span in plain.spans if len(union_bursts([others, [span]])) > len(others)]
    if uncovered:
        return variants
    return {name: each for name, each in variants.items() if name}


def _judge(meaning: Meaning, verdict: tuple[Level, Action] | None) -> tuple[Level, Action, str, str]:
    """Return level, action, reason, and the source that overrode the table: "operator", "driver" or ""."""
    if meaning.overridden:
        return meaning.level, meaning.action, meaning.name, "operator"
    if verdict is not None:
        return *verdict, f"{meaning.name}; the driver recommends {word(verdict[1])}", "driver"
    return meaning.level, meaning.action, meaning.name, ""


def _recurred(meaning: Meaning, own: Sequence[Burst], all_spans: Sequence[Burst]) -> int:
    """Return the number of bursts in the window if it reaches the limit, otherwise 0."""
    if meaning.recurs is None:
        return 0
    spans = own if meaning.recurs.same_variant else all_spans
    since = spans[-1][1] - meaning.recurs.within_s
    count = sum(last >= since for _, last in spans)
    return count if count >= meaning.recurs.bursts else 0


def _end_s(last_s: float, meaning: Meaning, again: int, marks: EndMarks) -> float:
    """Return when the finding of an event last seen at `last_s` clears; infinity if that is unknown."""
    if any(at_s > last_s for at_s in marks.cleared):
        return -inf
    if meaning.clears is Clears.TIME:
        # The finding of an event that recurred too often lasts until its bursts have left the window.
        hold_s = max(meaning.hold_s, meaning.recurs.within_s) if again and meaning.recurs else meaning.hold_s
        return last_s + hold_s
    ends = {
        Clears.RESET: (*marks.resets, *marks.boots, *marks.replaced),
        Clears.BOOT: (*marks.boots, *marks.replaced),
        Clears.REPLACED: tuple(marks.replaced),
    }[meaning.clears]
    return min((at_s for at_s in ends if at_s > last_s + EPSILON_S), default=inf) + meaning.hold_s


def _clears(meaning: Meaning) -> str:
    hold = f"{duration(meaning.hold_s)} without another"
    if meaning.clears is Clears.TIME:
        return hold
    return " and ".join([CLEARS_IN_WORDS[meaning.clears], *([hold] if meaning.hold_s else [])])
