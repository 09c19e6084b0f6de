"""One series of samples, and the level that it has come to. Pure but for its own state.

A level rises with the sample that reaches a bound, and falls after `clear_s` of clean samples and by nothing
else: not by time alone, because a sensor that sees nothing proves nothing. So it never alternates faster.

Samples may come late by `LATE_S` and more than once. What is older is folded into two flags and let go.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any

from nodeagent.policy.rules import Bound, Kind, Rule
from nodeagent.verdict import Level

LATE_S = 300.0
MAX_SAMPLES = 4096  # three hours of samples every 5 s, and some
LEVELS = (Level.DEGRADED, Level.UNHEALTHY)

Sample = tuple[float, float]  # agent time, value


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether one level stands, since when, and the last sample that was not clean."""

    stands: bool = False
    since_s: float = 0.0
    unclean_s: float = float("-inf")


@dataclass(slots=True)
class Series:
    """The samples of one check of one entity."""

    samples: list[Sample]
    base_s: float = float("-inf")  # up to here they are folded into `base`
    base: tuple[Standing, Standing] = (Standing(), Standing())
    _latest: tuple[Standing, Standing] | None = None  # after all samples; None: to be folded anew

    def take(self, rule: Rule, sample: Sample) -> bool:
        """Add a sample; False if it is known already, or too late to matter."""
        if sample[0] <= self.base_s:
            return False
        at = bisect_left(self.samples, sample)
        if at < len(self.samples) and self.samples[at] == sample:
            return False
        self.samples.insert(at, sample)
        in_order = at == len(self.samples) - 1
        self._latest = _stepped(self._latest, rule, self.samples, at) if self._latest and in_order else None
        return True

    def standing(self, rule: Rule) -> tuple[Standing, Standing]:
        """Return what stands, degraded and unhealthy, after all samples."""
        if self._latest is None:
            self._latest = self._fold(rule, self.base_s, float("inf"))
        return self._latest

    def settle(self, rule: Rule) -> None:
        """Fold what is too old to be joined by a late sample, and let go of what no window reaches."""
        if not self.samples:
            return
        cut = self.samples[-1][0] - LATE_S
        if len(self.samples) > MAX_SAMPLES:
            cut = max(cut, self.samples[-MAX_SAMPLES][0])
        if cut <= self.base_s:
            return
        self.base = self._fold(rule, self.base_s, cut)
        self.base_s = cut
        # One sample before the window stays: a counter's first step needs it.
        keep = bisect_left(self.samples, (cut - _reach_s(rule), float("-inf"))) - 1
        if len(self.samples) > MAX_SAMPLES:
            keep = max(keep, len(self.samples) - MAX_SAMPLES)
        if keep > 0:
            del self.samples[:keep]
        if rule.kind is not Kind.LEVEL:
            self._thin(bisect_right(self.samples, (cut, float("inf"))))

    def _thin(self, settled: int) -> None:
        """Of three equal readings in a row the middle one says nothing, once none can come between."""
        kept: list[Sample] = []
        for sample in self.samples[:settled]:
            if len(kept) > 1 and kept[-2][1] == kept[-1][1] == sample[1]:
                kept[-1] = sample
            else:
                kept.append(sample)
        self.samples[:settled] = kept

    def _fold(self, rule: Rule, after_s: float, until_s: float) -> tuple[Standing, Standing]:
        both = self.base
        first = bisect_right(self.samples, (after_s, float("inf")))
        for at in range(first, len(self.samples)):
            if self.samples[at][0] > until_s:
                break
            both = _stepped(both, rule, self.samples, at)
        return both

    def dump(self) -> list[Any]:
        """Return what `load` takes: JSON."""
        flags = [
            [s.stands, s.since_s, s.unclean_s if s.unclean_s > float("-inf") else None] for s in self.base
        ]
        base_s = self.base_s if self.base_s > float("-inf") else None
        return [base_s, flags, [list(sample) for sample in self.samples]]

    @classmethod
    def load(cls, raw: Any) -> Series:
        """Return the series that was dumped. Raises ValueError, TypeError for anything else."""
        base_s, flags, samples = raw
        nothing = float("-inf")
        low, high = (
            Standing(bool(stands), float(since), nothing if unclean is None else float(unclean))
            for stands, since, unclean in flags
        )
        found = sorted((float(at), float(value)) for at, value in samples[:MAX_SAMPLES])
        return cls(found, nothing if base_s is None else float(base_s), (low, high))


def _stepped(
    both: tuple[Standing, Standing], rule: Rule, samples: list[Sample], at: int
) -> tuple[Standing, Standing]:
    low, high = both
    return _step(low, rule, Level.DEGRADED, samples, at), _step(high, rule, Level.UNHEALTHY, samples, at)


def _step(standing: Standing, rule: Rule, level: Level, samples: list[Sample], at: int) -> Standing:
    now_s = samples[at][0]
    if reached(rule, level, samples, at):
        since = standing.since_s if standing.stands else now_s
        return Standing(True, since, now_s)
    if not _clean(rule, level, samples, at):
        return Standing(standing.stands, standing.since_s, now_s)
    if standing.stands and now_s - standing.unclean_s >= rule.clear_s:
        return replace(standing, stands=False)
    return standing


def reached(rule: Rule, level: Level, samples: list[Sample], at: int) -> bool:
    """Say whether the sample at `at`, with those before it, reaches `level`."""
    if rule.kind is Kind.STATE:
        state = rule.states.get(int(samples[at][1]))
        return state is not None and state.level >= level and _held_s(samples, at) >= state.for_s
    bound = rule.degraded if level is Level.DEGRADED else rule.unhealthy
    if level is Level.DEGRADED and rule.unhealthy and _meets(rule, rule.unhealthy, samples, at):
        return True
    return bound is not None and _meets(rule, bound, samples, at)


def _meets(rule: Rule, bound: Bound, samples: list[Sample], at: int) -> bool:
    if not _over(rule, bound.at, samples, at):
        return False
    if bound.need > 1:
        window = range(max(0, at - bound.of + 1), at + 1)
        if sum(_over(rule, bound.at, samples, n) for n in window) < bound.need:
            return False
    if bound.for_s > 0:
        first = at
        while first > 0 and _over(rule, bound.at, samples, first - 1):
            first -= 1
        return samples[at][0] - samples[first][0] >= bound.for_s
    return True


def _over(rule: Rule, limit: float, samples: list[Sample], at: int) -> bool:
    value = samples[at][1]
    if rule.kind is Kind.RATE:
        return grown(samples, at, rule.window_s) > limit
    return value <= limit if rule.below else value >= limit


def _clean(rule: Rule, level: Level, samples: list[Sample], at: int) -> bool:
    """Say whether a sample counts towards the end of `level`."""
    if rule.kind is Kind.STATE:
        state = rule.states.get(int(samples[at][1]))
        return state is not None and state.level < level
    bound = rule.unhealthy if level is Level.UNHEALTHY else (rule.degraded or rule.unhealthy)
    if bound is None:
        return True
    if level is Level.UNHEALTHY or rule.clear_at is None:
        return not _over(rule, bound.at, samples, at)
    if rule.kind is Kind.RATE:
        return not _over(rule, rule.clear_at, samples, at)
    return samples[at][1] > rule.clear_at if rule.below else samples[at][1] <= rule.clear_at


def grown(samples: list[Sample], at: int, window_s: float) -> float:
    """Return by how much a counter has grown in the `window_s` before the sample at `at`.

    A reading lower than the one before is a counter that began anew: a new baseline, and not a count.
    """
    total, since = 0.0, samples[at][0] - window_s
    for n in range(at, 0, -1):
        if samples[n][0] <= since:
            break
        total += max(0.0, samples[n][1] - samples[n - 1][1])
    return total


def _held_s(samples: list[Sample], at: int) -> float:
    first = at
    while first > 0 and samples[first - 1][1] == samples[at][1]:
        first -= 1
    return samples[at][0] - samples[first][0]


def _reach_s(rule: Rule) -> float:
    """Return how far back a sample's meaning can depend on others."""
    bounds = [each for each in (rule.degraded, rule.unhealthy) if each]
    waits = [each.for_s for each in bounds] + [state.for_s for state in rule.states.values()]
    counts = [each.of * max(rule.period_s, 1.0) * 2 for each in bounds if each.of > 1]
    window = [rule.window_s] if rule.kind is Kind.RATE else []
    return max([60.0, *waits, *counts, *window])
