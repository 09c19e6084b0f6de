"""The state of a pool of nodes at one instant, the actions on them, and the operator's policy. Data only.

Everything that a decision remembers is stored on the nodes, as taints and annotations: the deciding process
may die at any moment, and its successor knows the same.

The times in a report are ages (`_s`) by the node's own clock when the report was made, so a wrong clock
cannot condemn a node. `_at_s` are seconds since the epoch on the clock of the deciding process: what is
stored on a node outlives hosts and boots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

# Levels and actions as the agent reports them; actions in the order of their cost.
DEGRADED, UNHEALTHY = "degraded", "unhealthy"
ACTIONS = ("none", "restart_app", "reset_gpu", "reboot_node", "replace", "contact_support")

# Effects of our taint, as Kubernetes names them.
NO_NEW_WORK, PREFER_NOT = "NoSchedule", "PreferNoSchedule"

MAX_HISTORY = 16  # incidents kept for a node: older ones would no longer change how long it stays out
MAX_EVIDENCE = 32  # keys kept for a node: the size of an annotation must be bounded


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """A fault of a node, as its agent reports it."""

    key: str  # the same whenever the same fault occurs: entity, check, code, action
    level: str  # degraded, unhealthy
    action: str
    held_s: float  # how long without a break, as of the report
    sources: tuple[str, ...]  # the sensors that report it
    said_by: str = ""  # driver or operator, if their verdict replaces that of the table
    lasting: bool = False  # only a remedy (a reset, a boot, another GPU) ends it, and none was seen yet


@dataclass(frozen=True, slots=True)
class Report:
    """The newest report of a node's agent."""

    findings: tuple[NodeFinding, ...] = ()  # worst first
    clean_s: float = 0.0  # how long there has been no unhealthy finding; 0 while there is one
    quiet_s: float = 0.0  # how long there has been no finding at all
    calmed_s: float = math.inf  # how long ago the last unhealthy finding ended; inf: none is known
    boot_id: str = ""
    agent: str = ""  # version of the agent and of its tables
    blind: tuple[str, ...] = ()  # sensors that cannot measure now


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Our taint on a node, and the reasons for which it was set."""

    evidence: tuple[str, ...]  # keys of findings, sorted
    action: str
    sources: tuple[str, ...]
    boot_id: str
    at_s: float
    effect: str = NO_NEW_WORK
    drain_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Waiver:
    """An operator has removed our taint: the findings known then do not count against the node again."""

    evidence: tuple[str, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class Incident:
    """A node was taken out. A relapse is an incident soon after a release, and counts for more."""

    at_s: float
    action: str
    relapse: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, its agent's report, and what is stored on the node."""

    name: str
    report: Report | None = None
    silent_s: float = math.inf  # age of the report
    rack: str = ""
    quarantine: Quarantine | None = None
    waiver: Waiver | None = None
    cordoned: bool = False  # by somebody else: this package never cordons
    ready: bool = True  # as the kubelet reports it
    busy: bool = False  # jobs run there
    history: tuple[Incident, ...] = ()  # oldest first
    released_at_s: float | None = None  # when it was last released
    version: str = ""  # of the node's object: an action is valid for this version only


@dataclass(frozen=True, slots=True)
class PoolView:
    """The nodes that share one breaker."""

    now_s: float
    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class Taint:
    """Keep new work off the node; for a node that is out, record what has been found since."""

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
    """End the work on a node that has our taint, so that the remedy can be carried out."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Remove our taint: the node has proved its health."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove an operator's waiver: the node has been well since, so the same fault would be a new one."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """Take no action yet on a node, or on any node if `node` is ""; decide again at `until_s`."""

    node: str
    why: str
    until_s: float = math.inf


Action: TypeAlias = "Taint | Drain | Release | Forget | Hold"


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """The operator's settings, with a reason for each default. Raises a `ValueError` with all mistakes."""

    max_share: float = 0.1  # share of the nodes that may be out at once; EKS auto repair stops at 0.2
    min_out: int = 1  # so many nodes may be out even if the share allows none
    min_serving: int = 1  # so many nodes that are known to be well must stay in service
    stale_s: float = 120.0  # four reports
    confirm_s: float = 60.0  # how long two witnesses must report a fault: in that time a storm would show
    confirm_alone_s: float = 300.0  # how long a single witness must; medik8s: 300 s
    storm_nodes: int = 5  # a storm: so many nodes in trouble within `storm_window_s`, and this share of all
    storm_share: float = 0.01
    storm_window_s: float = 600.0
    rack_nodes: int = 3  # the same for one rack
    cooldown_s: float = 1800.0  # a storm is over after so long without another node in trouble
    # at most this share of the agents of one version may report "unhealthy" and be trusted
    cohort_share: float = 0.25
    cohort_s: float = 86400.0  # for so long a node that is out counts among the agents of its version
    clean_s: float = 3600.0  # of health before a node is released the first time
    max_clean_s: float = 7 * 86400.0  # of health before any release, at most
    # factor on the time of health while there is no sign that the remedy was carried out
    unremedied: float = 4.0
    half_life_s: float = 14 * 86400.0  # after which an incident counts half in the lemon score
    relapse_s: float = 86400.0  # an incident so soon after a release is a relapse
    prefer_away: bool = False  # keep new work off degraded nodes where there is a choice
    # remedies that need an empty node
    drain_for: frozenset[str] = frozenset({"reset_gpu", "reboot_node", "replace"})

    @property
    def memory_s(self) -> float:
        """How long after its recovery a node may still show that there was a storm."""
        return self.storm_window_s + self.cooldown_s

    def __post_init__(self) -> None:
        wrong = [message for holds, message in self._relations() if not holds]
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
