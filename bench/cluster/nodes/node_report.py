"""The results of `python -m bench cluster-nodes`: the table, and the verdicts on the targets. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.text import Verdict, at_most, percent, seconds, summary, table
from supervisor.wording import count

KILL, KILL_LEADER, KILL_BARE = "node kill", "node kill, leader's node", "node kill, no standby"
CUT, CUT_LEADER = "node cut", "node cut, leader's node"
DRAIN, PREEMPTION, VERDICT = "drain", "preemption", "verdict"
LEADER = "leader killed"
SUDDEN = (KILL, KILL_LEADER, KILL_BARE, CUT, CUT_LEADER)
PLANNED = (DRAIN, PREEMPTION)

# The targets.
FIRST_STEP_S = 7.0  # from the command that takes the node away to the first new step
NOTICED_S = 5.0  # the part of that time until the decision
LOST_STEPS = 1
PAUSE_S = 2.0  # the longest time without training, if the fault was announced
AFTER_VERDICT_S = 3.0
VERDICT_S = 1.0
REST_CORES = 0.05


@dataclass(frozen=True, slots=True)
class MeasuredFault:
    """One fault. All times are in seconds; NaN if unknown.

    If no new step was completed within the limit, `first_step_s` and `pause_s` are that limit, and `is_late`
    is True.
    """

    kind: str
    node: str
    rank: int
    first_step_s: float = math.nan  # from the command; without a standby, from the start of the new container
    noticed_s: float = math.nan  # from the command to the supervisor's decision
    pause_s: float = math.nan  # the longest time without a new step
    lost_steps: int = 0
    incidents: int = 1
    supervised_s: float = math.nan  # after a leader was killed: until the next one supervises all members
    verdict_s: float = math.nan  # from the fault to the condition of the Node
    is_late: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class RestCost:
    """The cores that each of Holdfast's parts uses while a job with a standby trains."""

    cores: dict[str, float] = field(default_factory=dict)
    nodes: int = 0

    @property
    def total(self) -> float:
        return sum(self.cores.values()) if self.cores else math.nan


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """A job's digests compared with an undisturbed run's. `ended` is the state of the PyTorchJob."""

    job: str
    ended: str
    compared: int
    differing: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        return self.compared > 0 and not self.differing


def fault_line(found: MeasuredFault) -> str:
    """Return one line about a fault."""
    late = "> " if found.is_late else ""
    times = []
    if not math.isnan(found.first_step_s):
        times.append(f"first new step {late}{seconds(found.first_step_s)}")
    if not math.isnan(found.noticed_s):
        times.append(f"noticed and decided {seconds(found.noticed_s)}")
    times.append(f"pause {late}{seconds(found.pause_s)}")
    for value, what in ((found.supervised_s, "supervised again"), (found.verdict_s, "condition after")):
        if not math.isnan(value):
            times.append(f"{what} {seconds(value)}")
    times.append(f"{count(found.lost_steps, 'step')} lost")
    line = f"{found.kind:<24} {found.node}{_rank(found)}: {', '.join(times)}"
    if found.incidents > 1:
        line += f"; {found.incidents} incidents, the last one because {found.why}"
    return line


def _rank(found: MeasuredFault) -> str:
    return f" rank {found.rank}" if found.rank >= 0 else ""


def rows(found: Sequence[MeasuredFault]) -> str:
    """Return the table: one line for each kind of fault."""
    heads = ("fault", "n", "first step", "worst", "decided", "worst", "pause", "worst", "lost, at most")
    lines = []
    for kind in dict.fromkeys(each.kind for each in found):
        mine = [each for each in found if each.kind == kind]
        cells = [kind, str(len(mine))]
        for values in (_firsts(mine), _noticed(mine), _pauses(mine)):
            of = summary(values)
            late = "> " if any(each.is_late for each in mine) else ""
            cells += [seconds(of.median), f"{late if values else ''}{seconds(of.worst)}"]
        lines.append([*cells, str(max(each.lost_steps for each in mine))])
    return table(heads, lines)


def cost_rows(cost: RestCost) -> str:
    """Return the table of the cores used at rest."""
    lines = [[name, percent(value)] for name, value in cost.cores.items()]
    return table(("part", "of a core"), [*lines, ["together", percent(cost.total)]])


def judge(
    found: Sequence[MeasuredFault], weights: Sequence[WeightComparison], cost: RestCost | None
) -> list[Verdict]:
    """Return the verdicts. If a requested figure was not measured, its verdict is open."""
    verdicts: list[Verdict] = []
    for kind in dict.fromkeys(each.kind for each in found):
        mine = [each for each in found if each.kind == kind]
        if kind in SUDDEN:
            verdicts += _sudden(kind, mine)
        elif kind in PLANNED:
            verdicts += _planned(kind, mine)
        elif kind == VERDICT:
            verdicts += _of_verdicts(mine)
        elif kind == LEADER:
            lost = max(each.lost_steps for each in mine)
            verdicts.append(at_most(f"{kind}: no step lost", lost, 0, str(lost)))
            incidents = max(each.incidents for each in mine)
            verdicts.append(at_most(f"{kind}: no incident", incidents, 0, str(incidents)))
    for each in weights:
        shown = (
            f"{each.compared} digests compared, {len(each.differing)} differ; the PyTorchJob is {each.ended}"
        )
        is_met = each.is_equal and each.ended == "Succeeded" if each.compared else None
        verdicts.append(Verdict(f"weights of the {each.job} equal an undisturbed run's", shown, is_met))
    if cost is not None:
        what = f"standbys, agents, supervisors and webhooks of {cost.nodes} nodes at rest"
        verdicts.append(
            at_most(
                f"{what} <= {percent(REST_CORES, 0)} of a core", cost.total, REST_CORES, percent(cost.total)
            )
        )
    return verdicts


def _sudden(kind: str, mine: Sequence[MeasuredFault]) -> list[Verdict]:
    first_s, noticed_s = _worst(_firsts(mine)), _worst(_noticed(mine))
    lost = max(each.lost_steps for each in mine)
    since = " of the new container's start" if kind == KILL_BARE else ""
    verdicts = [
        _within(f"{kind}: first new step <= {FIRST_STEP_S:g} s{since}", first_s, FIRST_STEP_S, mine),
        at_most(f"{kind}: at most {LOST_STEPS} step lost", lost, LOST_STEPS, str(lost)),
    ]
    if kind != KILL_BARE:
        verdicts.insert(
            1, _within(f"{kind}: noticed and decided <= {NOTICED_S:g} s", noticed_s, NOTICED_S, mine)
        )
    return verdicts


def _planned(kind: str, mine: Sequence[MeasuredFault]) -> list[Verdict]:
    lost = max(each.lost_steps for each in mine)
    return [
        at_most(f"{kind}: no step lost", lost, 0, str(lost)),
        _within(f"{kind}: at most {PAUSE_S:g} s without training", _worst(_pauses(mine)), PAUSE_S, mine),
    ]


def _of_verdicts(mine: Sequence[MeasuredFault]) -> list[Verdict]:
    lost = max(each.lost_steps for each in mine)
    told_s = _worst([each.verdict_s for each in mine if not math.isnan(each.verdict_s)])
    first_s = _worst(_firsts(mine))
    return [
        _within(f"Xid 79: verdict <= {VERDICT_S:g} s", told_s, VERDICT_S, mine),
        _within(f"Xid 79: training <= {AFTER_VERDICT_S:g} s after it", first_s, AFTER_VERDICT_S, mine),
        at_most(f"Xid 79: at most {LOST_STEPS} step lost", lost, LOST_STEPS, str(lost)),
    ]


def _within(target: str, value: float, limit: float, mine: Sequence[MeasuredFault]) -> Verdict:
    """Judge the worst of several times. A fault without a new step misses every target."""
    if any(each.is_late for each in mine):
        return Verdict(target, f"no new step within {seconds(_worst(_pauses(mine)))}", met=False)
    return at_most(target, value, limit, seconds(value))


def _worst(values: Sequence[float]) -> float:
    return max(values, default=math.nan)


def _firsts(mine: Sequence[MeasuredFault]) -> list[float]:
    return [each.first_step_s for each in mine if not math.isnan(each.first_step_s)]


def _noticed(mine: Sequence[MeasuredFault]) -> list[float]:
    return [each.noticed_s for each in mine if not math.isnan(each.noticed_s)]


def _pauses(mine: Sequence[MeasuredFault]) -> list[float]:
    return [each.pause_s for each in mine if not math.isnan(each.pause_s)]
