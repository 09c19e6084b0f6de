"""Measures how much of the recent time each fault was present, for faults that come and go. Pure.

A fault that ends after some minutes, and returns, is new each time: its age never shows how much of the time
the node is bad. The agent therefore keeps two kinds of sums. Both fade, so they need no record of each time.

- For each unhealthy finding, the time that it was present, which fades within an hour. It shows a fault that
  is present for much of the time.
- For the node, the time with any unhealthy finding, which fades within a day, and of which each occasion
  counts for at most `MAX_OCCASION_S`. Only a node that has turned bad many times has a large sum, no matter
  whether its faults are the same.

The time without a running agent does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp
from types import MappingProxyType
from typing import Any

from nodeagent.agent.changes import FindingKey, finding_key
from nodeagent.model import HealthFinding, Level

FADES_S, NODE_FADES_S = 3600.0, 86400.0  # after this time, a third of a sum is left
MAX_OCCASION_S = 600.0  # longer than the supervisor needs to confirm a fault that persists
FORGOTTEN_S = 1.0  # a smaller sum is forgotten
# Findings with a sum. Beyond that, the smallest sums are forgotten; the node's sum counts their time anyway.
MAX_FINDINGS = 512


@dataclass(frozen=True, slots=True)
class FadingSum:
    """A time in seconds that fades."""

    sum_s: float = 0.0
    at_s: float = 0.0  # the agent time of the sum

    def left_s(self, now_s: float, fades_s: float) -> float:
        return self.sum_s * exp(-max(0.0, now_s - self.at_s) / fades_s)

    def plus(self, lasted_s: float, now_s: float, fades_s: float) -> FadingSum:
        """Return the sum after a fault was present for `lasted_s` until now."""
        added_s = fades_s * (1.0 - exp(-lasted_s / fades_s))
        return FadingSum(self.left_s(now_s, fades_s) + added_s, now_s)


@dataclass(frozen=True, slots=True)
class RecentFaults:
    """The sums as of the agent's last cycle."""

    findings: Mapping[FindingKey, FadingSum] = field(default_factory=lambda: MappingProxyType({}))
    node: FadingSum = FadingSum()
    occasion_s: float = 0.0  # how long the node has been unhealthy now, as far as it counts
    # The next two are not saved: after a restart, only the second cycle counts time again.
    at_s: float | None = None  # the time of the last cycle
    present: frozenset[FindingKey] = frozenset()  # the unhealthy findings at that time

    def after(self, now_s: float, findings: Iterable[HealthFinding]) -> RecentFaults:
        """Return the sums after a cycle. A fault was present since the last cycle if it was present then."""
        present = frozenset(finding_key(each) for each in findings if each.level is Level.UNHEALTHY)
        if not present and not self.findings:
            return replace(self, occasion_s=0.0, at_s=now_s, present=present)
        lasted_s = 0.0 if self.at_s is None else max(0.0, now_s - self.at_s)
        counted_s = min(lasted_s, MAX_OCCASION_S - self.occasion_s) if self.present and present else 0.0
        return RecentFaults(
            self._sums(now_s, lasted_s, present),
            self.node.plus(counted_s, now_s, NODE_FADES_S),
            self.occasion_s + counted_s if present else 0.0,
            now_s,
            present,
        )

    def _sums(
        self, now_s: float, lasted_s: float, present: frozenset[FindingKey]
    ) -> dict[FindingKey, FadingSum]:
        found = dict(self.findings)
        for key in present:
            found[key] = found.get(key, FadingSum(0.0, now_s)).plus(
                lasted_s if key in self.present else 0.0, now_s, FADES_S
            )
        kept = {
            key: each
            for key, each in found.items()
            if key in present or each.left_s(now_s, FADES_S) >= FORGOTTEN_S
        }
        if len(kept) <= MAX_FINDINGS:
            return kept
        greatest = sorted(kept, key=lambda key: kept[key].left_s(now_s, FADES_S), reverse=True)
        return {key: kept[key] for key in greatest[:MAX_FINDINGS]}

    def of_finding_s(self, finding: HealthFinding, now_s: float) -> float:
        """Return how long a finding was present recently."""
        found = self.findings.get(finding_key(finding))
        return 0.0 if found is None else found.left_s(now_s, FADES_S)

    def of_node_s(self, now_s: float) -> float:
        """Return how long the node was unhealthy recently, counted as for a node with many short faults."""
        return self.node.left_s(now_s, NODE_FADES_S)

    def dump(self) -> dict[str, Any]:
        """Return the sums as JSON, for `load_recent_faults`."""
        return {
            "findings": [[*key, each.sum_s, each.at_s] for key, each in self.findings.items()],
            "node": [self.node.sum_s, self.node.at_s, self.occasion_s],
        }


def load_recent_faults(raw: Any) -> RecentFaults:
    """Restore the dumped sums; none if `raw` is None, as from an earlier agent.

    Raises ValueError, TypeError or KeyError if they are malformed.
    """
    if raw is None:
        return RecentFaults()
    sum_s, at_s, occasion_s = (float(each) for each in raw["node"])
    findings = {
        (str(entity), str(check), int(code)): FadingSum(float(found_s), float(found_at_s))
        for entity, check, code, found_s, found_at_s in raw["findings"][:MAX_FINDINGS]
    }
    return RecentFaults(findings, FadingSum(sum_s, at_s), occasion_s)
