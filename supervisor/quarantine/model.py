"""The state of a pool of nodes at one instant, the actions on them, and the operator's policy. Data only.

Everything that a decision depends on is stored on the nodes, as taints and annotations. The deciding process
can therefore die at any time, and its successor misses nothing.

The times in a report (`_s`) are ages at the time of the report, on the node's own clock, so a wrong clock
cannot condemn a node. Names that end in `_at_s` are seconds since the epoch on the clock of the deciding
process, because data stored on a node outlives hosts and boots. That clock may have been ahead:
a stored time that is later than now is replaced by now (`transition.after`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.node_report import ACTIONS, REMEDIES, UNHEALTHY, remedy_of

# Effects of Holdfast's taint, as Kubernetes names them.
NO_NEW_WORK, PREFER_NOT = "NoSchedule", "PreferNoSchedule"

MAX_HISTORY = 16  # incidents kept per node; older ones no longer affect how long the node stays out
# Findings weighed and keys kept per node, to bound the size of the annotation. A real node has fewer: each of
# 8 GPUs would need 16 different faults.
MAX_EVIDENCE = 128
MAX_RUNS = 16  # faults seen by training runs that are kept per node: the newest ones
# the limit for a time or an age in seconds; no sum or product of two such numbers is infinite
MAX_NUMBER = 1e15
OPERATOR = "operator"  # the source of a quarantine that an operator has requested; no sensor has this name


def is_usable(value: float) -> bool:
    """True for a number in a report or a record that is safe to compute with: neither NaN nor huge."""
    return -MAX_NUMBER <= value <= MAX_NUMBER


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """A fault of a node, as its agent reports it."""

    key: str  # device or entity, check, code and action; the same whenever the same fault occurs
    level: str  # "degraded" or "unhealthy"
    action: str
    held_s: float  # how long it had been present without interruption at the time of the report
    sources: tuple[str, ...]  # the sensors that report it
    verdict_by: str = ""  # "driver" or "operator" if their verdict overrides the table
    # only a remedy (a reset, a boot, another GPU) can end it, and none has been seen yet
    lasting: bool = False
    entity: str = ""  # what is faulty, such as "gpu/0000:3b:00.0"; "" if unknown
    signature: str = ""  # check, code and action; the same for the same fault on another node
    origins: tuple[
        str, ...
    ] = ()  # independent origins of the evidence; empty in the report of an older agent
    device: str = ""  # the identity of the GPU (`Report.devices`), which follows it to another slot
    place_key: str = ""  # `key` with the entity instead of the device, as older agents report it
    # The age of the newest sign of an event or of a counter's growth; None if it is measured continuously.
    sign_s: float | None = None
    is_from_before_boot: bool = False  # its newest sign, or its newest bad sample, is older than the boot
    backing: tuple[str, ...] = ()  # origins of other evidence for the same remedy: see `evidence.weigh`
    # What ends it, which `action` does not name if support has to be contacted, too; "" from an older agent.
    reported_remedy: str = ""
    # how long it was present recently, even with interruptions; fades within an hour; 0 from an older agent
    recent_s: float = 0.0

    @property
    def remedy(self) -> str:
        """The remedy that it needs: one of `REMEDIES`, or "" if it needs none."""
        return remedy_of(self.action, self.reported_remedy)


@dataclass(frozen=True, slots=True)
class Report:
    """The newest report of a node's agent."""

    findings: tuple[NodeFinding, ...] = ()  # worst first
    clean_s: float = 0.0  # time without an unhealthy finding; 0 while there is one
    quiet_s: float = 0.0  # time without any finding
    calmed_s: float = math.inf  # time since the last unhealthy finding cleared; inf if none is known
    boot_id: str = ""
    agent: str = ""  # the version of the agent's code; the operator's policy is not part of it
    # Sensors that currently cannot measure, and those that the agent needs but no longer has.
    blind: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # the UUID of each GPU that is present, or its serial number
    # The sensors without which `clean_s` and `quiet_s` pause. An older agent reports none, and its times do
    # not pause.
    clean_needs: tuple[str, ...] = ()
    quiet_needs: tuple[str, ...] = ()
    # the id of the agent's memory, which changes when the memory loses evidence; "" from an older agent
    state_id: str = ""
    left_out: int = 0  # findings for which the report had no room
    # How long the node was unhealthy recently, counted so that only many occasions make it long. It fades
    # within a day. 0 from an older agent.
    unsteady_s: float = 0.0

    @property
    def may_hide_faults(self) -> bool:
        """True if an unhealthy finding may have been left out; degraded ones are left out before those."""
        return self.left_out > 0 and all(each.level == UNHEALTHY for each in self.findings)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Holdfast's taint on a node, and the findings that justified it."""

    evidence: tuple[str, ...]  # keys of findings, sorted
    action: str
    sources: tuple[str, ...]
    boot_id: str
    at_s: float
    effect: str = NO_NEW_WORK
    drain_at_s: float | None = None
    replace: tuple[str, ...] = ()  # GPUs that have to be replaced, sorted
    gpus: int = 0  # the node's number of GPUs, including those to be replaced; 0 if `replace` is empty
    # When a sensor that found the fault became blind, and how long such sensors had been blind before, within
    # the healthy time that the agent reports. Used only if that time does not pause
    # (`release.with_blind_time`).
    blind_at_s: float | None = None
    blind_s: float = 0.0
    state_id: str = ""  # the id of the agent's memory that has all of the evidence (`Report.state_id`)
    # Remedies that the keys in `evidence` do not name: "REMEDY KEY", sorted. See `release.remedies`.
    remedies: tuple[str, ...] = ()
    # Evidence that needs a remedy was left out, because there was more than fits.
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Waiver:
    """An operator's removal of the taint. Findings known at that time no longer count against the node.

    `waivers` says when it ends.
    """

    evidence: tuple[str, ...]
    at_s: float
    boot_id: str = ""  # the boot of the node at that time; "" in a waiver of an older version


@dataclass(frozen=True, slots=True)
class PastQuarantine:
    """One occasion when the node was taken out.

    A relapse, which follows soon after a release, counts more.
    """

    at_s: float
    action: str
    relapse: bool = False


@dataclass(frozen=True, slots=True)
class RunFault:
    """A node's fault as a training run saw it: its processes failed in a way that hardware explains."""

    at_s: float
    device: str = ""  # the GPU's identity; "" if the run does not know which GPU it was
    why: str = ""  # the run, its incident and what was seen there; only for people


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, its agent's report, and the data stored on the node."""

    name: str
    report: Report | None = None
    silent_s: float = math.inf  # the age of the report
    rack: str = ""
    quarantine: Quarantine | None = None
    waiver: Waiver | None = None
    cordoned: bool = False  # someone else has cordoned it; this package never does
    ready: bool = True  # whether the kubelet reports it as ready
    busy: bool = False  # jobs are running on it
    history: tuple[PastQuarantine, ...] = ()  # oldest first
    released_at_s: float | None = None  # when it was last released
    version: str = ""  # the node object's resourceVersion; an action is valid for this version only
    refused: str = ""  # why other reports under its name are not believed (`reports`)
    runs: tuple[RunFault, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolView:
    """The nodes that share one breaker."""

    now_s: float
    nodes: tuple[NodeView, ...]
    clock_doubt: str = ""  # why `now_s` may be wrong; "" if nothing speaks against it
    is_clock_checked: bool = True  # `now_s` has been compared with the clocks of nodes


@dataclass(frozen=True, slots=True)
class Taint:
    """Keep new work off the node. If it is already out, record what has been found since."""

    node: str
    effect: str
    evidence: tuple[str, ...]
    action: str
    sources: tuple[str, ...]
    boot_id: str
    why: str
    version: str = ""
    replace: tuple[str, ...] = ()
    gpus: int = 0
    state_id: str = ""
    remedies: tuple[str, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """End the work on a tainted node to allow the remedy."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Remove the taint of a node that has been healthy for long enough."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove an operator's waiver, because it has expired or because any fault would now be a new one."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Correct what is stored on a node (`transition.after`). Its taint and its waiver remain."""

    node: str
    why: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """Postpone action on a node, or on all nodes if `node` is "", and decide again at `until_s`.

    Each hold ends at a known time or is an alert: an operator must act, because waiting may not help.
    """

    node: str
    why: str
    until_s: float = math.inf
    alert: bool = False


QuarantineAction: TypeAlias = "Taint | Drain | Release | Forget | Refresh | Hold"


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """The operator's settings. Raises a `ValueError` that lists all mistakes."""

    max_share: float = 0.1  # the share of nodes that may be out together; EKS auto repair stops at 0.2
    min_out: int = 1  # the number of nodes that may be tainted even if `max_share` allows none to be out
    min_serving: int = 1  # the number of nodes known to be healthy that must stay in service
    stale_s: float = 120.0  # an agent counts as silent after this time: four report intervals
    confirm_s: float = 60.0  # how long two witnesses must report a fault: long enough for a storm to show
    confirm_alone_s: float = 300.0  # how long a single witness must report a fault; medik8s waits 300 s
    # A storm means that at least this many nodes, and this share of all, have trouble within
    # `storm_window_s`.
    storm_nodes: int = 5
    storm_share: float = 0.01
    storm_window_s: float = 600.0
    rack_nodes: int = 3  # the number of nodes that makes a storm in one rack
    cooldown_s: float = 1800.0  # a storm ends after this time without another node in trouble
    # If more than this share of the agents of one version report "unhealthy", that version is not trusted.
    cohort_share: float = 0.25
    # With fewer agents, only a version newer than the others is suspect, for `cohort_s`.
    cohort_nodes: int = 8
    cohort_s: float = 86400.0  # how long a node that is out still counts among the agents of its version
    # An alert is raised after `alert_s` for a node that needs a decision, and after `repair_s` for one that
    # needs a repair.
    alert_s: float = 6 * 3600.0
    repair_s: float = 3 * 86400.0
    waiver_s: float = 7 * 86400.0  # how long an operator's release protects a node from known findings
    clean_s: float = 3600.0  # how long a node must be healthy before its first release
    max_clean_s: float = 7 * 86400.0  # the longest time that a node must be healthy before any release
    # multiplies the required healthy time while there is no sign that the remedy was carried out
    unremedied: float = 4.0
    half_life_s: float = 14 * 86400.0  # after this time, an incident counts half in the lemon score
    relapse_s: float = 86400.0  # an incident within this time after a release is a relapse
    prefer_away: bool = False  # place new work on degraded nodes only if no others are free
    # remedies that require an empty node
    drain_for: frozenset[str] = frozenset(REMEDIES)

    @property
    def memory_s(self) -> float:
        """How long after its recovery a node still counts as evidence of a storm."""
        return self.storm_window_s + self.cooldown_s

    def __post_init__(self) -> None:
        wrong = [message for holds, message in self._relations() if not holds]
        if wrong:
            raise ValueError("; ".join(wrong))

    def _relations(self) -> tuple[tuple[bool, str], ...]:
        return (
            (0 <= self.max_share <= 1, "max_share: expected 0 to 1"),
            (self.min_out >= 0 and self.min_serving >= 0, "min_out, min_serving: expected 0 or more"),
            (
                0 < self.confirm_s <= self.confirm_alone_s,
                "confirm_s: expected more than 0 and at most confirm_alone_s",
            ),
            (self.storm_nodes >= 2 and self.rack_nodes >= 2, "storm_nodes, rack_nodes: expected 2 or more"),
            (
                0 <= self.storm_share <= 1 and 0 <= self.cohort_share <= 1,
                "storm_share, cohort_share: expected 0 to 1",
            ),
            (self.cohort_nodes >= 2, "cohort_nodes: expected 2 or more"),
            (self.storm_window_s >= self.confirm_s, "storm_window_s: expected at least confirm_s"),
            (self.stale_s > 0 and self.cooldown_s > 0, "stale_s, cooldown_s: expected more than 0"),
            (self.memory_s <= self.clean_s, "clean_s: expected at least storm_window_s plus cooldown_s"),
            (self.clean_s <= self.max_clean_s, "max_clean_s: expected at least clean_s"),
            (
                self.memory_s + self.confirm_alone_s <= self.alert_s <= self.repair_s,
                "alert_s: expected at least storm_window_s plus cooldown_s plus confirm_alone_s,"
                " and at most repair_s",
            ),
            (self.waiver_s > 0, "waiver_s: expected more than 0"),
            (self.unremedied >= 1, "unremedied: expected 1 or more"),
            (
                self.half_life_s > 0 and self.relapse_s >= 0,
                "half_life_s: expected more than 0; relapse_s: expected 0 or more",
            ),
            (self.drain_for <= frozenset(ACTIONS), f"drain_for: expected some of {', '.join(ACTIONS)}"),
        )
