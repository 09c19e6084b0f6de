"""Judges a counter whose growth is a fault that lasts until its remedy: uncorrectable ECC errors. Pure.

The driver also raises this counter for an error contained to one application (Xid 94). Such growth means the
same as the Xid, unless the driver reports an uncontained error (48, 95) with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from nodeagent.evaluation import samples
from nodeagent.evaluation.bursts import GAP_S, EventBursts, merged_bursts, union_moments
from nodeagent.evaluation.company import CONTAINED_XID, UNCONTAINED_XIDS
from nodeagent.evaluation.events import EndMarks, finding_of, standing
from nodeagent.evaluation.samples import SampleSeries
from nodeagent.model import HealthFinding, Level
from nodeagent.policy.rules import CLEARED_BY, Bound, Clears, Meaning, Rule

# names growth that the rule in force at the time called unhealthy, and growth stored by older agents
BY_ITS_BOUND = ""
MAX_AMOUNTS = 16


def shown(rule: Rule, series: SampleSeries, at: int) -> Iterator[tuple[float, str]]:
    """Given the sample at `at`, yield the times of a counter's growth, and the name to store each under.

    The name is the growth within the rule's window, so that any policy, even a later one, can evaluate it. A
    late sample may also show growth at the samples after it, because it may be the first reading. A bound
    that needs more than one sample cannot be evaluated by the growth alone, so growth that meets such a bound
    is stored as `BY_ITS_BOUND`.
    """
    found = series.samples
    for n in range(max(1, at), len(found)) if rule.lasts else ():
        since_last_s = found[n][0] - found[n - 1][0]
        if n > at + 1 and found[n][0] - found[at][0] > rule.window_s:
            return
        if samples.grown(found, n, since_last_s) <= 0:
            continue
        if rule.unhealthy is None or _is_told_by_growth(rule.unhealthy):
            yield found[n][0], repr(samples.grown(found, n, rule.window_s))
        elif samples.reached(rule, Level.UNHEALTHY, found, n):
            yield found[n][0], BY_ITS_BOUND


def _is_told_by_growth(bound: Bound) -> bool:
    return bound.need <= 1 and bound.for_s <= 0


def note(grown: dict[str, EventBursts], name: str, seen: EventBursts) -> None:
    """Add growth to a counter's stored growth.

    Beyond `MAX_AMOUNTS`, an amount is stored as the next greater one.
    """
    if name not in grown and len(grown) >= MAX_AMOUNTS:
        known = sorted((each for each in (*grown, name) if each != BY_ITS_BOUND), key=float)
        if name == known[-1]:
            grown[name] = grown.pop(known[-2])
        elif name != BY_ITS_BOUND:
            name = known[known.index(name) + 1]
    grown.setdefault(name, EventBursts()).join(seen)


def counted(rule: Rule, grown: Mapping[str, EventBursts]) -> dict[str, EventBursts]:
    """Return the lasting growth that `rule` calls unhealthy, even if another rule applied at the time."""
    bound = rule.unhealthy
    if not rule.lasts or bound is None:
        return {}
    told = _is_told_by_growth(bound)
    return {
        name: each
        for name, each in grown.items()
        if name == BY_ITS_BOUND or (told and float(name) > bound.at)
    }


def growth_finding(
    entity: str,
    rule: Rule,
    grown: Mapping[str, EventBursts],
    contained: Meaning,
    marks: EndMarks,
    now_s: float,
) -> tuple[HealthFinding | None, float]:
    """Return the finding about a counter's growth, and when it changes without new evidence.

    Args:
        grown: The result of `counted`.
        contained: The meaning of Xid 94.
    """
    counted = Meaning(
        f"the driver has counted {rule.what}",
        Level.UNHEALTHY,
        rule.action,
        CLEARED_BY.get(rule.action, Clears.TIME),
        rule.clear_s,
        rule.source,
    )
    milder = replace(contained, name=f"{counted.name}, contained to one application by Xid {CONTAINED_XID}")
    chains = []
    for name, each in grown.items():
        for meaning, is_contained in ((counted, False), (milder, True)):
            moments = union_moments(
                (
                    times
                    for codes, times in (each.company or {(): each.moments}).items()
                    if _is_contained(codes) is is_contained
                ),
                0.0,
            )
            if moments:
                chains.append([(burst, meaning, name) for burst in merged_bursts([moments], GAP_S)])
    stands, until_s = standing(chains, marks, now_s)
    if stands is None:
        return None, until_s
    return finding_of(stands, entity, rule.check, stands.worst.why, grown, grown), until_s


def _is_contained(codes: Collection[int]) -> bool:
    return CONTAINED_XID in codes and not any(each in codes for each in UNCONTAINED_XIDS)
