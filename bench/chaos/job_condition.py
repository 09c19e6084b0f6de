"""Judge from a job's resource whether it has recovered, and what its incidents cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos.fault_table import FaultSign
from bench.chaos.job_table import ChaosJob
from holdfast.fileio.strict_json import mapping
from supervisor.observability import short_status

STEPS = 5  # a job trains again if it has completed this many steps since the fault


@dataclass(frozen=True, slots=True)
class JobCondition:
    """The condition of a job, according to its Supervision.

    `unrest` says why the job is not calm; "" if it is. A calm job trains on all of its members, and its
    standbys are warm, so it survives the next fault. `exit_code` is None until the run has ended.
    """

    step: int
    incidents: int
    generation: int
    epoch: int
    unrest: str
    is_whole: bool  # all standbys that the job asks for are warm
    exit_code: int | None
    updated: object = None  # when the status was published, by the clock of the supervisor


def condition_of(job: ChaosJob, status: Mapping[str, Any]) -> JobCondition:
    view = short_status.decode(status.get("view")) or {}
    members = [mapping(each) for each in view.get("members") or ()]
    idle = [each for each in members if not each.get("ranks") and not each.get("leaving")]
    ready = sum(1 for each in idle if each.get("connected") and each.get("parked"))
    return JobCondition(
        step=_whole(status.get("step")),
        incidents=_whole(status.get("incidents")),
        generation=_whole(status.get("generation")),
        epoch=_whole(status.get("epoch")),
        unrest=_unrest(job, status, view, members),
        is_whole=ready >= job.standby,
        exit_code=status["exitCode"] if status.get("phase") == "ended" else None,
        updated=view.get("updated"),
    )


def _unrest(
    job: ChaosJob, status: Mapping[str, Any], view: Mapping[str, Any], members: Sequence[Mapping[str, Any]]
) -> str:
    phase = status.get("phase")
    if phase == "ended":
        code = status.get("exitCode")
        return f"it has ended with exit code {code}: {status.get('message')}" if code else ""
    if phase != "running":
        return f"its phase is {phase or 'unknown'}: {status.get('message') or status.get('why') or ''}"
    if any(each.get("open") for each in recent(status)):
        return "an incident is open"
    training = [each for each in members if each.get("ranks")]
    if len(training) < job.members:
        return f"{len(training)} of {job.members} members have ranks"
    leaving = [str(each.get("name")) for each in training if each.get("leaving")]
    if leaving:
        return f"about to end: {', '.join(leaving)}"
    silent = [str(each.get("name")) for each in training if not each.get("connected")]
    if silent:
        return f"not connected: {', '.join(silent)}"
    return "" if view.get("phase") == "running" else f"its status shows the phase {view.get('phase')}"


def why_not_back(job: ChaosJob, now: JobCondition, since: JobCondition, *, whole: bool) -> str:
    """Return why a job has not recovered from a fault; "" if it has.

    `since` is its condition before the fault. With `whole`, its standbys must be ready as well.
    """
    if now.exit_code == 0:
        return ""
    if now.unrest:
        return now.unrest
    if now.updated == since.updated:
        return "its status has not been published again"
    if now.step < since.step + STEPS:
        return f"it is at step {now.step}, and was at {since.step}"
    if whole and not now.is_whole:
        return f"fewer than {job.standby} standbys are warm"
    return ""


def missing_sign(sign: FaultSign, now: JobCondition, since: JobCondition, restarts: int) -> str:
    """Return which sign of a fault is still missing in a job that the fault struck; "" if none is missing.

    `restarts` is the number of its containers that have been restarted since the fault.
    """
    if now.exit_code == 0:
        return ""
    if sign == "incident" and now.incidents <= since.incidents:
        return "no incident"
    if sign == "epoch" and now.epoch <= since.epoch:
        return "no other supervisor"
    return "no restarted container" if sign == "restart" and restarts <= 0 else ""


def recent(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the last incidents, oldest first."""
    found = status.get("recent")
    return [dict(each) for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def new_incidents(status: Mapping[str, Any], known: Iterable[str]) -> list[dict[str, Any]]:
    """Return the reported incidents whose ids are not in `known`."""
    kept = ("id", "kind", "rank", "step", "remedy", "detected_s", "recovered_s", "lost_steps", "why")
    past = set(known)
    return [{key: each.get(key) for key in kept} for each in recent(status) if each.get("id") not in past]


def survives_without(job: ChaosJob, nodes_of_members: Iterable[str], node: str) -> str:
    """Return why a job would not survive the loss of a node; "" if it would.

    It survives if a member is left on another node. `nodes_of_members` are the nodes of its pods with ranks.
    """
    nodes = list(nodes_of_members)
    left = [each for each in nodes if each != node]
    if len(nodes) < job.members:
        return f"{job.name} has {len(nodes)} of {job.members} members"
    return "" if left else f"all members of {job.name} are on {node}"


def _whole(value: object) -> int:
    return value if type(value) is int else -1
