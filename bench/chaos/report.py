"""The results of a chaos run: one line for each fault, a table, and the verdicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.chaos.chaos_schedule import PlannedFault
from bench.chaos.fault_table import CHAOS_FAULTS
from bench.text import Verdict, seconds, summary, table


@dataclass(slots=True)
class StruckFault:
    """A fault that was injected, and what it cost. `outcome` is "" until it is known.

    The outcomes: recovered; refused (`detail` says why); withheld (a job would not have survived it); stuck
    (a job did not recover in time); over (a job ended during the fault).
    """

    planned: PlannedFault
    at_s: float  # since the first fault
    outcome: str = ""
    detail: str = ""
    node: str = ""
    counted: tuple[
        str, ...
    ] = ()  # the job of each pod that its owner may count as failed because of the fault
    calm_after_s: float = 0.0  # from the injection until all jobs were calm
    incidents: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by job

    @property
    def untrained_s(self) -> float:
        """The longest time for which one job did not train."""
        found = {
            name: sum(each["recovered_s"] or 0.0 for each in those) for name, those in self.incidents.items()
        }
        return max(found.values(), default=0.0)

    @property
    def lost(self) -> int:
        return max(
            (each["lost_steps"] or 0 for those in self.incidents.values() for each in those), default=0
        )


@dataclass(slots=True)
class JobResult:
    """How a job ended. `digests` contains the digests of all ranks; None if the job printed none."""

    name: str
    succeeded: bool = False
    detail: str = ""
    digests: dict[str, Any] | None = None
    failures: int = 0  # as its owner counts them
    checkpoints: int = 0  # verified ones
    torn: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ChaosOutcome:
    """Everything that the verdicts are about."""

    faults: list[StruckFault] = field(default_factory=list)
    jobs: list[JobResult] = field(default_factory=list)
    reference: dict[str, Any] | None = None  # the digests of the undisturbed run
    left_behind: list[str] = field(default_factory=list)
    # nodes that the quarantine took out: none of them is bad
    tainted: list[str] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    problem: str = ""  # what ended the run early
    evidence: list[str] = field(default_factory=list)  # the state of the cluster after a problem


def fault_line(found: StruckFault) -> str:
    """Return one line about a fault and its incidents."""
    incidents = "; ".join(
        f"{name}: {each['kind']} of rank {each['rank']}, {seconds(each['recovered_s'])},"
        f" lost {each['lost_steps']}"
        for name, those in found.incidents.items()
        for each in those
    )
    told = ", ".join(filter(None, (found.detail, incidents)))
    where = f" on {found.node}" if found.node else ""
    calm = f" after {found.calm_after_s:.1f} s" if found.outcome == "recovered" else ""
    more = f" ({told})" if told else ""
    return f"{found.at_s:7.1f} s  {found.planned.line}{where}: {found.outcome}{calm}{more}"


def report_lines(outcome: ChaosOutcome, seed: int) -> list[str]:
    """Return the whole report as text, without the verdicts."""
    shown = [f"seed {seed}; {len(outcome.faults)} faults", *outcome.left_out, ""]
    shown += [fault_line(each) for each in outcome.faults]
    kinds = list(dict.fromkeys(each.planned.kind for each in outcome.faults))
    heads = ("fault", "n", "recovered", "without training", "worst", "steps lost", "calm", "worst")
    if kinds:
        shown += ["", *table(heads, [_row(kind, outcome.faults) for kind in kinds]).splitlines()]
    shown += ["", *(_job_line(each) for each in outcome.jobs)]
    return [*shown, *([f"ended early: {outcome.problem}"] if outcome.problem else [])]


def _row(kind: str, faults: Sequence[StruckFault]) -> tuple[str, ...]:
    mine = [each for each in faults if each.planned.kind == kind]
    good = [each for each in mine if each.outcome == "recovered"]
    untrained = summary([each.untrained_s for each in good])
    calm = summary([each.calm_after_s for each in good])
    lost = max((each.lost for each in mine), default=0)
    times = (untrained.median, untrained.worst), (calm.median, calm.worst)
    (first, second), (third, fourth) = [tuple(map(seconds, pair)) for pair in times]
    return kind, str(len(mine)), str(len(good)), first, second, str(lost), third, fourth


def _job_line(found: JobResult) -> str:
    ended = "succeeded" if found.succeeded else f"did not succeed: {found.detail}"
    return f"{found.name}: {ended}; {found.checkpoints} checkpoints verified"


def verdicts(outcome: ChaosOutcome) -> list[Verdict]:
    """Judge a run."""
    hit = [each for each in outcome.faults if each.outcome not in ("refused", "withheld", "over")]
    good = [each for each in hit if each.outcome == "recovered"]
    refused = [f"{each.planned.kind}: {each.detail}" for each in outcome.faults if each.outcome == "refused"]
    bad_jobs = [each.name for each in outcome.jobs if not each.succeeded]
    return [
        Verdict("the run was not ended early", outcome.problem or "no", not outcome.problem),
        Verdict(
            "all jobs recovered from every fault in time", f"{len(good)} of {len(hit)}", len(good) == len(hit)
        ),
        _none("every fault could be injected", refused, outcome.faults, "yes"),
        _none("every job ended Succeeded", bad_jobs, outcome.jobs, "yes"),
        _weights(outcome),
        _steps_lost(good),
        _none(
            "no failure in the owner's counters, except a Job's pods on nodes that lost their power",
            [
                f"{each.name}: {each.failures}, {most} of them on such a node"
                for each in outcome.jobs
                if each.failures > (most := sum(e.counted.count(each.name) for e in outcome.faults))
            ],
            outcome.jobs,
        ),
        _none("no torn checkpoint", [torn for each in outcome.jobs for torn in each.torn], outcome.jobs),
        _none("nothing left behind", outcome.left_behind, outcome.jobs),
        _none("no healthy node was tainted", outcome.tainted, outcome.jobs),
    ]


def _none(target: str, found: Sequence[str], judged: Sequence[object], good: str = "none") -> Verdict:
    """Judge a list that must be empty; open if there was no job to judge."""
    return Verdict(target, ", ".join(found) or good, not found if judged else None)


def _weights(outcome: ChaosOutcome) -> Verdict:
    target = "weights, optimizer, random states of all ranks equal those of an undisturbed run"
    others = [each for each in outcome.jobs if not is_equal(each.digests, outcome.reference)]
    unread = ", ".join(each.name for each in others if each.digests is None)
    differ = ", ".join(each.name for each in others if each.digests is not None)
    found = "; ".join([f"differ: {differ}"] * bool(differ) + [f"not compared: {unread}"] * bool(unread))
    return Verdict(target, found or "equal", not others if outcome.jobs else None)


def is_equal(found: Mapping[str, Any] | None, reference: Mapping[str, Any] | None) -> bool:
    return found is not None and found == reference


def _steps_lost(faults: Sequence[StruckFault]) -> Verdict:
    """Judge the incidents of single faults, each by its limit in the table."""
    over = [
        f"{each.planned.kind} {each.planned.number}: {each.lost}"
        for each in faults
        if (most := CHAOS_FAULTS[each.planned.kind].most_lost) is not None
        and not each.planned.second
        and each.lost > most
    ]
    return Verdict(
        "no fault that leaves the state intact costs more than one step", ", ".join(over) or "none", not over
    )
