"""Evaluates one series of samples: its level, its finding, and the reason if it is undecided. Pure.

A level rises with the sample that reaches a bound, and falls only after `clear_s` of clean samples. Time
alone never lowers it, because missing samples are no evidence of health. A level therefore never alternates
faster than `clear_s`. For the same reason, the time between two samples counts only up to `MOST_PERIODS`
periods, both towards a bound and towards the end of a finding.

Two things end a series without clean samples: an operator clears the entity, or its sensor reports that the
entity is gone. The next bad sample starts a new finding.

Samples may arrive up to `LATE_S` late, and more than once. Older samples are folded into two flags and
dropped. If a boot restarts a counter, the readings from before the boot are also folded and dropped.

A short run cannot decide every check: a check is undecided if its samples were bad and a longer run might
report a fault.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from nodeagent.model import Action, HealthFinding, Level, amount
from nodeagent.policy.rules import CLEARED_BY, Bound, Rule, RuleKind

LATE_S = 300.0
KEPT_S = 60.0  # samples that no late sample can precede are kept this long, in case a rule changes
MAX_SAMPLES = 4096  # 5.7 hours of one sample every 5 s
LEVELS = (Level.DEGRADED, Level.UNHEALTHY)
MOST_PERIODS = 3  # a sweep may be late or miss a sample; during a longer gap, nothing was observed
TimedValue = tuple[float, float]  # agent time, value
DRIVERS_OWN = "recovery_action"  # the check that reports the driver's own verdict


@dataclass(frozen=True, slots=True)
class LevelState:
    """Whether and since when one level is reached, and the time of the last sample that was not clean."""

    active: bool = False
    since_s: float = 0.0
    unclean_s: float = -inf
    unseen_s: float = 0.0  # how much of the time since `unclean_s` no sample covers
    shown: float | None = None  # for a state: the newest value of exactly this level


NEVER = LevelState()


@dataclass(slots=True)
class SampleSeries:
    """The samples of one check of one entity."""

    samples: list[TimedValue]
    base_s: float = -inf  # samples up to here are folded into `base`
    base: tuple[LevelState, LevelState] = (NEVER, NEVER)
    ended_s: float = -inf  # when an operator last cleared the entity
    _latest: tuple[LevelState, LevelState] | None = None  # after all samples; None: stale

    def add(self, rule: Rule, sample: TimedValue) -> bool:
        """Add a sample; return False if it is already known, or too late to matter."""
        if sample[0] <= self.base_s:
            return self._add_baseline(rule, sample)
        at = bisect_left(self.samples, sample)
        if at < len(self.samples) and self.samples[at] == sample:
            return False
        self.samples.insert(at, sample)
        in_order = at == len(self.samples) - 1
        self._latest = _stepped(self._latest, rule, self.samples, at) if self._latest and in_order else None
        return True

    def _add_baseline(self, rule: Rule, sample: TimedValue) -> bool:
        """Keep a counter's last reading before the series was cleared, even if it arrives later."""
        if rule.kind is not RuleKind.RATE or self.base_s > self.ended_s:
            return False
        cut = bisect_right(self.samples, (self.base_s, inf))
        if self.samples[:cut] and self.samples[cut - 1] >= sample:
            return False
        self.samples[:cut] = [sample]
        self._latest = None
        return True

    def clear(self, rule: Rule, at_s: float) -> None:
        """End the findings of the samples up to `at_s`; only a later bad sample starts another finding."""
        if at_s <= self.ended_s:
            return
        self.ended_s, self._latest = at_s, None
        if self.base_s > at_s:  # samples after `at_s` are already folded: keep levels that were bad after it
            low, high = (NEVER if each.unclean_s <= at_s else each for each in self.base)
            self.base = (low, high)
            return
        cut = bisect_right(self.samples, (at_s, inf))
        # A counter's growth after the clear is computed from its last reading before the clear.
        self.samples[:cut] = self.samples[max(0, cut - 1) : cut] if rule.kind is RuleKind.RATE else []
        self.base, self.base_s = (NEVER, NEVER), at_s

    def restart(self, rule: Rule, at_s: float) -> None:
        """Treat the first reading after `at_s` as the baseline, because the counter restarted at `at_s`.

        Levels that were reached before remain until clean samples end them.
        """
        if at_s <= self.base_s:
            return
        self.base = self._fold(rule, self.base_s, at_s)
        self.base_s, self._latest = at_s, None
        del self.samples[: bisect_right(self.samples, (at_s, inf))]

    def fit(self, rule: Rule) -> None:
        """Adopt a changed rule: end the levels that the rule no longer has."""
        low, high = (
            each if reachable(rule, level) else NEVER for level, each in zip(LEVELS, self.base, strict=True)
        )
        self.base, self._latest = (low, high), None

    def levels(self, rule: Rule) -> tuple[LevelState, LevelState]:
        """Return the state of the two levels, degraded and unhealthy, after all samples."""
        if self._latest is None:
            self._latest = self._fold(rule, self.base_s, inf)
        return self._latest

    def fold(self, rule: Rule) -> None:
        """Fold samples that no late sample can precede, and drop samples that no window includes."""
        if not self.samples:
            return
        cut = self.samples[-1][0] - LATE_S
        if len(self.samples) > MAX_SAMPLES:
            cut = max(cut, self.samples[-MAX_SAMPLES][0])
        if cut <= self.base_s:
            return
        self.base = self._fold(rule, self.base_s, cut)
        self.base_s = cut
        keep = _oldest_needed(rule, self.samples, cut)
        if len(self.samples) > MAX_SAMPLES:
            keep = max(keep, len(self.samples) - MAX_SAMPLES)
        if keep > 0:
            del self.samples[:keep]
        if rule.kind is RuleKind.RATE and not any(_counts_samples(each) for each in _bounds(rule)):
            self._thin(bisect_right(self.samples, (cut, inf)))

    def _thin(self, settled: int) -> None:
        """Drop the middle of three identical readings in a row if no late sample can fall between them."""
        kept: list[TimedValue] = []
        for sample in self.samples[:settled]:
            if len(kept) > 1 and kept[-2][1] == kept[-1][1] == sample[1]:
                kept[-1] = sample
            else:
                kept.append(sample)
        self.samples[:settled] = kept

    def _fold(self, rule: Rule, after_s: float, until_s: float) -> tuple[LevelState, LevelState]:
        both = self.base
        first = bisect_right(self.samples, (after_s, inf))
        for at in range(first, len(self.samples)):
            if self.samples[at][0] > until_s:
                break
            both = _stepped(both, rule, self.samples, at)
        return both

    def dump(self) -> list[Any]:
        """Return the series as JSON, for `load`."""
        flags = [[s.active, s.since_s, s.unclean_s if s.unclean_s > -inf else None] for s in self.base]
        base_s = self.base_s if self.base_s > -inf else None
        return [base_s, flags, [list(sample) for sample in self.samples]]

    @classmethod
    def load(cls, raw: Any) -> SampleSeries:
        """Return the dumped series. Raises ValueError or TypeError if it is malformed."""
        base_s, flags, samples = raw
        low, high = (
            LevelState(bool(active), float(since), -inf if unclean is None else float(unclean))
            for active, since, unclean in flags
        )
        found = sorted((float(at), float(value)) for at, value in samples[:MAX_SAMPLES])
        return cls(found, -inf if base_s is None else float(base_s), (low, high))


def _stepped(
    both: tuple[LevelState, LevelState], rule: Rule, samples: list[TimedValue], at: int
) -> tuple[LevelState, LevelState]:
    low, high = both
    return _step(low, rule, Level.DEGRADED, samples, at), _step(high, rule, Level.UNHEALTHY, samples, at)


def _step(before: LevelState, rule: Rule, level: Level, samples: list[TimedValue], at: int) -> LevelState:
    now_s = samples[at][0]
    if reached(rule, level, samples, at):
        since = before.since_s if before.active else now_s
        return LevelState(True, since, now_s, shown=_shown(before, rule, level, samples[at]))
    if not _clean(rule, level, samples, at):
        shown = _shown(before, rule, level, samples[at]) if before.active else None
        return LevelState(before.active, before.since_s, now_s, shown=shown)
    if not before.active:
        return before
    gap_s = now_s - (samples[at - 1][0] if at else before.unclean_s)
    unseen_s = before.unseen_s + max(0.0, gap_s - _longest_gap_s(rule))
    if now_s - before.unclean_s - unseen_s >= rule.clear_s:
        return replace(before, active=False, unseen_s=0.0, shown=None)
    return replace(before, unseen_s=unseen_s)


def _shown(before: LevelState, rule: Rule, level: Level, sample: TimedValue) -> float | None:
    """Return the newest value of exactly this level; a later unknown value does not replace it."""
    if rule.kind is RuleKind.STATE and _state_level(rule, sample) is level:
        return sample[1]
    return before.shown if before.active else None


def reachable(rule: Rule, level: Level) -> bool:
    """Return True if any samples can reach `level`: an operator may have removed its bound."""
    if rule.kind is RuleKind.STATE:
        return any(state.level >= level for state in rule.states.values())
    return rule.unhealthy is not None or (level is Level.DEGRADED and rule.degraded is not None)


def worst_shown(rule: Rule, sample: TimedValue) -> Level:
    """Return the level that a single sample reaches."""
    low, high = SampleSeries([sample]).levels(rule)
    return Level.UNHEALTHY if high.active else Level.DEGRADED if low.active else Level.HEALTHY


def worst_reachable(rule: Rule) -> Level:
    """Return the worst level that samples of a check can reach."""
    return max((each for each in LEVELS if reachable(rule, each)), default=Level.HEALTHY)


def reached(rule: Rule, level: Level, samples: list[TimedValue], at: int) -> bool:
    """Return True if the sample at `at`, together with the earlier samples, reaches `level`."""
    if rule.kind is RuleKind.STATE:
        state = rule.states.get(int(samples[at][1]))
        if state is None or state.level < level:
            return False
        return _lasted(rule, state.for_s, samples, at, lambda n: _state_level(rule, samples[n]) >= level)
    bound = rule.degraded if level is Level.DEGRADED else rule.unhealthy
    if level is Level.DEGRADED and rule.unhealthy and _meets(rule, rule.unhealthy, samples, at):
        return True
    return bound is not None and _meets(rule, bound, samples, at)


def _state_level(rule: Rule, sample: TimedValue) -> Level:
    state = rule.states.get(int(sample[1]))
    return Level.HEALTHY if state is None else state.level


def _meets(rule: Rule, bound: Bound, samples: list[TimedValue], at: int) -> bool:
    def is_bad(n: int) -> bool:
        return _over(rule, bound.at, samples, n)

    if not is_bad(at):
        return False
    if bound.need > 1 and not _are_enough(rule, bound, samples, at, is_bad):
        return False
    return _lasted(rule, bound.for_s, samples, at, is_bad)


def _are_enough(
    rule: Rule, bound: Bound, samples: list[TimedValue], at: int, is_bad: Callable[[int], bool]
) -> bool:
    """Return True if enough of the newest samples up to the one at `at` are bad, however slowly they come.

    If they take more than twice as long as without late samples, one more must be bad: one before a restart
    of the driver and one after it show nothing, because the agent may not have watched in between.
    """
    first = max(0, at - bound.of + 1)
    bad = [n for n in range(first, at + 1) if is_bad(n)]
    if len(bad) < bound.need:
        return False
    since_s = samples[at][0] - 2 * bound.of * rule.period_s if rule.period_s else -inf
    if samples[bad[-bound.need]][0] >= since_s:
        return True
    return len(bad) + (first > 0 and is_bad(first - 1)) > bound.need


def _lasted(
    rule: Rule, for_s: float, samples: list[TimedValue], at: int, is_bad: Callable[[int], bool]
) -> bool:
    """Return True if all samples up to the one at `at` have been bad for `for_s`."""
    first, unseen_s, most_s = at, 0.0, _longest_gap_s(rule)
    while samples[at][0] - samples[first][0] - unseen_s < for_s:
        if first == 0 or not is_bad(first - 1):
            return False
        first -= 1
        unseen_s += max(0.0, samples[first + 1][0] - samples[first][0] - most_s)
    return True


def _longest_gap_s(rule: Rule) -> float:
    """Return the longest time between two samples that counts; infinity for a check without a period."""
    return MOST_PERIODS * rule.period_s if rule.period_s else inf


def _over(rule: Rule, limit: float, samples: list[TimedValue], at: int) -> bool:
    value = samples[at][1]
    if rule.kind is RuleKind.RATE:
        return grown(samples, at, rule.window_s) > limit
    return value <= limit if rule.below else value >= limit


def _clean(rule: Rule, level: Level, samples: list[TimedValue], at: int) -> bool:
    """Return True if a sample counts towards the end of `level`."""
    if rule.kind is RuleKind.STATE:
        state = rule.states.get(int(samples[at][1]))
        return state is not None and state.level < level
    bound = rule.unhealthy if level is Level.UNHEALTHY else (rule.degraded or rule.unhealthy)
    if bound is None:
        return True
    if level is Level.UNHEALTHY or rule.clear_at is None:
        return not _over(rule, bound.at, samples, at)
    if rule.kind is RuleKind.RATE:
        return not _over(rule, rule.clear_at, samples, at)
    return samples[at][1] > rule.clear_at if rule.below else samples[at][1] <= rule.clear_at


def grown(samples: list[TimedValue], at: int, window_s: float) -> float:
    """Return a counter's growth in the `window_s` before the sample at `at`.

    If a reading is lower than the previous one, the counter has restarted from 0 and grown to this reading.
    If two readings are further apart than the window, only the window's share of their difference counts.
    """
    total, since = 0.0, samples[at][0] - window_s
    for n in range(at, 0, -1):
        (before_s, before), (now_s, now) = samples[n - 1], samples[n]
        if now_s <= since:
            break
        growth = now - before if now >= before else max(0.0, now)
        total += growth * min(1.0, window_s / (now_s - before_s)) if now_s > before_s else growth
    return total


def _bounds(rule: Rule) -> list[Bound]:
    return [each for each in (rule.degraded, rule.unhealthy) if each]


def _counts_samples(bound: Bound) -> bool:
    return bound.need > 1 or bound.for_s > 0


def _oldest_needed(rule: Rule, samples: list[TimedValue], cut_s: float) -> int:
    """Return the index of the oldest sample that can affect the result of a sample after `cut_s`.

    A bound needs the samples that it counts, and samples that cover the time for which it requires bad
    samples, because `_lasted` subtracts time that no sample covers. A counter also needs the readings of its
    window before each of these samples, and one more reading to compute the first increment.
    """
    by_time = bisect_left(samples, (cut_s - KEPT_S, -inf)) - 1
    if by_time <= 0:
        return 0
    settled = bisect_right(samples, (cut_s, inf), by_time)
    oldest, covered_s, most_s = settled - 1, 0.0, _longest_gap_s(rule)
    while oldest > 0 and covered_s < rule.longest_s:
        oldest -= 1
        covered_s += min(samples[oldest + 1][0] - samples[oldest][0], most_s)
    oldest = max(0, min(oldest, settled - rule.most_samples))
    if rule.kind is RuleKind.RATE:
        oldest = bisect_left(samples, (samples[oldest][0] - rule.window_s, -inf)) - 1
    return max(0, min(oldest, by_time))


def sample_finding(
    entity: str, rule: Rule, series: SampleSeries, sources: Iterable[str], text: str
) -> HealthFinding | None:
    """Return the finding of one check of one entity; None if there is none."""
    low, high = series.levels(rule)
    if not series.samples or not (low.active or high.active):
        return None
    level = Level.UNHEALTHY if high.active else Level.DEGRADED
    current = high if high.active else low
    action, lasting = _action(rule, series, level), _lasts(rule, series, level)
    return HealthFinding(
        entity=entity,
        check=rule.check,
        code=None,
        level=level,
        action=action,
        since_s=current.since_s,
        last_s=current.unclean_s,
        why=_why(rule, series, level),
        evidence=(text,) if text else (),
        clears=_clears(rule, level),
        sources=tuple(sorted(sources)),
        lasting=lasting,
        overridden="driver" if rule.check == DRIVERS_OWN else "",
        remedy=action if lasting and action in CLEARED_BY else Action.NONE,
    )


def _lasts(rule: Rule, series: SampleSeries, level: Level) -> bool:
    """Return True while the newest sample shows a fault that persists without a remedy.

    The newest sample of a quantity shows whether the fault is still there, and clean samples end the finding.
    The fault needs a remedy only if the action is a remedy; heat or a full disk may pass. A counter shows
    only that something has happened; see `growth` for counters whose growth lasts.
    """
    if rule.kind is RuleKind.STATE:
        return _state_level(rule, series.samples[-1]) >= level
    if rule.kind is RuleKind.RATE or level is not Level.UNHEALTHY or rule.action not in CLEARED_BY:
        return False
    return rule.unhealthy is not None and _over(
        rule, rule.unhealthy.at, series.samples, len(series.samples) - 1
    )


def _action(rule: Rule, series: SampleSeries, level: Level) -> Action:
    """Return the action of a finding: for states, the costliest action of the states that it has shown.

    Of the folded states, only the newest is used. Neither an unknown value nor a value of a lower level
    replaces it, so the action lasts as long as the finding.
    """
    if rule.kind is not RuleKind.STATE:
        return rule.action if level is Level.UNHEALTHY else rule.degraded_action
    n = LEVELS.index(level)
    current, base = series.levels(rule)[n], series.base[n]
    shown = [value for at_s, value in series.samples if at_s >= current.since_s]
    if base.shown is not None and (base.active, base.since_s) == (True, current.since_s):
        shown.append(base.shown)
    actions = [rule.states[int(value)].action for value in shown if _state_level(rule, (0.0, value)) is level]
    # For a series that an earlier agent has stored, only the level may be known.
    possible = [state.action for state in rule.states.values() if state.level is level]
    return max(actions or possible, default=Action.NONE)


def _why(rule: Rule, series: SampleSeries, level: Level) -> str:
    at = len(series.samples) - 1
    value = series.samples[at][1]
    if rule.kind is RuleKind.STATE:
        state = rule.states.get(int(value))
        if state is not None and state.level >= level:
            return f"{rule.what} is {state.word}" + (f": {state.why}" if state.why else "")
        if state is None:
            return f"{rule.what} was bad and is now unknown: {value:g}"
        return f"{rule.what} was bad until recently and is now {state.word}"
    bound = rule.unhealthy if level is Level.UNHEALTHY else (rule.degraded or rule.unhealthy)
    assert bound is not None  # a level without a bound is never reached
    if rule.kind is RuleKind.RATE:
        count = amount(grown(series.samples, at, rule.window_s), rule.what)
        return f"{count} in {rule.window_s:g} s; the limit is {bound.at:g}"
    limit = amount(bound.at, rule.unit)
    return f"{rule.what}: {amount(value, rule.unit)}; the limit is {limit}{_duration(bound)}"


def _duration(bound: Bound) -> str:
    if bound.for_s:
        return f" for {bound.for_s:g} s"
    return f" in {bound.need} of {bound.of} samples" if bound.need > 1 else ""


def _clears(rule: Rule, level: Level) -> str:
    hold = f" for {rule.clear_s:g} s" if rule.clear_s else ""
    if rule.kind is RuleKind.STATE:
        good = " or ".join(state.word for state in rule.states.values() if state.level < level)
        return f"{good}{hold}"
    if rule.kind is RuleKind.RATE:
        low = level is Level.DEGRADED and rule.clear_at is not None
        return f"no more than {f'{rule.clear_at:g}' if low else 'the limit'}{hold}"
    bound = rule.unhealthy if level is Level.UNHEALTHY else (rule.degraded or rule.unhealthy)
    limit = bound.at if bound else 0.0
    if level is Level.DEGRADED and rule.clear_at is not None:
        limit = rule.clear_at
    return f"{'more' if rule.below else 'less'} than {amount(limit, rule.unit)}{hold}"


def why_undecided(rule: Rule, samples: list[TimedValue]) -> str:
    """Return why `samples`, oldest first, do not decide a check; "" if they do."""
    if not samples or rule.kind is RuleKind.EVENT:
        return ""
    at = len(samples) - 1
    if rule.kind is RuleKind.STATE:
        return _undecided_state(rule, samples)
    # counters without a period are reported only when they grow
    if rule.kind is RuleKind.RATE and at == 0 and rule.period_s:
        return f"{rule.what}: one reading of a counter does not show its growth"
    for level, bound in zip(LEVELS, (rule.degraded, rule.unhealthy), strict=True):
        if bound is not None and not reached(rule, level, samples, at) and _may_be(rule, bound, samples):
            return _pending(rule, bound, samples)
    return ""


def _undecided_state(rule: Rule, samples: list[TimedValue]) -> str:
    at = len(samples) - 1
    state = rule.states.get(int(samples[at][1]))
    if state is None or state.level is Level.HEALTHY or reached(rule, state.level, samples, at):
        return ""
    because = f": {state.why}" if state.why else ""
    return f"{rule.what} is {state.word}{because} (a fault after {state.for_s:g} s)"


def _may_be(rule: Rule, bound: Bound, samples: list[TimedValue]) -> bool:
    """Return True if more samples like the newest one would reach the bound."""
    at = len(samples) - 1
    if rule.kind is RuleKind.RATE:
        seen_s = min(rule.window_s, samples[at][0] - samples[0][0])
        return seen_s > 0 and grown(samples, at, rule.window_s) * rule.window_s / seen_s > bound.at
    value = samples[at][1]
    return value <= bound.at if rule.below else value >= bound.at


def _pending(rule: Rule, bound: Bound, samples: list[TimedValue]) -> str:
    at = len(samples) - 1
    if rule.kind is RuleKind.RATE:
        count = amount(grown(samples, at, rule.window_s), rule.what)
        seen_s = samples[at][0] - samples[0][0]
        return f"{count} in {seen_s:.0f} s (a fault above {bound.at:g} in {rule.window_s:g} s)"
    often = f"in {bound.need} of {bound.of} samples, one every {rule.period_s:g} s" if bound.need > 1 else ""
    long = f"for {bound.for_s:g} s" if bound.for_s else ""
    value = amount(samples[at][1], rule.unit)
    return f"{rule.what}: {value} (a fault {' and '.join(filter(None, (often, long)))})"
