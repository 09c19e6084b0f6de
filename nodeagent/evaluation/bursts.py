"""Stores the times of one event of one entity as bursts: storms of lines that several sensors report. Pure.

Events within three minutes of each other form one burst, no matter which sensor reports them. A fault may
write hundreds of lines, two sensors may report each line, and some lines are read again after a restart.
Bursts are unions of intervals, so order and repetition make no difference, and memory use is bounded.

A burst does not show when the events between its first and its last one occurred. Where that matters (which
event a verdict is about, which report duplicates another, which mark came first), the moments show it: they
are the same events, but merged only within a second of each other. Their number has the same limit as that of
bursts. Beyond it, the moments closest to each other are merged, so a storm merges its own lines, and not what
happened before it, such as a boot days ago. Of merged moments, only the first and the last event are known.
What else was reported with an event is therefore noted when it arrives (`company`), and merged separately.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from nodeagent.model import Observation
from nodeagent.policy.meanings import MOST_BURSTS

MOMENT_S = 1.0  # a driver writes the lines of one fault within milliseconds of each other
SENSORS_APART_S = 10.0  # two sensors report the same event at most this far apart
GAP_S = 180.0  # Meta and Azure report storms of hundreds of lines over minutes; gpud also merges them
MAX_BURSTS = MOST_BURSTS
MAX_MARKS = 1024  # kept with signs between them; a node in a boot loop boots a few hundred times a day, and
# some sites reset each GPU before each job
MAX_TEXTS = 3
MAX_SOURCES = 4
DETAILED = 0  # in a company instead of a code: the same code, reported with its details
Burst = tuple[float, float]  # first and last event
Company = dict[tuple[int, ...], list[Burst]]  # the times of events, by what was reported with them: `company`


@dataclass(slots=True)
class EventBursts:
    """All bursts of one event of one entity, oldest first, and the newest texts."""

    spans: list[Burst] = field(default_factory=list)
    texts: list[tuple[float, str]] = field(default_factory=list)  # newest last
    heard: dict[str, float] = field(default_factory=dict)  # by sensor: when it last reported the event
    inherited: list[Burst] = field(default_factory=list)  # the bursts of dropped variants with this meaning
    # the bursts of dropped variants at which the variant had recurred
    recurring: list[Burst] = field(default_factory=list)
    moments: list[Burst] = field(default_factory=list)  # the same events as in all bursts, but finer
    exact: bool = False  # no limit on the moments here, because `thinned_marks` limits them
    company: Company | None = None  # the same events again, if it matters what was reported with them

    def __post_init__(self) -> None:
        self.moments = self.moments or self.all_spans

    @property
    def all_spans(self) -> list[Burst]:
        if not (self.inherited or self.recurring):
            return self.spans
        return union_bursts([self.spans, self.inherited, self.recurring])

    @property
    def first_s(self) -> float:
        return min(first for first, _ in (*self.spans[:1], *self.inherited[:1], *self.recurring[:1]))

    @property
    def last_s(self) -> float:
        return max(last for _, last in (*self.spans[-1:], *self.inherited[-1:], *self.recurring[-1:]))

    def add(self, seen: Observation) -> bool:
        """Add an event. Return False if it changes nothing."""
        before = (self.spans, self.texts, self.heard, self.moments)
        texts = [(seen.at_s, seen.text)] if seen.text else []
        self.join(EventBursts([(seen.at_s, seen.at_s)], texts, {seen.source: seen.at_s}))
        return before != (self.spans, self.texts, self.heard, self.moments)

    def join(self, other: EventBursts) -> None:
        """Add everything that `other` has recorded."""
        self.spans = union_bursts([self.spans, other.spans])
        self._join_the_rest(other)

    def inherit(self, other: EventBursts, recurring: Sequence[Burst] = ()) -> None:
        """Add everything that another variant of the same meaning has recorded; keep its bursts separate.

        Args:
            recurring: The bursts of `other` at which it had recurred. They are stored separately, because the
                bursts of several variants do not amount to a recurrence.
        """
        self.inherited = union_bursts(
            [self.inherited, [each for each in other.spans if each not in recurring]]
        )
        self.recurring = union_bursts([self.recurring, recurring])
        self._join_the_rest(other)

    def _join_the_rest(self, other: EventBursts) -> None:
        if other.company is not None:
            self.company = joined_company(self.company or {}, other.company)
        both = [self.moments, other.moments]
        moments = merged_bursts(both, MOMENT_S) if self.exact else union_moments(both)
        self.moments = self.spans if moments == self.spans else moments  # one list takes less memory
        if other.inherited:
            self.inherited = union_bursts([self.inherited, other.inherited])
        if other.recurring:
            self.recurring = union_bursts([self.recurring, other.recurring])
        texts = {text: at_s for at_s, text in self.texts}
        for at_s, text in other.texts:
            texts[text] = max(at_s, texts.get(text, at_s))
        self.texts = sorted((at_s, text) for text, at_s in texts.items())[-MAX_TEXTS:]
        heard = dict(self.heard)
        for source, at_s in other.heard.items():
            heard[source] = max(at_s, heard.get(source, at_s))
        self.heard = dict(sorted(heard.items())[:MAX_SOURCES])

    def within(self, from_s: float, until_s: float) -> EventBursts:
        """Return the part that was seen at or after `from_s` and before `until_s`; it may have no bursts."""
        moments = _clipped(self.moments, from_s, until_s)
        return EventBursts(
            [each for span in self.spans for each in _events_within(span, moments, from_s, until_s)],
            [each for each in self.texts if from_s <= each[0] < until_s],
            # A sensor that reported the event later may have reported it during this period, too.
            {source: min(at_s, until_s) for source, at_s in self.heard.items() if at_s >= from_s},
            _clipped(self.inherited, from_s, until_s),
            _clipped(self.recurring, from_s, until_s),
            moments,
            company=None if self.company is None else clipped_company(self.company, from_s, until_s),
        )

    def only(self, moments: Sequence[Burst]) -> EventBursts:
        """Return the part of the events that these moments show, which must not be empty."""
        return EventBursts(
            union_bursts([moments]),
            self.texts,
            self.heard,
            recurring=[each for each in self.recurring if near(moments, each, 0.0)],
            moments=union_moments([moments]),
        )

    def only_company(self, company: Company) -> EventBursts:
        """Return the part of the events in these groups, which must not be empty."""
        made = self.only(merged_bursts(company.values(), 0.0))
        made.company = company
        return made

    def spans_apart(self, cuts: Sequence[float]) -> list[Burst]:
        """Return the bursts, split at each of `cuts` (ascending) if possible.

        The moments of a long storm cannot be told apart.
        """
        if not any(_is_cut(span, cuts) for span in self.spans):
            return self.spans
        found: list[Burst] = []
        for span in self.spans:
            own = _inside(span, self.moments) if _is_cut(span, cuts) else ()
            found += merged_bursts([own], GAP_S, cuts) if own else [span]
        return found

    def dump(self) -> list[Any]:
        """Return the bursts as JSON, for `load`, without `heard`, the inherited bursts and the moments."""
        return [[list(span) for span in self.spans], [list(each) for each in self.texts], sorted(self.heard)]

    @classmethod
    def load(
        cls, raw: Any, heard: Any = (), inherited: Any = (), recurring: Any = (), moments: Any = ()
    ) -> EventBursts:
        """Restore the dumped bursts. Raises ValueError or TypeError if they are malformed.

        Args:
            heard: Pairs of a sensor and a time. Older agents did not store the time. A sensor without a time
                is assumed to have seen the newest burst.
            inherited: The bursts of dropped variants.
            recurring: The bursts of dropped variants at which the variant had recurred.
            moments: Older agents did not store them, or only bursts were stored because both are the same.
        """
        spans, texts, sources = raw
        made = cls(
            loaded_spans(spans),
            [(float(at_s), str(text)) for at_s, text in texts[:MAX_TEXTS]],
            inherited=loaded_spans(inherited),
            recurring=loaded_spans(recurring),
            moments=loaded_spans(moments),
        )
        if not made.spans:
            raise ValueError("an event without bursts")
        times = {str(source): float(at_s) for source, at_s in heard}
        made.heard = {str(each): times.get(str(each), made.last_s) for each in sources[:MAX_SOURCES]}
        return made


def union_bursts(all_spans: Iterable[Sequence[Burst]], gap_s: float = GAP_S) -> list[Burst]:
    """Return the bursts of more than one series, merged as if they were a single series.

    Beyond `MAX_BURSTS`, the oldest are merged into one, so the time of the first event is kept.
    """
    merged = merged_bursts(all_spans, gap_s)
    surplus = len(merged) - MAX_BURSTS
    if surplus <= 0:
        return merged
    return [(merged[0][0], merged[surplus][1]), *merged[surplus + 1 :]]


def union_moments(all_spans: Iterable[Sequence[Burst]], gap_s: float = MOMENT_S) -> list[Burst]:
    """Return the moments of more than one series, merged as if they were a single series.

    Beyond `MAX_BURSTS`, only the longest intervals between them remain; among equals, the oldest.
    """
    merged = merged_bursts(all_spans, gap_s)
    if len(merged) <= MAX_BURSTS:
        return merged
    starts = sorted(range(1, len(merged)), key=lambda at: (merged[at - 1][1] - merged[at][0], at))
    starts = [0, *sorted(starts[: MAX_BURSTS - 1])]
    return [
        (merged[at][0], merged[after - 1][1])
        for at, after in zip(starts, [*starts[1:], len(merged)], strict=True)
    ]


def joined_company(one: Company, other: Company) -> Company:
    """Return the company of the events of both."""
    found = dict(one)
    for codes, times in other.items():
        found[codes] = union_moments([found[codes], times], 0.0) if codes in found else times
    return found


def clipped_company(company: Company, from_s: float, until_s: float) -> Company:
    """Return the part that was seen at or after `from_s` and before `until_s`."""
    parts = ((codes, _clipped(times, from_s, until_s)) for codes, times in company.items())
    return {codes: times for codes, times in parts if times}


def thinned_marks(
    marks: Sequence[Burst], signs_s: Sequence[float], pairs: Callable[[Sequence[Burst]], Iterable[Burst]]
) -> list[Burst]:
    """Return the boots, in order; beyond `MAX_BURSTS`, merge adjacent ones without a sign between them.

    The same applies to the resets of a GPU, and to other marks that end findings. A mark without a sign
    between it and the next one separates no faults, and ends none that the next one does not end. The merged
    mark has the time of the later one, so nothing ends earlier than it would have, and includes all the time
    that the node was off. The oldest marks are merged first. Beyond `MAX_MARKS`, marks are merged even if
    there is a sign between them: first those that are not needed to separate `pairs`, and only if there are
    not enough of them, the oldest ones.

    Args:
        marks: In order. A boot lasts from the last time that the agent ran before it until the boot.
        signs_s: The times of everything that a mark may separate or end, in order.
        pairs: Called with marks; returns the intervals in which one of them must remain if there is one:
            after the first time, and not after the second.
    """
    surplus, found = len(marks) - MAX_BURSTS, list(marks[:1])
    for mark in marks[1:]:
        if surplus > 0 and bisect_left(signs_s, found[-1][1]) == bisect_right(signs_s, mark[1]):
            found[-1] = _joined_mark(found[-1], mark)
            surplus -= 1
        else:
            found.append(mark)
    if len(found) > MAX_MARKS:
        found = _separating(found, pairs(found))
    rest = len(found) - MAX_MARKS
    return [reduce(_joined_mark, found[: rest + 1]), *found[rest + 1 :]] if rest > 0 else found


def _separating(marks: Sequence[Burst], pairs: Iterable[Burst]) -> list[Burst]:
    """Return the marks, with the oldest ones merged that are not needed to separate all pairs.

    The node counts as off from the first of merged boots to the last one. So whatever there was between
    them, there is not less time off before it or after it than there was.
    """
    times = [at_s for _, at_s in marks]
    needed, newest_s = set[float](), -inf
    for first_s, second_s in sorted(pairs, key=lambda pair: pair[1]):
        at = bisect_right(times, second_s)
        if newest_s <= first_s and at and times[at - 1] > first_s:
            newest_s = times[at - 1]
            needed.add(newest_s)
    surplus, found = len(marks) - MAX_MARKS, list(marks[:1])
    for mark in marks[1:]:
        if surplus > 0 and found[-1][1] not in needed:
            found[-1] = found[-1][0], mark[1]
            surplus -= 1
        else:
            found.append(mark)
    return found


def gaps(spans: Sequence[Burst]) -> Iterator[Burst]:
    """Yield the intervals between disjoint spans, in order."""
    for before, after in pairwise(spans):
        yield before[1], after[0]


def _joined_mark(before: Burst, mark: Burst) -> Burst:
    return mark[0] - (before[1] - before[0]), mark[1]


def merged_bursts(
    all_spans: Iterable[Sequence[Burst]], gap_s: float, cuts: Sequence[float] = ()
) -> list[Burst]:
    """Return all spans, merged within `gap_s` of each other but not across `cuts` (ascending), in order."""
    merged: list[Burst] = []
    for first, last in sorted(span for spans in all_spans for span in spans):
        if merged and first - merged[-1][1] <= gap_s and not (cuts and _is_cut((merged[-1][1], first), cuts)):
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _is_cut(span: Burst, cuts: Sequence[float]) -> bool:
    """Return True if one of `cuts` comes after the start of a span, and not after its end."""
    return bisect_right(cuts, span[0]) < bisect_right(cuts, span[1])


def _inside(span: Burst, moments: Iterable[Burst]) -> list[Burst]:
    """Return the parts of `moments` in a span."""
    return [
        (max(first, span[0]), min(last, span[1]))
        for first, last in moments
        if first <= span[1] and last >= span[0]
    ]


def _events_within(span: Burst, moments: Iterable[Burst], from_s: float, until_s: float) -> list[Burst]:
    """Return the bursts of the events of a span in a period, given the moments in this period."""
    if from_s <= span[0] and span[1] < until_s:
        return [span]
    return merged_bursts([_inside(span, moments)], GAP_S)


def loaded_spans(spans: Any, limit: int = MAX_BURSTS) -> list[Burst]:
    """Return dumped spans. Raises ValueError or TypeError if they are malformed."""
    return [(float(first), float(last)) for first, last in tuple(spans)[:limit]]


def _clipped(spans: Iterable[Burst], from_s: float, until_s: float) -> list[Burst]:
    return [
        (max(first, from_s), min(last, until_s))
        for first, last in spans
        if last >= from_s and first < until_s
    ]


def near(spans: Iterable[Burst], burst: Burst, within_s: float = GAP_S) -> bool:
    """Return True if one of `spans` is no more than `within_s` from `burst`."""
    return any(first - within_s <= burst[1] and burst[0] <= last + within_s for first, last in spans)


class TimeOff:
    """The periods when the node was off. They count neither towards a window nor towards a hold time.

    Only a wall clock, which may have been wrong, shows how long the node was off, and nothing was observed
    during that time. Each answer takes a binary search: a node in a boot loop has a thousand periods, and the
    evaluation of one event asks about each of its bursts.
    """

    def __init__(self, periods: Iterable[Burst] = ()) -> None:
        """Take the periods, from the last time that the agent ran before each boot until that boot."""
        spans = merged_bursts([tuple(periods)], 0.0)
        self._ends = [boot_s for _, boot_s in spans]
        self._starts = [last_s for last_s, _ in spans]
        # for each period, how long the node was off before it; then the total
        self._off_before = [0.0, *accumulate(boot_s - last_s for last_s, boot_s in spans)]
        # for each period, how long the node had run before it, from an arbitrary start
        self._ran = [last_s - off for last_s, off in zip(self._starts, self._off_before, strict=False)]

    def window_start_s(self, since_s: float, until_s: float) -> float:
        """Return the start of a window until `until_s` that would start at `since_s` if there were none."""
        count = bisect_left(self._starts, until_s)
        rest_s = max(0.0, self._ends[count - 1] - until_s) if count else 0.0  # of the last one, after the end
        off_s = self._off_before[count] - rest_s
        first = bisect_right(self._ran, since_s - off_s, 0, count)
        return since_s - (off_s - self._off_before[first]) if first < count else since_s

    def held_until_s(self, from_s: float, hold_s: float) -> float:
        """Return the end of a hold time that starts at `from_s`."""
        first = bisect_right(self._ends, from_s)
        if first < len(self._starts) and self._starts[first] < from_s:
            from_s, first = self._ends[first], first + 1
        off_s = self._off_before[first]
        count = bisect_left(self._ran, from_s + hold_s - off_s, first)
        return from_s + hold_s + (self._off_before[count] - off_s)


NEVER_OFF = TimeOff()


def informative(variants: Mapping[str, EventBursts]) -> Mapping[str, EventBursts]:
    """Omit events without a variant that were also reported with a variant, by any sensor.

    These are the ones within `SENSORS_APART_S` of an event with a variant: NVML's events never have one, and
    of the lines that the driver writes about one SXid, only the first has. All others count.
    """
    plain = variants.get("")
    if plain is None or len(variants) == 1:
        return variants
    details = {name: each for name, each in variants.items() if name}
    if plain.company is None:
        rest = undetailed(plain, details.values())
    else:
        alone = union_moments((each for codes, each in plain.company.items() if DETAILED not in codes), 0.0)
        rest = _parts(plain, alone)
    return {"": plain.only(rest), **details} if rest else details


def undetailed(plain: EventBursts, details: Iterable[EventBursts], *, are_known: bool = False) -> list[Burst]:
    """Return the moments of events that were not reported with a variant, too, given the moments alone.

    Args:
        are_known: True if events with a variant are assumed throughout each of their moments; otherwise they
            are known at the ends of one that is longer than `MOMENT_S`.
    """
    reported = merged_bursts(
        (
            [
                (first - SENSORS_APART_S, last + SENSORS_APART_S)
                for span in each.moments
                for first, last in ([span] if are_known else known_parts(span))
            ]
            for each in details
        ),
        0.0,
    )
    return [each for part in _parts(plain, plain.moments) for each in _without(part, reported)]


def known_parts(moment: Burst) -> list[Burst]:
    """Return the parts of a moment in which an event is known: all of it, or its ends if it was merged."""
    first, last = moment
    return [moment] if last - first <= MOMENT_S else [(first, first), (last, last)]


def _parts(bursts: EventBursts, moments: Sequence[Burst]) -> list[Burst]:
    """Return moments, none longer than one burst. An event is known at each end of each of them."""
    return [each for span in bursts.all_spans for each in _inside(span, moments)]


def _without(part: Burst, taken: Sequence[Burst]) -> Iterator[Burst]:
    """Yield what is left of a moment without the spans in `taken`, if an event must be in it.

    This is so if an event is known at its end, or if it is longer than the time between two events of a
    burst.
    """
    first, end = part
    is_known = True  # an event is known at `first`
    at = bisect_right(taken, (first, inf))
    for from_s, until_s in taken[max(0, at - 1) :]:
        if from_s > end:
            break
        if until_s < first:
            continue
        if from_s > first and (is_known or from_s - first > GAP_S):
            yield first, from_s
        first, is_known = until_s, False
    if is_known or first < end:
        yield first, end
