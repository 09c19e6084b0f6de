"""What some samples leave open: bad, but not yet often or long enough for a verdict. Pure.

A look of two seconds cannot see a minute. What it saw to be well is well now; what it saw to be bad, and a
longer look may call a fault, is neither well nor a fault.
"""

from __future__ import annotations

from nodeagent.evaluation.samples import LEVELS, Sample, grown, reached
from nodeagent.policy.rules import Bound, Kind, Rule
from nodeagent.verdict import Level


def why(rule: Rule, samples: list[Sample]) -> str:
    """Return why a check is not decided by these samples, oldest first; "" when it is."""
    if not samples or rule.kind is Kind.EVENT:
        return ""
    at = len(samples) - 1
    if rule.kind is Kind.STATE:
        return _state(rule, samples)
    if rule.kind is Kind.RATE and at == 0 and rule.period_s:  # others are told only when they grow
        return f"{rule.what}: one reading of a counter says nothing"
    for level, bound in zip(LEVELS, (rule.degraded, rule.unhealthy), strict=True):
        if bound is not None and not reached(rule, level, samples, at) and _may_be(rule, bound, samples):
            return _pending(rule, bound, samples)
    return ""


def _state(rule: Rule, samples: list[Sample]) -> str:
    at = len(samples) - 1
    state = rule.states.get(int(samples[at][1]))
    if state is None or state.level is Level.HEALTHY or reached(rule, state.level, samples, at):
        return ""
    because = f": {state.why}" if state.why else ""
    return f"{rule.what} is {state.word}{because} (a fault after {state.for_s:g} s of it)"


def _may_be(rule: Rule, bound: Bound, samples: list[Sample]) -> bool:
    """Say whether more of what was seen last would reach the bound."""
    at = len(samples) - 1
    if rule.kind is Kind.RATE:
        seen_s = min(rule.window_s, samples[at][0] - samples[0][0])
        return seen_s > 0 and grown(samples, at, rule.window_s) * rule.window_s / seen_s > bound.at
    value = samples[at][1]
    return value <= bound.at if rule.below else value >= bound.at


def _pending(rule: Rule, bound: Bound, samples: list[Sample]) -> str:
    at = len(samples) - 1
    if rule.kind is Kind.RATE:
        count, seen_s = grown(samples, at, rule.window_s), samples[at][0] - samples[0][0]
        return f"{count:g} {rule.what} in {seen_s:.0f} s (a fault above {bound.at:g} in {rule.window_s:g} s)"
    unit = f" {rule.unit}" if rule.unit else ""
    often = f"in {bound.need} of {bound.of} samples, one every {rule.period_s:g} s" if bound.need > 1 else ""
    long = f"for {bound.for_s:g} s" if bound.for_s else ""
    return f"{rule.what}: {samples[at][1]:g}{unit} (a fault {' and '.join(filter(None, (often, long)))})"
