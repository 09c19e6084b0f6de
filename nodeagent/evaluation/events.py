"""Evaluates one event of one entity: its recurrence, the driver's verdict, its age, its end. Pure.

Each burst is evaluated when it occurs. A finding starts with the first burst after the previous finding
ended, and its newest burst decides how it ends. An earlier judgement that is more severe than the newest one
stays in force until its own remedy, because a repetition never makes a fault milder. A burst of another
variant that is at least as severe is also a repetition: another link that fails in the quiet time after a
remedy shows that the remedy did not help. A milder burst of another variant, such as an error that can be
ignored, is not a repetition.

Xid 154 is the driver's verdict on the Xid that it follows; it replaces the table's level, action and end
unless an operator has set them. It is about the nearest code before it with which the driver sends verdicts.
For all other codes around it, it can only raise the judgement. The verdict "none" never lowers a judgement,
because it may belong to a recovery that preceded the fault. If it arrives later, it ends the findings that a
reset ends and the findings that the driver evaluated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from math import inf

from nodeagent.evaluation.bursts import (
    GAP_S,
    MAX_TEXTS,
    MOMENT_S,
    NEVER_OFF,
    SENSORS_APART_S,
    Burst,
    EventBursts,
    TimeOff,
    informative,
    merged_bursts,
)
from nodeagent.evaluation.samples import LATE_S
from nodeagent.model import VERDICT_XID, Action, HealthFinding, Level, duration, word
from nodeagent.policy.rules import CLEARED_BY, CLEARS_IN_WORDS, REMEDY_OF, Clears, HealthPolicy, Meaning

BEFORE_S = 2.0  # the verdict may arrive before its code
AFTER_S = 10.0  # the verdict follows its code immediately, so a later verdict concerns a different code
SILENT_S = 3600.0  # the longest silence between signs of one fault; an agent restarts within minutes
EPSILON_S = 1e-6
BY_BOOT = (Clears.BOOT, Clears.REPLACED)  # conditions that only a boot, or an exchange while off, can meet
_ORDER = {each: n for n, each in enumerate(Clears)}  # the cheapest condition first


@dataclass(frozen=True, slots=True)
class DriversVerdict:
    """What the driver says about a burst."""

    meaning: Meaning
    replaces: bool  # it is about an event of the burst, so it may also lower a judgement


def driver_verdict(
    burst: Burst,
    verdicts: Mapping[str, EventBursts],
    policy: HealthPolicy,
    meaning: Meaning,
    own: Sequence[float] | None = None,
    others: Sequence[Burst] = (),
) -> DriversVerdict | None:
    """Return the driver's newest verdict about a burst, or a more severe one that came since, or None.

    A verdict that is about another code, or that came before the burst, is used only if it is more severe
    than `meaning`. Therefore a repeat that stretches a burst over a verdict cannot lower what is in force.

    Args:
        own: The known times of the burst's events, ascending; None: its start and its end.
        others: The moments of the other codes with which the driver sends verdicts, in order and disjoint.
    """
    last_s = burst[1] + AFTER_S
    times = sorted(burst) if own is None else own
    near = [
        (span, said, name)
        for name, each in verdicts.items()
        if name and (said := policy.meaning("xid", VERDICT_XID, name)).level is not Level.HEALTHY
        for span in each.moments
        if _together(burst, span)
    ]
    about = max(
        (
            (at_s, said.level, said.action, name)
            for span, said, name in near
            for at_s in span
            if _is_about(at_s, burst, times, others)
        ),
        default=None,
    )
    says = policy.meaning("xid", VERDICT_XID, about[3]) if about else meaning
    graver = [
        (*gravity(said), name)
        for span, said, name in near
        if (said.level, said.action) > (says.level, says.action)
        and (about is None or min(span[1], last_s) > about[0])
    ]
    if graver:
        says = policy.meaning("xid", VERDICT_XID, max(graver)[3])
    return DriversVerdict(says, about is not None) if graver or about else None


def _is_about(at_s: float, burst: Burst, own: Sequence[float], others: Sequence[Burst]) -> bool:
    """Return True if a verdict at `at_s` follows an event of a burst with no other code between them."""
    count = bisect_right(own, at_s)
    event_s = own[count - 1] if count else -inf
    if not max(at_s - AFTER_S, burst[0]) <= event_s <= burst[1]:
        return False
    before = bisect_right(others, (at_s, inf))
    if not before:
        return True
    first_s, other_s = others[before - 1]
    if other_s > at_s:  # only the first event of a short moment around a verdict precedes it
        other_s = first_s if other_s - first_s <= MOMENT_S else at_s
    return other_s <= event_s


def sends_verdict(meaning: Meaning, branch: int | None) -> bool:
    """Return True if a driver of `branch` sends a verdict with the code."""
    return meaning.verdict_since is not None and (branch is None or branch >= meaning.verdict_since)


def _together(burst: Burst, verdict: Burst) -> bool:
    return verdict[1] >= burst[0] - BEFORE_S and verdict[0] <= burst[1] + AFTER_S


@dataclass(frozen=True, slots=True)
class EndMarks:
    """The times of the events that clear findings, oldest first."""

    resets: Sequence[float] = ()  # resets of the GPU by any means except a boot
    boots: Sequence[float] = ()
    replaced: Sequence[float] = ()
    cleared: Sequence[float] = ()  # by an operator
    over: Sequence[float] = ()  # the driver's verdict "none"
    off: TimeOff = NEVER_OFF


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one burst means, and when that ends."""

    level: Level
    action: Action
    clears: Clears
    hold_s: float
    why: str
    by: str = ""  # the source that overrode the table: "operator", "driver" or ""
    again: int = 0  # the number of bursts, if their recurrence raised the level or the action
    replaces: bool = False  # the driver has judged the burst itself, so earlier judgements no longer count
    ends_s: float = inf

    @property
    def gravity(self) -> tuple[Level, Action, int]:
        return gravity(self)


def gravity(found: Judgement | Meaning) -> tuple[Level, Action, int]:
    """Return the sort key of a judgement or meaning; the most severe one has the greatest key."""
    return found.level, found.action, _ORDER[found.clears]


@dataclass(frozen=True, slots=True)
class Signs:
    """The bursts of all variants of an event, by each level that they reach."""

    starts: Mapping[Level, Sequence[float]] = field(default_factory=dict)  # ascending
    ends: Mapping[Level, Sequence[float]] = field(default_factory=dict)  # the newest end up to each start

    @classmethod
    def of(cls, judged: Iterable[Iterable[tuple[Burst, Judgement]]]) -> Signs:
        found = sorted((burst, each.level) for chain in judged for burst, each in chain)
        at_least = {level: [burst for burst, shown in found if shown >= level] for level in Level}
        return cls(
            {level: [first for first, _ in spans] for level, spans in at_least.items()},
            {level: list(accumulate((last for _, last in spans), max)) for level, spans in at_least.items()},
        )

    def newest_s(self, level: Level, before_s: float) -> float:
        """Return the newest end of the bursts of at least this level that started before `before_s`."""
        count = bisect_left(self.starts.get(level, ()), before_s)
        return self.ends[level][count - 1] if count else -inf


Step = tuple[Burst, Meaning, str]  # a burst, its meaning, and its variant
DriversWord = Callable[[Meaning, Burst, str], DriversVerdict | None]
PoliciesAt = Callable[[Burst], Sequence[HealthPolicy]]  # for the states of a GPU during a burst


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
    policies_at: PoliciesAt | None = None,
    others: Sequence[Burst] = (),
) -> tuple[HealthFinding | None, float]:
    """Return the finding for one code of one entity, and when it changes without new evidence.

    The finding is None if it has cleared.

    Args:
        variants: The code's bursts, by variant.
        verdicts: The driver's verdicts on the entity (Xid 154), by variant.
        branch: The driver's branch, such as 575; None if it is unknown.
        policies_at: Returns the policies that apply to a burst; the most severe meaning is used. None:
            `policy` applies to all bursts.
        others: The moments of the other codes with which the driver sends verdicts, in order and disjoint.
    """
    seen = informative(variants)

    def meant(name: str, burst: Burst) -> Meaning:
        own = (policy,) if policies_at is None else policies_at(burst)
        meanings = [each.meaning(check, code, name, branch) for each in own]
        return meanings[0] if len(meanings) == 1 else max(meanings, key=gravity)

    is_verdict = (check, code) == ("xid", VERDICT_XID)

    @cache
    def own(name: str) -> Sequence[float]:
        return sorted(at_s for span in seen[name].moments for at_s in span)

    def drivers_word(meaning: Meaning, burst: Burst, name: str) -> DriversVerdict | None:
        if check != "xid" or is_verdict or not verdicts or not sends_verdict(meaning, branch):
            return None
        return driver_verdict(burst, verdicts, policy, meaning, own(name), others)

    chains = [
        [(span, meant(name, span), name) for span in each.spans_apart(marks.boots)]
        for name, each in seen.items()
        if each.spans
    ]
    mixed = [
        [(span, _of_several(meant(name, span)), name) for span in each.inherited]
        for name, each in seen.items()
        if each.inherited
    ]
    recurring = [
        [(span, meant(name, span), name) for span in each.recurring]
        for name, each in seen.items()
        if each.recurring
    ]
    if is_verdict:  # each verdict replaces the earlier ones, no matter what they recommended
        newest = max(seen, key=lambda name: (seen[name].last_s, name))
        steps = [(span, name) for name, each in seen.items() for span in each.all_spans]
        steps.sort(key=lambda step: (step[0][1], step[1]))
        chains = [[(span, meant(name, span), name) for span, name in steps]]
        mixed, recurring, seen = [], [], {newest: seen[newest]}
    stands, until_s = standing(chains, marks, now_s, drivers_word, is_verdict, mixed, recurring)
    if stands is None:
        return None, until_s
    if "" in variants and seen.get("") is not variants[""]:
        stands = replace(stands, since_s=_first_report_s(stands.since_s, variants[""], marks))
    label = f"Xid {code}" if check == "xid" else f"SXid {code}" if check == "sxid" else ""
    why = stands.worst.why
    found = finding_of(stands, entity, check, f"{label}: {why}" if label else why, seen, variants)
    return replace(found, code=code if label else None), until_s


def _first_report_s(since_s: float, plain: EventBursts, marks: EndMarks) -> float:
    """Return when the event of `since_s` was first reported, perhaps without a variant.

    `informative` omits such a report once the event is reported with a variant. The finding began with the
    report, so it must not become younger.
    """
    ended_s = max((*marks.resets, *marks.boots, *marks.replaced, *marks.cleared, *marks.over), default=-inf)
    from_s = max(since_s - SENSORS_APART_S, ended_s)
    return min((first for first, _ in plain.moments if from_s <= first < since_s), default=since_s)


def _of_several(meaning: Meaning) -> Meaning:
    """Return a meaning for bursts of several variants, which do not show that one variant has recurred."""
    is_single = meaning.recurs is not None and meaning.recurs.same_variant
    return replace(meaning, recurs=None) if is_single else meaning


@dataclass(frozen=True, slots=True)
class Standing:
    """The combined effect of all bursts of an event at one time."""

    worst: Judgement
    since_s: float  # since when judgements of this level or worse have been in force without a gap
    last_s: float
    lasting: bool  # a judgement of this level ends only with a remedy, even if the worst one ends earlier
    remedy: Action = Action.NONE  # the greatest remedy that such a judgement needs
    until_boot: bool = False  # a judgement of this level ends only with a boot or another GPU


def finding_of(
    stands: Standing,
    entity: str,
    check: str,
    why: str,
    seen: Mapping[str, EventBursts],
    heard: Mapping[str, EventBursts],
) -> HealthFinding:
    """Return the finding, with the texts in `seen` and the sensors in `heard` that reported it.

    A sensor that reported the event only before the finding began is omitted.
    """
    texts = sorted({each for name in seen for each in seen[name].texts})[-MAX_TEXTS:]
    from_s = stands.since_s - SENSORS_APART_S
    sources = {s for each in heard.values() for s, at_s in each.heard.items() if at_s >= from_s}
    worst = stands.worst
    return HealthFinding(
        entity=entity,
        check=check,
        code=None,
        level=worst.level,
        action=worst.action,
        since_s=stands.since_s,
        last_s=stands.last_s,
        why=why,
        evidence=tuple(text for _, text in texts),
        clears=_clears(worst),
        sources=tuple(sorted(sources)),
        lasting=stands.lasting,
        until_boot=stands.until_boot,
        overridden=worst.by,
        of_events=True,
        remedy=stands.remedy,
    )


def standing(
    chains: Sequence[Sequence[Step]],
    marks: EndMarks,
    now_s: float,
    drivers_word: DriversWord = lambda _meaning, _burst, _variant: None,
    superseding: bool = False,
    mixed: Sequence[Sequence[Step]] = (),
    recurring: Sequence[Sequence[Step]] = (),
) -> tuple[Standing | None, float]:
    """Return what is in force at `now_s` (None: nothing), and when that changes without new evidence.

    Args:
        chains: The bursts of each variant, oldest first, with their meanings.
        superseding: True if each step of a chain replaces the earlier steps, even more severe ones.
        mixed: The bursts of several variants; a step does not replace a step that may be of another variant.
        recurring: Like `mixed`, for bursts at which their variant had recurred.
    """
    floor_s = _last_word_s((*chains, *mixed, *recurring), marks)
    chains = list(_since(floor_s, chains))
    count = len(chains)
    chains += _since(floor_s, mixed)
    unrecurred = len(chains)
    chains += _since(floor_s, recurring)
    spans = merged_bursts(([burst for burst, *_ in steps] for steps in chains), GAP_S, marks.boots)
    owns = [[burst for burst, *_ in steps] for steps in chains]
    occurrences = _Occurrences(marks, now_s)
    judged = [
        [
            _judged(
                meaning, drivers_word(meaning, burst, name), burst, own, spans, occurrences, n >= unrecurred
            )
            for burst, meaning, name in steps
        ]
        for n, (own, steps) in enumerate(zip(owns, chains, strict=True))
    ]
    signs = Signs.of(zip(own, fresh, strict=True) for own, fresh in zip(owns, judged, strict=True))
    segments: list[tuple[Level, Burst]] = []
    live: list[Judgement] = []
    for n, (own, fresh) in enumerate(zip(owns, judged, strict=True)):
        stood = list(_stood(own, fresh, marks, signs, superseding, drivers_word_replaces=n < count))
        segments += [each for found, _ in stood for each in found]
        live += [each for each in stood[-1][1] if now_s < each.ends_s]
    if not live:
        return None, occurrences.until_s
    worst = max(
        live, key=lambda each: (*each.gravity, each.ends_s, each.again, each.why, each.by, each.hold_s)
    )
    since_s = _unbroken_since_s([burst for level, burst in segments if level >= worst.level])
    endless = [each for each in live if each.ends_s == inf and each.level is worst.level]
    remedy = max((REMEDY_OF.get(each.clears, Action.NONE) for each in endless), default=Action.NONE)
    of_boot = any(each.clears in BY_BOOT and each.level is worst.level for each in live)
    until_s = min(occurrences.until_s, *(each.ends_s for each in live))
    return Standing(worst, since_s, spans[-1][1], bool(endless), remedy, of_boot), until_s


def _last_word_s(chains: Sequence[Sequence[Step]], marks: EndMarks) -> float:
    """Return the last time that an operator cleared the entity, or that another GPU took its place."""
    newest_s = max(steps[-1][0][1] for steps in chains)
    exchanges = [at_s for at_s in marks.replaced if at_s <= newest_s + EPSILON_S]
    return max([-inf, *marks.cleared, *exchanges])


def _since(floor_s: float, chains: Sequence[Sequence[Step]]) -> Iterator[list[Step]]:
    """Yield the chains without the steps before `floor_s`."""
    for steps in chains:
        kept = [
            ((max(first, min(floor_s, last)), last), meaning, name)
            for (first, last), meaning, name in steps
            if last >= floor_s - EPSILON_S
        ]
        if kept:
            yield kept


def recurring(
    meaning: Meaning, own: Sequence[Burst], all_spans: Sequence[Burst], marks: EndMarks, now_s: float = inf
) -> list[Burst]:
    """Return the bursts of one variant after which a judgement of a recurrence was in force.

    Args:
        all_spans: The bursts of all variants.
    """
    occurrences = _Occurrences(marks, now_s)
    judged = [_judged(meaning, None, burst, own, all_spans, occurrences) for burst in own]
    stood = _stood(own, judged, marks, Signs(), superseding=False, drivers_word_replaces=True)
    return [burst for burst, (_, after) in zip(own, stood, strict=True) if any(each.again for each in after)]


def _judged(
    meaning: Meaning,
    verdict: DriversVerdict | None,
    burst: Burst,
    own: Sequence[Burst],
    all_spans: Sequence[Burst],
    occurrences: _Occurrences,
    has_recurred: bool = False,
) -> Judgement:
    """Return what one burst means, given the bursts before it, but without the time when that ends.

    If `has_recurred` is True, the burst is treated as a recurrence.
    """
    says = meaning
    why, by, replaces = meaning.name, "", False
    if meaning.overridden:
        by = "operator"
    elif verdict is not None:
        says, by, replaces = verdict.meaning, "driver", verdict.replaces
        why = f"{why}; the driver recommends {word(says.action)}"
    found = Judgement(says.level, says.action, says.clears, says.hold_s, why, by, replaces=replaces)
    recurs, again = meaning.recurs, _recurred(meaning, burst, own, all_spans, occurrences)
    if recurs is not None and has_recurred:
        again = max(again, recurs.bursts)
    if recurs is not None and again and (recurs.level, recurs.action) > (found.level, found.action):
        clears = CLEARED_BY.get(recurs.action, found.clears)
        found = Judgement(
            recurs.level,
            recurs.action,
            clears,
            # If it needs no remedy, it lasts until its bursts have left the window.
            max(found.hold_s, recurs.within_s) if clears is Clears.TIME else found.hold_s,
            f"{why}; {again} times within {duration(recurs.within_s)}",
            by,
            again,
            replaces,
        )
    return found


def _recurred(
    meaning: Meaning,
    burst: Burst,
    own: Sequence[Burst],
    all_spans: Sequence[Burst],
    occurrences: _Occurrences,
) -> int:
    """Return the number of occurrences in the window if it reaches the limit, otherwise 0.

    The time while the node was off counts neither towards the window nor towards a silence.
    """
    if meaning.recurs is None:
        return 0
    spans = own if meaning.recurs.same_variant else all_spans
    # Measured from the burst's start, so that a longer burst does not lower the count.
    count = occurrences.count(spans, meaning.clears, burst[0] - meaning.recurs.within_s, burst)
    return count if count >= meaning.recurs.bursts else 0


class _Occurrences:
    """The occurrences in series of bursts, each determined once, because every burst asks for them."""

    def __init__(self, marks: EndMarks, now_s: float) -> None:
        self.until_s = inf  # when a silence that an event may still break counts without new evidence
        self._marks = marks
        self._now_s = now_s
        # by series, which must outlive this object, and by condition: their starts and their ends
        self._known: dict[tuple[int, Clears], tuple[list[float], list[float]]] = {}

    def count(self, spans: Sequence[Burst], clears: Clears, since_s: float, burst: Burst) -> int:
        """Return how many occurrences reach into the window that ends with a burst."""
        key = id(spans), clears
        if key not in self._known:
            found, until_s = _occurrences(spans, clears, self._marks, self._now_s)
            self.until_s = min(self.until_s, until_s)
            self._known[key] = sorted(first for first, _ in found), sorted(last for _, last in found)
        starts, ends = self._known[key]
        since_s = self._marks.off.window_start_s(since_s, burst[0])
        return bisect_right(starts, burst[1]) - bisect_left(ends, since_s)


def _occurrences(
    spans: Sequence[Burst], clears: Clears, marks: EndMarks, now_s: float
) -> tuple[Sequence[Burst], float]:
    """Return the bursts, merged where they are signs of one fault with no remedy between them.

    A fault that lasts until its remedy may show no signs for minutes, and a restarting agent may miss some.
    After `SILENT_S` without signs, the fault must have ended for a reason that the agent did not see. While
    an event that breaks this silence may still arrive, the silence does not count, because an event must
    never lower what is in force. The time when it counts is returned, too; infinity if there is none.
    """
    if clears is Clears.TIME:
        return spans, inf
    done = sorted(at_s for times in (*remedies(clears, marks), marks.over) for at_s in times)
    found: list[Burst] = []
    until_s = inf
    for burst in spans:
        before = found[-1] if found else None
        if before is None or _first_after(done, before[1]) <= burst[0]:
            found.append(burst)
            continue
        silent_s = SILENT_S
        if now_s < burst[0] + LATE_S:
            silent_s += LATE_S  # beyond this, an event that may still arrive is later than `SILENT_S`
        is_one = before[1] > marks.off.window_start_s(burst[0] - silent_s, burst[0])
        if (
            is_one
            and silent_s > SILENT_S
            and before[1] <= marks.off.window_start_s(burst[0] - SILENT_S, burst[0])
        ):
            until_s = min(until_s, burst[0] + LATE_S)
        if is_one:
            found[-1] = (before[0], burst[1])
        else:
            found.append(burst)
    return found, until_s


def _stood(
    own: Sequence[Burst],
    judged: Sequence[Judgement],
    marks: EndMarks,
    signs: Signs,
    superseding: bool,
    drivers_word_replaces: bool,
) -> Iterator[tuple[list[tuple[Level, Burst]], tuple[Judgement, ...]]]:
    """Yield, for each burst, the judgements in force after it, preceded by their levels and periods.

    The milder ones may be in force for longer than the most severe one.
    """
    standing: tuple[Judgement, ...] = ()
    until = [first for first, _ in own[1:]] + [inf]
    for burst, found, next_s in zip(own, judged, until, strict=True):
        fresh = replace(found, ends_s=_end_s(burst[1], found, marks, signs))
        graver = (
            each
            for each in standing
            if each.ends_s > burst[0]
            and each.gravity > fresh.gravity
            and not superseding
            and (each.again or not fresh.replaces or not drivers_word_replaces)
        )
        standing = (*(_renewed(each, burst, marks, signs) for each in graver), fresh)
        yield [(each.level, (burst[0], min(each.ends_s, next_s))) for each in standing], standing


def _renewed(judgement: Judgement, burst: Burst, marks: EndMarks, signs: Signs) -> Judgement:
    """Return a judgement after a milder repetition. Its remedy must now come after that repetition."""
    if judgement.clears is Clears.TIME:
        return judgement
    return replace(judgement, ends_s=_end_s(burst[1], judgement, marks, signs))


def _unbroken_since_s(segments: list[Burst]) -> float:
    """Return the start of the newest run of segments without a gap between them."""
    since_s, until_s = inf, -inf
    for first, last in sorted(segments):
        if first > until_s:
            since_s = first
        until_s = max(until_s, last)
    return since_s


def _end_s(last_s: float, found: Judgement, marks: EndMarks, signs: Signs) -> float:
    """Return the end of a judgement of a burst that ended at `last_s`; infinity if that is unknown.

    Each of `signs` before that end renews the judgement. Only time ends a judgement that needs no remedy.
    """
    if found.clears is Clears.TIME:
        return marks.off.held_until_s(last_s, found.hold_s)
    ends_s = _remedied_s(last_s, found, marks)
    while ends_s < inf and (newest_s := signs.newest_s(found.level, ends_s)) > last_s:
        last_s, ends_s = newest_s, _remedied_s(newest_s, found, marks)
    return ends_s


def _remedied_s(last_s: float, found: Judgement, marks: EndMarks) -> float:
    """Return the end of a judgement whose last sign ended at `last_s`; infinity without a remedy so far."""
    after = [_first_after(times, last_s + EPSILON_S) for times in remedies(found.clears, marks)]
    if found.clears is Clears.RESET or (found.by == "driver" and not found.again):
        after.append(_first_after(marks.over, last_s + AFTER_S))
    return marks.off.held_until_s(min(after), found.hold_s)


def remedies(clears: Clears, marks: EndMarks) -> tuple[Sequence[float], ...]:
    """Return the times of the marks that meet a condition; none if time alone meets it."""
    by_condition: Mapping[Clears, tuple[Sequence[float], ...]] = {
        Clears.TIME: (),
        Clears.RESET: (marks.resets, marks.boots, marks.replaced),
        Clears.BOOT: (marks.boots, marks.replaced),
        Clears.REPLACED: (marks.replaced,),
    }
    return by_condition[clears]


def _first_after(times: Sequence[float], at_s: float) -> float:
    at = bisect_right(times, at_s)
    return times[at] if at < len(times) else inf


def _clears(found: Judgement) -> str:
    hold = f"{duration(found.hold_s)} without another"
    if found.clears is Clears.TIME:
        return hold
    return " and ".join([CLEARS_IN_WORDS[found.clears], *([hold] if found.hold_s else [])])
