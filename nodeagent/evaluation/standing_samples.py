"""What a series of samples means now, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from nodeagent.evaluation.samples import Series, grown
from nodeagent.policy.rules import Bound, Kind, Rule
from nodeagent.verdict import Action, Finding, Level

DRIVERS_OWN = "recovery_action"  # a check that is nothing but the driver's own word


def finding(entity: str, rule: Rule, series: Series, sources: Iterable[str], text: str) -> Finding | None:
    """Return what stands of one check of one entity; None if nothing does."""
    low, high = series.standing(rule)
    if not series.samples or not (low.stands or high.stands):
        return None
    level = Level.UNHEALTHY if high.stands else Level.DEGRADED
    standing = high if high.stands else low
    return Finding(
        entity=entity,
        check=rule.check,
        code=None,
        level=level,
        action=_action(rule, series, level),
        since_s=standing.since_s,
        last_s=standing.unclean_s,
        why=_why(rule, series, level),
        evidence=(text,) if text else (),
        clears=_clears(rule, level),
        sources=tuple(sorted(sources)),
        lasting=rule.kind is Kind.STATE and _at(rule, series) >= level,
        overridden="driver" if rule.check == DRIVERS_OWN else "",
    )


def _at(rule: Rule, series: Series) -> Level:
    """Return the level of the newest sample of a state."""
    state = rule.states.get(int(series.samples[-1][1]))
    return Level.HEALTHY if state is None else state.level


def _action(rule: Rule, series: Series, level: Level) -> Action:
    if rule.kind is not Kind.STATE:
        return rule.action if level is Level.UNHEALTHY else rule.degraded_action
    worst = [rule.states[int(v)] for _, v in series.samples if int(v) in rule.states]
    return max((state.action for state in worst if state.level == level), default=Action.NONE)


def _why(rule: Rule, series: Series, level: Level) -> str:
    at = len(series.samples) - 1
    value = series.samples[at][1]
    if rule.kind is Kind.STATE:
        state = rule.states.get(int(value))
        if state is not None and state.level >= level:
            return f"{rule.what} is {state.word}" + (f": {state.why}" if state.why else "")
        return f"{rule.what} was bad until a moment ago, now {state.word if state else value}"
    bound = rule.unhealthy if level is Level.UNHEALTHY else (rule.degraded or rule.unhealthy)
    assert bound is not None  # a level without a bound never stands
    unit = f" {rule.unit}" if rule.unit else ""
    if rule.kind is Kind.RATE:
        count = grown(series.samples, at, rule.window_s)
        return f"{count:g} {rule.what} in {rule.window_s:g} s, {_limit(bound)} are accepted"
    return f"{rule.what}: {value:g}{unit}, the limit is {bound.at:g}{unit}{_long(bound)}"


def _limit(bound: Bound) -> str:
    return "none" if bound.at == 0 else f"up to {bound.at:g}"


def _long(bound: Bound) -> str:
    if bound.for_s:
        return f" for {bound.for_s:g} s"
    return f" in {bound.need} of {bound.of} samples" if bound.need > 1 else ""


def _clears(rule: Rule, level: Level) -> str:
    hold = f" for {rule.clear_s:g} s" if rule.clear_s else ""
    if rule.kind is Kind.STATE:
        good = " or ".join(state.word for state in rule.states.values() if state.level < level)
        return f"{good}{hold}"
    if rule.kind is Kind.RATE:
        low = level is Level.DEGRADED and rule.clear_at is not None
        return f"no more than {f'{rule.clear_at:g}' if low else 'accepted'}{hold}"
    bound = rule.unhealthy if level is Level.UNHEALTHY else (rule.degraded or rule.unhealthy)
    limit = bound.at if bound else 0.0
    if level is Level.DEGRADED and rule.clear_at is not None:
        limit = rule.clear_at
    return f"{'more' if rule.below else 'less'} than {limit:g}{' ' + rule.unit if rule.unit else ''}{hold}"
