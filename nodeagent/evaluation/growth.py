"""Judges a counter whose growth is a fault that lasts until its remedy: uncorrectable ECC errors. Pure.

The driver also raises this counter for an error contained to one application (Xid 94). Such growth means the
same as the Xid, unless the driver reports an uncontained error (48, 95) with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nodeagent.evaluation import samples
from nodeagent.evaluation.bursts import Burst, EventBursts, near
from nodeagent.evaluation.events import EndMarks, finding_of, standing
from nodeagent.evaluation.samples import SampleSeries
from nodeagent.model import HealthFinding, Level
from nodeagent.policy.rules import CLEARED_BY, Clears, Meaning, Rule

CONTAINED_XID, UNCONTAINED_XIDS = 94, (48, 95)
TOGETHER_S = 30.0  # the counter is read every 10 s, and the two may come in either order


def has_grown(rule: Rule, series: SampleSeries, at: int) -> bool:
    """Return True if the sample at index `at` shows growth that the rule calls unhealthy."""
    if not rule.lasts or rule.unhealthy is None or at == 0:
        return False
    since_last_s = series.samples[at][0] - series.samples[at - 1][0]
    return samples.grown(series.samples, at, since_last_s) > 0 and samples.reached(
        rule, Level.UNHEALTHY, series.samples, at
    )


def growth_finding(
    entity: str,
    rule: Rule,
    grown: Mapping[str, EventBursts],
    contained: Meaning,
    xids: Mapping[int, Sequence[Burst]],
    marks: EndMarks,
    now_s: float,
) -> tuple[HealthFinding | None, float]:
    """Return the finding about a counter's growth, and when it changes without new evidence.

    Args:
        contained: The meaning of Xid 94.
        xids: The bursts of `CONTAINED_XID` and `UNCONTAINED_XIDS`.
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
    chains = [
        [(burst, milder if _is_contained(burst, xids) else counted) for burst in each.spans]
        for each in grown.values()
    ]
    stands, until_s = standing(chains, marks, now_s)
    if stands is None:
        return None, until_s
    return finding_of(stands, entity, rule.check, stands.worst.why, grown, grown), until_s


def _is_contained(burst: Burst, xids: Mapping[int, Sequence[Burst]]) -> bool:
    if any(near(xids[code], burst, TOGETHER_S) for code in UNCONTAINED_XIDS):
        return False
    return any(
        first - TOGETHER_S <= burst[0] and burst[1] <= last + TOGETHER_S
        for first, last in xids[CONTAINED_XID]
    )
