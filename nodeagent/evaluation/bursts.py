"""Stores the times of one event of one entity as bursts: storms of lines that several sensors report. Pure.

Events within three minutes of each other form one burst, no matter which sensor reports them. A fault may
write hundreds of lines, two sensors may report each line, and some lines are read again after a restart.
Bursts are unions of intervals, so order and repetition make no difference, and memory use is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodeagent.model import Observation
from nodeagent.policy.meanings import MOST_BURSTS

GAP_S = 180.0  # Meta and Azure report storms of hundreds of lines over minutes; gpud also merges them
MAX_BURSTS = MOST_BURSTS
MAX_TEXTS = 3
MAX_SOURCES = 4
Burst = tuple[float, float]  # first and last event


@dataclass(slots=True)
class EventBursts:
    """All bursts of one event of one entity, oldest first, and the newest texts."""

    spans: list[Burst] = field(default_factory=list)
    texts: list[tuple[float, str]] = field(default_factory=list)  # newest last
    heard: dict[str, float] = field(default_factory=dict)  # by sensor: when it last reported the event
    inherited: list[Burst] = field(default_factory=list)  # the bursts of dropped variants with this meaning
    recurring: list[Burst] = field(
        default_factory=list
    )  # the bursts of dropped variants at which the variant had recurred

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
        before = (self.spans, self.texts, self.heard)
        texts = [(seen.at_s, seen.text)] if seen.text else []
        self.join(EventBursts([(seen.at_s, seen.at_s)], texts, {seen.source: seen.at_s}))
        return before != (self.spans, self.texts, self.heard)

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
        return EventBursts(
            _clipped(self.spans, from_s, until_s),
            [each for each in self.texts if from_s <= each[0] < until_s],
            # A sensor that reported the event later may have reported it during this period, too.
            {source: min(at_s, until_s) for source, at_s in self.heard.items() if at_s >= from_s},
            _clipped(self.inherited, from_s, until_s),
            _clipped(self.recurring, from_s, until_s),
        )

    def dump(self) -> list[Any]:
        """Return the bursts as JSON, for `load`, without the times in `heard` and the inherited bursts."""
        return [[list(span) for span in self.spans], [list(each) for each in self.texts], sorted(self.heard)]

    @classmethod
    def load(cls, raw: Any, heard: Any = (), inherited: Any = (), recurring: Any = ()) -> EventBursts:
        """Restore the dumped bursts. Raises ValueError or TypeError if they are malformed.

        Args:
            heard: Pairs of a sensor and a time. Older agents did not store the time. A sensor without a time
                is assumed to have seen the newest burst.
            inherited: The bursts of dropped variants.
            recurring: The bursts of dropped variants at which the variant had recurred.
        """
        spans, texts, sources = raw
        made = cls(
            _loaded(spans),
            [(float(at_s), str(text)) for at_s, text in texts[:MAX_TEXTS]],
            inherited=_loaded(inherited),
            recurring=_loaded(recurring),
        )
        if not made.spans:
            raise ValueError("an event without bursts")
        times = {str(source): float(at_s) for source, at_s in heard}
        made.heard = {str(each): times.get(str(each), made.last_s) for each in sources[:MAX_SOURCES]}
        return made


def join_burst(spans: Sequence[Burst], new: Burst) -> list[Burst]:
    """Return `spans` with `new`, merging spans within `GAP_S` of each other.

    Beyond `MAX_BURSTS`, the oldest spans are merged into one, so the time of the first event is kept.
    """
    return union_bursts([spans, [new]])


def union_bursts(all_spans: Iterable[Sequence[Burst]]) -> list[Burst]:
    """Return the bursts of more than one series, merged as if they were a single series."""
    merged: list[Burst] = []
    for first, last in sorted(span for spans in all_spans for span in spans):
        if merged and first - merged[-1][1] <= GAP_S:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    surplus = len(merged) - MAX_BURSTS
    if surplus <= 0:
        return merged
    return [(merged[0][0], merged[surplus][1]), *merged[surplus + 1 :]]


def _loaded(spans: Any) -> list[Burst]:
    return [(float(first), float(last)) for first, last in tuple(spans)[:MAX_BURSTS]]


def _clipped(spans: Iterable[Burst], from_s: float, until_s: float) -> list[Burst]:
    return [
        (max(first, from_s), min(last, until_s))
        for first, last in spans
        if last >= from_s and first < until_s
    ]


def near(spans: Iterable[Burst], burst: Burst, within_s: float = GAP_S) -> bool:
    """Return True if one of `spans` is no more than `within_s` from `burst`."""
    return any(first - within_s <= burst[1] and burst[0] <= last + within_s for first, last in spans)


def window_start_s(since_s: float, until_s: float, off: Sequence[Burst]) -> float:
    """Return when a window starts that would start at `since_s` if the node had run until `until_s`.

    The time while the node was off does not count: only a wall clock, which may have been wrong, shows how
    long that was.

    Args:
        off: When the node was off, oldest first.
    """
    for last_s, boot_s in reversed(off):
        if last_s < until_s and boot_s > since_s:
            since_s -= min(boot_s, until_s) - last_s
    return since_s


def informative(variants: Mapping[str, EventBursts]) -> Mapping[str, EventBursts]:
    """Omit bursts without a variant if another sensor has reported them with a variant."""
    plain = variants.get("")
    if plain is None or len(variants) == 1:
        return variants
    others = union_bursts(each.all_spans for name, each in variants.items() if name)
    if not all(near(others, span) for span in plain.all_spans):
        return variants
    return {name: each for name, each in variants.items() if name}
