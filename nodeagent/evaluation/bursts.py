"""Events that belong together: what comes within three minutes is one burst, whoever reports it. Pure.

A fault makes hundreds of lines, two sensors see each, and a restart shows some again. Bursts are unions of
intervals, so neither order nor repetition makes a difference, and what they hold is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nodeagent.observation import Observation

GAP_S = 180.0  # Meta and Azure report storms of hundreds of lines over minutes; gpud collapses alike
MAX_BURSTS = 64
MAX_TEXTS = 3
MAX_SOURCES = 4

Burst = tuple[float, float]  # first and last event


@dataclass(slots=True)
class Bursts:
    """All bursts of one event of one entity, oldest first, and the words of the newest."""

    spans: list[Burst] = field(default_factory=list)
    texts: list[tuple[float, str]] = field(default_factory=list)  # newest last
    sources: list[str] = field(default_factory=list)

    def take(self, seen: Observation) -> bool:
        """Add an event; False if nothing has changed by it."""
        before = (self.spans, self.texts, self.sources)
        self.spans = joined(self.spans, (seen.at_s, seen.at_s))
        if seen.text:
            texts = {text: at_s for at_s, text in self.texts}
            texts[seen.text] = max(seen.at_s, texts.get(seen.text, seen.at_s))
            self.texts = sorted((at_s, text) for text, at_s in texts.items())[-MAX_TEXTS:]
        self.sources = sorted({*self.sources, seen.source})[:MAX_SOURCES]
        return before != (self.spans, self.texts, self.sources)

    def dump(self) -> list[Any]:
        """Return what `load` takes: JSON."""
        return [[list(span) for span in self.spans], [list(each) for each in self.texts], self.sources]

    @classmethod
    def load(cls, raw: Any) -> Bursts:
        """Return what was dumped. Raises ValueError, TypeError for anything else."""
        spans, texts, sources = raw
        return cls(
            [(float(first), float(last)) for first, last in spans[:MAX_BURSTS]],
            [(float(at_s), str(text)) for at_s, text in texts[:MAX_TEXTS]],
            [str(source) for source in sources[:MAX_SOURCES]],
        )


def joined(spans: list[Burst], new: Burst) -> list[Burst]:
    """Return `spans` with `new`, those within `GAP_S` of each other made one; the newest are kept."""
    merged: list[Burst] = []
    for first, last in sorted([*spans, new]):
        if merged and first - merged[-1][1] <= GAP_S:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged[-MAX_BURSTS:]


def union(all_spans: list[list[Burst]]) -> list[Burst]:
    """Return the bursts of several series seen as one."""
    merged: list[Burst] = []
    for spans in all_spans:
        for span in spans:
            merged = joined(merged, span)
    return merged
