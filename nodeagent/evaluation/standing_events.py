"""What an event means now: the table's word or the driver's, how often it came, whether it is over. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from nodeagent.evaluation import drivers_word
from nodeagent.evaluation.bursts import Burst, Bursts, union
from nodeagent.evaluation.drivers_word import VERDICT
from nodeagent.policy.rules import Clears, Meaning, Policy
from nodeagent.verdict import Action, Finding, Level, word

EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class Marks:
    """Times at which something happened that ends findings, oldest first."""

    resets: Sequence[float] = ()  # of the GPU, by whatever means but a boot
    boots: Sequence[float] = ()
    replaced: Sequence[float] = ()
    cleared: Sequence[float] = ()  # by an operator


def finding(
    entity: str,
    check: str,
    code: int,
    variants: Mapping[str, Bursts],
    verdicts: Mapping[str, Bursts],
    marks: Marks,
    policy: Policy,
    branch: int | None,
    now_s: float,
) -> tuple[Finding | None, float]:
    """Return what stands because of one code of one entity, and until when it does if nothing new comes.

    None if nothing stands any more.

    Args:
        variants: What was seen of it, by variant.
        verdicts: The driver's words about the entity (Xid 154), by variant.
        branch: Of the driver, 575; None if it is not known.
    """
    told = _informative(variants)
    if (check, code) == ("xid", VERDICT):
        told = _newest(told)
    meant = {name: policy.meaning(check, code, name, branch) for name in told}
    spans = union([each.spans for each in told.values()])
    again = {name: _recurred(meant[name], told[name].spans, spans) for name in told}
    ends = {name: _end_s(told[name].spans[-1][1], meant[name], again[name], marks) for name in told}
    live = [name for name in told if now_s < ends[name]]
    if not live:
        return None, inf
    worst = max(live, key=lambda n: (meant[n].level, meant[n].action, again[n], n))
    meaning, recurs = meant[worst], meant[worst].recurs
    first_s, last_s = spans[-1]
    asks = check == "xid" and code != VERDICT and drivers_word.linked(meaning, branch)
    said = drivers_word.about(spans[-1], verdicts, policy) if asks else None
    level, action, why, said_by = _judged(meaning, said)
    if recurs and again[worst] and (recurs.level, recurs.action) > (level, action):
        level, action = recurs.level, recurs.action
        why = f"{why}; {again[worst]} times within {_span(recurs.within_s)}"
    texts = sorted({each for name in told for each in told[name].texts})[-3:]
    sources = tuple(sorted({s for each in variants.values() for s in each.sources}))
    label = f"Xid {code}" if check == "xid" else f"SXid {code}" if check == "sxid" else ""
    found = Finding(
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
        overridden=said_by,
    )
    return found, min(ends[name] for name in live)


def _newest(words: Mapping[str, Bursts]) -> Mapping[str, Bursts]:
    """Keep the driver's newest word: it says from what to what its advice has changed."""
    name = max(words, key=lambda each: (words[each].spans[-1][1], each))
    return {name: words[name]}


def _informative(variants: Mapping[str, Bursts]) -> Mapping[str, Bursts]:
    """Leave out what was told without its variant where another sensor has told it with one."""
    plain = variants.get("")
    if plain is None or len(variants) == 1:
        return variants
    others = union([each.spans for name, each in variants.items() if name])
    uncovered = [span for span in plain.spans if len(union([others, [span]])) > len(others)]
    if uncovered:
        return variants
    return {name: each for name, each in variants.items() if name}


def _judged(meaning: Meaning, said: tuple[Level, Action] | None) -> tuple[Level, Action, str, str]:
    """Return level, action, why, and whose word it is: operator, driver, or "" for the table's."""
    if meaning.overridden:
        return meaning.level, meaning.action, meaning.name, "operator"
    if said is not None:
        return *said, f"{meaning.name}; the driver says {word(said[1])}", "driver"
    return meaning.level, meaning.action, meaning.name, ""


def _recurred(meaning: Meaning, own: Sequence[Burst], all_spans: Sequence[Burst]) -> int:
    """Return how many bursts there were if that is too many, else 0."""
    if meaning.recurs is None:
        return 0
    spans = own if meaning.recurs.same_variant else all_spans
    since = spans[-1][1] - meaning.recurs.within_s
    count = sum(last >= since for _, last in spans)
    return count if count >= meaning.recurs.bursts else 0


def _end_s(last_s: float, meaning: Meaning, again: int, marks: Marks) -> float:
    """Return when an event whose newest was at `last_s` stands no more; infinity if that is not known."""
    if any(at_s > last_s for at_s in marks.cleared):
        return -inf
    if meaning.clears is Clears.TIME:
        # What has come too often stands until it no longer has.
        hold_s = max(meaning.hold_s, meaning.recurs.within_s) if again and meaning.recurs else meaning.hold_s
        return last_s + hold_s
    ends = {
        Clears.RESET: (*marks.resets, *marks.boots, *marks.replaced),
        Clears.BOOT: (*marks.boots, *marks.replaced),
        Clears.REPLACED: tuple(marks.replaced),
    }[meaning.clears]
    return min((at_s for at_s in ends if at_s > last_s + EPSILON_S), default=inf) + meaning.hold_s


def _clears(meaning: Meaning) -> str:
    hold = f" and {_span(meaning.hold_s)} without another" if meaning.hold_s else ""
    return {
        Clears.TIME: f"{_span(meaning.hold_s)} without another",
        Clears.RESET: f"a reset of the GPU or a reboot{hold}",
        Clears.BOOT: f"a reboot{hold}",
        Clears.REPLACED: f"holdfast node clear, or another GPU in its place{hold}",
    }[meaning.clears]


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
