"""What is known of a pool of nodes at one instant, and what can be done about them. Data only.

All that a decision remembers stands on the nodes, as taint and annotations: whoever decides may die at any
moment, and the next one knows the same.

A report's times are ages (`_s`), by the node's own clock when the report was made, so that no clock that is
wrong can condemn a node. `_at_s` are seconds since the epoch on the clock of whoever decides: what stands on
a node outlives hosts and boots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

# The agent's words. Actions from the cheapest to the dearest.
DEGRADED, UNHEALTHY = "degraded", "unhealthy"
ACTIONS = ("none", "restart_app", "reset_gpu", "reboot_node", "replace", "contact_support")

# Effects of our taint, in Kubernetes' words.
NO_NEW_WORK, PREFER_NOT = "NoSchedule", "PreferNoSchedule"

MAX_HISTORY = 16  # incidents that a node keeps: beyond, older ones no longer change how long it stays out
MAX_EVIDENCE = 32  # keys that a node keeps: an annotation must not grow without end


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """One thing that is wrong with a node, as its agent says."""

    key: str  # the same for the same fault, whenever it comes: entity, check, code, action
    level: str  # degraded, unhealthy
    action: str
    held_s: float  # for so long without a break when the report was made
    sources: tuple[str, ...]  # sensors that saw it
    said_by: str = ""  # whose word goes before the table's: driver, operator
    lasting: bool = False  # only a remedy (a reset, a boot, another GPU) ends it, and none has been seen yet


@dataclass(frozen=True, slots=True)
class Report:
    """What a node's agent said last."""

    findings: tuple[NodeFinding, ...] = ()  # worst first
    clean_s: float = 0.0  # for so long has nothing been unhealthy; 0 while something is
    quiet_s: float = 0.0  # for so long has there been no finding at all
    calmed_s: float = math.inf  # so long ago did the last that was unhealthy end; inf: none is known of
    boot_id: str = ""
    agent: str = ""  # version of the agent and of its tables
    blind: tuple[str, ...] = ()  # sensors that cannot see now


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Our taint, with what it was set for."""

    evidence: tuple[str, ...]  # keys of findings, sorted
    action: str
    sources: tuple[str, ...]
    boot_id: str
    at_s: float
    effect: str = NO_NEW_WORK
    drain_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Waiver:
    """An operator has taken our taint off: what he knew of is not held against the node again."""

    evidence: tuple[str, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class Incident:
    """The node was taken out. A relapse came soon after we had let it back: that counts for more."""

    at_s: float
    action: str
    relapse: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, its agent's report, and what stands on it."""

    name: str
    report: Report | None = None
    silent_s: float = math.inf  # age of the report
    rack: str = ""
    quarantine: Quarantine | None = None
    waiver: Waiver | None = None
    cordoned: bool = False  # by somebody else: we never cordon
    ready: bool = True  # says the kubelet
    busy: bool = False  # jobs run there
    history: tuple[Incident, ...] = ()  # oldest first
    released_at_s: float | None = None  # when we last let it back
    version: str = ""  # of the node's object: an action holds for no other


@dataclass(frozen=True, slots=True)
class PoolView:
    """All nodes that share one breaker."""

    now_s: float
    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class Taint:
    """Keep new work off the node; on a node that is out, write down what has been found since."""

    node: str
    effect: str
    evidence: tuple[str, ...]
    action: str
    sources: tuple[str, ...]
    boot_id: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """End what runs on a node that has our taint, so that the remedy can be carried out."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Take our taint off: the node has proved its health."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop an operator's waiver: the node has been well since, so the same fault would be a new one."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing yet about a node, or about any (`node` is empty then); look again at `until_s`."""

    node: str
    why: str
    until_s: float = math.inf


Action: TypeAlias = "Taint | Drain | Release | Forget | Hold"


# What the operator asks for about nodes, with why each default is what it is. Pure.


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """What the operator asked for. Raises ValueError that names every mistake."""

    max_share: float = 0.1  # of the nodes may be out at once; EKS auto repair stops at 0.2
    min_out: int = 1  # so many may be out even where the share gives none
    min_serving: int = 1  # nodes known to be well that must be left
    stale_s: float = 120.0  # four reports
    confirm_s: float = 60.0  # how long two witnesses must have said it: time for a storm to show itself
    confirm_alone_s: float = 300.0  # how long one must have; medik8s: 300 s
    storm_nodes: int = 5  # so many troubled within `storm_window_s`, and this share of all: a storm
    storm_share: float = 0.01
    storm_window_s: float = 600.0
    rack_nodes: int = 3  # the same for one rack
    cooldown_s: float = 1800.0  # without a new one, and a storm is over
    cohort_share: float = 0.25  # of the agents of one version may say "unhealthy" and be believed
    cohort_s: float = 86400.0  # so long does a node that is out count in its cohort
    clean_s: float = 3600.0  # of health after which a node comes back, the first time
    max_clean_s: float = 7 * 86400.0  # and at the most
    unremedied: float = 4.0  # times that, when what was to be done has not been seen to be done
    half_life_s: float = 14 * 86400.0  # of an incident in the lemon score
    relapse_s: float = 86400.0  # after a release, an incident is a relapse
    prefer_away: bool = False  # keep new work off degraded nodes where there is a choice
    drain_for: frozenset[str] = frozenset({"reset_gpu", "reboot_node", "replace"})  # need an empty node

    @property
    def memory_s(self) -> float:
        """For so long may a node that has calmed down still tell of a storm."""
        return self.storm_window_s + self.cooldown_s

    def __post_init__(self) -> None:
        wrong = [said for holds, said in self._relations() if not holds]
        if wrong:
            raise ValueError("; ".join(wrong))

    def _relations(self) -> tuple[tuple[bool, str], ...]:
        return (
            (0 <= self.max_share <= 1, "max_share: expected 0 to 1"),
            (self.min_out >= 0 and self.min_serving >= 0, "min_out, min_serving: expected 0 or more"),
            (0 < self.confirm_s <= self.confirm_alone_s, "confirm_s: more than 0, at most confirm_alone_s"),
            (self.storm_nodes >= 2 and self.rack_nodes >= 2, "storm_nodes, rack_nodes: two or more"),
            (0 <= self.storm_share <= 1 and 0 <= self.cohort_share <= 1, "shares: expected 0 to 1"),
            (self.storm_window_s >= self.confirm_s, "storm_window_s: not less than confirm_s"),
            (self.stale_s > 0 and self.cooldown_s > 0, "stale_s, cooldown_s: more than 0"),
            (self.memory_s <= self.clean_s, "clean_s: not less than storm_window_s and cooldown_s together"),
            (self.clean_s <= self.max_clean_s, "max_clean_s: not less than clean_s"),
            (self.unremedied >= 1, "unremedied: 1 or more"),
            (self.half_life_s > 0 and self.relapse_s >= 0, "half_life_s: more than 0; relapse_s: 0 or more"),
            (self.drain_for <= frozenset(ACTIONS), f"drain_for: expected some of {', '.join(ACTIONS)}"),
        )
