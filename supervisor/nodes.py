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
class Finding:
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

    findings: tuple[Finding, ...] = ()  # worst first
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
