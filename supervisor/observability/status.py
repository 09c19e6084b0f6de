"""Build a run's status, the contract of status.json, `holdfast status --json` and GET /v1/status. Pure.

`supervisor.observability.publisher` decides when a status is built and where it goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.protocol.launcher_messages import RankState
from holdfast.protocol.member_messages import MemberReport, RankProgress
from holdfast.protocol.progress import PhaseKind, names_of_kinds
from supervisor.decision import closing, memory_needed, remedy, resume_point
from supervisor.decision.membership import placement, resizing
from supervisor.decision.redundancy import node_loss
from supervisor.hangs import detection
from supervisor.identity_cache import by_identity
from supervisor.observability import incident_record as incidents
from supervisor.observability import warm_pool
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.ledger import Ledger
from supervisor.view import reports
from supervisor.view.model import (
    ENDING_PHASES,
    SECOND_NS,
    UNREAD,
    Checkpoint,
    Fault,
    JobState,
    MemberView,
    Policy,
    View,
)
from supervisor.view.slow_ranks import SlowRank
from supervisor.wording import count

STALLED_STEPS = 3.0  # if no step ends for this many usual step times, no rate is shown
STALLED_S = 2.0  # a step that is not late is called slow only after this time and `STALLED_STEPS`
_PAUSES = names_of_kinds(PhaseKind.PAUSE)


@dataclass(frozen=True, slots=True)
class StatusContext:
    """The inputs of a status in addition to the view and the accounts."""

    run: str  # name of the run's directory
    updated_s: float  # the wall clock time that users see
    supervisor_pid: int
    policy: Policy = field(default_factory=Policy)  # the limits for a group without steps
    last_incident: Mapping[str, Any] | None = None
    slow_ranks: tuple[SlowRank, ...] = ()
    lag: tuple[float, float] = (0.0, 0.0)  # maximum and p99 lag of the supervisor's event loop, in seconds
    journal_error: str = ""  # why the last decision is not on disk
    volume_error: str = ""  # why the members' memory volume cannot be used
    # the previous status, or its known fields
    known: Mapping[str, Any] = field(default_factory=dict)


def build(view: View, accounts: Bookkeeping, context: StatusContext) -> dict[str, Any]:
    """Return the status as JSON. Changes nothing. Equal arguments produce equal statuses."""
    stall = _stall(view, context.policy) or _slow_step(view, accounts.ledger) or _NO_STALL
    found = {
        "schema": incidents.SCHEMA,
        "run": context.run,
        **_training(view, stall),
        "warnings": [
            *(each.text for each in view.memory.warned),
            *(each.sentence for each in warm_pool.problems(view).values()),
        ],
        **_times(accounts.so_far(view), int((stall["no_step_s"] or 0.0) * 1e9)),
        "members": [_member(each, view) for each in view.members],
        "ranks": _ranks(view, context.slow_ranks),
        **_incidents(view.memory, context.last_incident),
        **_saved_state(view, context.policy),
        "exit_code": view.memory.exit_code,
        "message": _message(view, context.policy),
        "traceback": view.memory.message,
        **({"finished": True} if closing.completion_of(view.memory) is not None else {}),
        "unended": len(_unended(view, context.policy)),
        "updated": round(context.updated_s, 3),
        "supervisor_pid": context.supervisor_pid,
        "warm_ready": warm_pool.is_ready(view),
        "memory": memory_needed.as_status(view),
        "lag": _lags(view, context.lag),
        "journal_error": context.journal_error,
        "volume_error": context.volume_error,
        "passed_over": [each.note for each in view.stored.unusable],
    }
    return found | _last_known(found, context.known, view)


def _last_known(found: Mapping[str, Any], before: Mapping[str, Any], view: View) -> dict[str, Any]:
    """Return the values of the last status that replace unknown ones in `found`.

    If rank 0 no longer reports progress, the last loss is used. If no rank does, the last step is used too,
    with the fields that depend on it.
    """
    kept: dict[str, Any] = {}
    if found["step"] is None:
        kept |= {name: before.get(name) for name in ("step", "secured_step")}
        kept["total_steps"] = found["total_steps"] or before.get("total_steps")
        # A rank may have completed one more step than it last reported.
        if view.memory.phase in ENDING_PHASES:
            done = max((kept["step"] or 0, view.memory.save_step))
            kept |= {"step": done or None, "secured_step": done or None}
        kept["own_state"] = found["own_state"] or bool(before.get("own_state"))
        if kept["own_state"]:
            kept["secured_step"] = None
    if not any(each.rank == 0 for each in reports.last_progress(view)):
        kept["loss"] = before.get("loss")
    return kept


def _training(view: View, stall: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training group's size, progress and speed, and whether it has stalled."""
    memory, progress = view.memory, reports.last_progress(view)
    loss = next((each.loss for each in progress if each.rank == 0), None)
    steps = [each.step for each in progress]
    step_s = _step_s(progress)
    per_step = _per_step(progress, steps, _base(view))
    settled = memory.settled and memory.phase == "running"
    moves = settled and (stall["no_step_s"] or 0.0) <= STALLED_STEPS * step_s
    return {
        "phase": memory.phase,
        "generation": memory.generation,
        "world_size": memory.world_size,
        "group": {"members": len(memory.placement), "of": memory.full_members},
        "step": min(steps) if steps else None,
        "total_steps": _goal(view),
        "loss": reports.finite(loss) if loss is not None else None,
        "step_s": step_s or None,
        "rate": round(1 / step_s, 3) if step_s and moves else None,
        "samples_per_s": round(per_step[0] / step_s, 1) if step_s and moves else None,
        "tokens_per_s": round(per_step[1] / step_s, 1) if step_s and moves else None,
        **stall,
    }


def _times(ledger: Ledger, still_ns: int) -> dict[str, Any]:
    """Return how the time was spent.

    The last `still_ns`, in which no step ended, are not counted as training.
    """
    return {
        "ettr": _rounded(ledger.ettr(still_ns)),
        "ettr_hour": _rounded(ledger.ettr_over(3600.0, ledger.at_ns, still_ns)),
        "buckets_s": {b.value: ns / 1e9 for b, ns in ledger.buckets_ns().items()},
        "pending_s": ledger.pending_ns / 1e9,
        "total_s": ledger.total_ns / 1e9,
    }


def _incidents(memory: JobState, last: Mapping[str, Any] | None) -> dict[str, Any]:
    opened = memory.incident if memory.phase not in ("stopping", "ended") else None
    return {
        "incidents": memory.incidents,
        "last_incident": last,
        "open_incident": incidents.record(opened, None) if opened else None,
    }


def _saved_state(view: View, policy: Policy) -> dict[str, Any]:
    """Return which steps would survive a fault, and where the current generation resumed from."""
    memory, progress = view.memory, reports.last_progress(view)
    own_state = reports.script_keeps_own_state(view)
    secured = min((each.step for each in progress), default=None) if not own_state else None
    if secured is not None and policy.members_created_externally:
        secured = max(0, node_loss.secured_step(view, secured))
    return {
        "own_state": own_state,
        "secured_step": secured,
        "snapshot_step": max((each.snapshot_step for each in progress), default=None),
        "proven_step": memory.equal[-1] if memory.equal else None,
        "checkpoint": _checkpoint(view, resume_point.newest_checkpoint(view)),
        "resumed": _resumed(view),
        "skip": list(memory.skip),
        "cut_short": [
            {
                "incident": incidents.incident_id(each.incident),
                "rank": each.rank,
                "step": each.step,
                "before_commit": each.early,
            }
            for each in memory.missed
        ],
    }


def _lags(view: View, own: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Return how long the event loop of each process was blocked during the last minute."""
    found = {"supervisor": own}
    found |= {m.name: (m.report.lag_s, m.report.lag_p99_s) for m in view.members if m.report is not None}
    return {name: {"max_s": round(most, 6), "p99_s": round(p99, 6)} for name, (most, p99) in found.items()}


def _message(view: View, policy: Policy) -> str:
    """Return why the run ends or has ended, or what it waits for."""
    left = _unended(view, policy)
    if left and view.memory.phase == "stopping":
        return f"{view.memory.why}; {closing.unended_in_words(left)}"
    return view.memory.why or _awaited(view, policy)


def _unended(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members of a cluster that were ordered to end and have not ended yet."""
    is_ending = view.memory.phase in ("stopping", "ended")
    return closing.unended(view, policy) if is_ending and policy.members_created_externally else ()


def _awaited(view: View, policy: Policy) -> str:
    """Return what the run is waiting for while its group forms or a fault ends it; "" otherwise."""
    memory = view.memory
    if memory.phase == "saving" and memory.end is not None:
        return f"the state of step {memory.save_step}, before the run ends: {memory.end.why}"
    if memory.phase not in ("forming", "securing"):
        return ""
    if policy.has_storage and _is_unreadable(view, policy):
        return f"storage cannot be read, still trying: {view.stored.error}"
    doubted = remedy.checkpoint_to_verify(view, policy)
    if doubted is not None:
        return f"verifying the checkpoint of step {doubted.step} before it is used"
    if memory.phase == "forming":
        return _awaited_at_start(view)
    return _awaited_before_shrinking(view, policy) or _awaited_after_fault(view)


def _is_unreadable(view: View, policy: Policy) -> bool:
    """True if reading storage has failed; False if it has not begun yet.

    On a cluster, the members read storage, so storage is unread whenever no member reports.
    """
    if view.stored.error == UNREAD:
        return bool(view.stored.looked_ns) and not policy.members_created_externally
    return bool(view.stored.error)


def _awaited_at_start(view: View) -> str:
    memory = view.memory
    launchers = [m.report.launcher if m.report is not None else None for m in view.members if m.exists]
    ready = sum(each is not None and len(each.parked) >= memory.nproc for each in launchers)
    needed = memory.world_size // memory.nproc
    if not any(each is not None and each.parked for each in launchers):
        if len(launchers) < needed:
            return f"{len(launchers)} of {needed} members are running"
        absent = [m for m in view.members if m.exists and (m.report is None or m.report.launcher is None)]
        if absent:
            return _awaited_launcher(absent)
        return "importing modules and running the script up to holdfast.join()"
    return f"{min(ready, needed)} of {needed} members ready"


def _awaited_after_fault(view: View) -> str:
    running, needed = sum(m.exists for m in view.members), view.memory.world_size // view.memory.nproc
    return f"{running} of {needed} members are running" if running < needed else ""


def _awaited_before_shrinking(view: View, policy: Policy) -> str:
    """Return how long the group waits for a replacement before it shrinks; "" if it does not wait."""
    chosen = placement.choose_members(view, policy)
    at_ns = resizing.shrinks_at_ns(view, policy, chosen) if view.memory.incident is not None else None
    if at_ns is None or at_ns <= view.now_ns:
        return ""
    left_s = math.ceil((at_ns - view.now_ns) / SECOND_NS)
    return f"waiting {left_s} s for a replacement, then continuing with {len(chosen)} of {policy.members}"


def _awaited_launcher(absent: Sequence[MemberView]) -> str:
    """Return why the launchers of these members have not reported yet. `absent` must not be empty."""
    for member in absent:
        if member.report is not None and member.report.launcher_unreachable:
            return f"member {member.name} cannot start ranks: {member.report.launcher_unreachable}"
    others = f" and {count(len(absent) - 1, 'other member')}" if len(absent) > 1 else ""
    return f"waiting for the launcher of {absent[0].name}{others} to be started by the training command"


def _goal(view: View) -> int | None:
    """Return the number of steps after which the script's loop ends; None if no rank has reported it."""
    generation = view.memory.generation
    ranks = [rank for m in view.members if m.report and m.report.launcher for rank in m.report.launcher.ranks]
    return max((rank.marks.goal for rank in ranks if rank.generation == generation), default=0) or None


def _step_s(progress: Sequence[RankProgress]) -> float:
    """Return the usual step time of the slowest rank; 0 if it is unknown."""
    return max((each.step_s for each in progress), default=0.0)


_NO_STALL: Mapping[str, Any] = {
    "no_step_s": None,
    "hang_limit_s": None,
    "held_up_by": None,
    "waiting_for": "",
}


def _slow_step(view: View, ledger: Ledger) -> Mapping[str, Any] | None:
    """Return the time since a step last ended, if it is long but no rank is late yet; None otherwise.

    A declared pause is not a step, and its time is not shown as time without a step.
    """
    progress, still_s = reports.last_progress(view), ledger.tail_ns / 1e9
    step_s = _step_s(progress)
    is_training = view.memory.phase == "running" and view.memory.settled and step_s > 0
    if not is_training or still_s <= max(STALLED_S, STALLED_STEPS * step_s):
        return None
    if any(each.phase in _PAUSES for each in progress):
        return None
    why = "the step takes longer than usual, and no rank is late yet"
    return {**_NO_STALL, "no_step_s": round(still_s, 3), "waiting_for": why}


def _stall(view: View, policy: Policy) -> Mapping[str, Any] | None:
    """Return the time since a step last ended, the rank that holds up the group, and Holdfast's limit."""
    found = detection.judge(view, policy) if view.memory.phase == "running" else None
    if found is None:
        return None
    return {
        "no_step_s": round(max(0, view.now_ns - view.watch.since_ns) / 1e9, 3),
        "hang_limit_s": found.limit_s,
        "held_up_by": found.rank if found.rank >= 0 else None,
        "waiting_for": found.why,
    }


def _base(view: View) -> int:
    launch = view.memory.launch
    return launch.restore.step if launch is not None and launch.restore is not None else 0


def _per_step(progress: list[RankProgress], steps: list[int], base: int) -> tuple[float, float]:
    """Return the samples and tokens per step, from the ranks' reported sums over the generation."""
    if not progress:
        return 0.0, 0.0
    done = max(steps) - base
    if done <= 0:
        return 0.0, 0.0
    return max(p.samples for p in progress) / done, max(p.tokens for p in progress) / done


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 6)


def _member(member: MemberView, view: View) -> dict[str, Any]:
    report = member.report
    launcher = report.launcher if report else None
    positions = view.memory.positions
    active = member.name in positions and view.memory.phase != "forming"
    first = positions[member.name] * view.memory.nproc if active else 0
    # There is no standby before the first group.
    role = "active" if active else "standby" if positions else "new"
    if not member.exists or not member.connected:
        role = "lost" if report is not None or not member.exists else "new"
    if (
        role == "lost"
        and view.memory.phase in ("stopping", "ended")
        and not _was_lost(member.name, view.memory)
    ):
        role = "left"
    problem = warm_pool.problems(view).get(member.name)
    return {
        "name": member.name,
        "node": report.node if report else "",
        "role": role,
        "connected": member.connected,
        "parked": len(launcher.parked) if launcher else 0,
        "launcher_error": report.launcher_unreachable if report else "",
        "warm_error": problem.sentence if problem is not None else "",
        **({"warm_awaited": True} if problem is not None and problem.awaited else {}),
        "ranks": list(range(first, first + view.memory.nproc)) if active else [],
        **({"leaving": member.departure.why} if member.departure is not None else {}),
        "launcher_pid": launcher.pid if launcher else None,
        "sidecar_pid": report.sidecar_pid if report else None,
    }


def _was_lost(name: str, memory: JobState) -> bool:
    """True if the member was lost before the run ended."""
    found = memory.incident.faults if memory.incident is not None else ()
    return name in memory.lost or name in _members_lost(found)


@by_identity(1)
def _members_lost(found: tuple[Fault, ...]) -> frozenset[str]:
    return frozenset(each.member for each in found if each.kind == "member_lost")


def _ranks(view: View, slow: tuple[SlowRank, ...]) -> list[dict[str, Any]]:
    found, slow_by_rank = [], {each.rank: each for each in slow}
    for member in view.members:
        report = member.report
        if report is None or report.launcher is None or member.name not in view.memory.positions:
            continue
        by_rank = {each.rank: each for each in report.progress}
        found += [
            _rank(report, rank, by_rank.get(rank.rank), slow_by_rank.get(rank.rank))
            for rank in report.launcher.ranks
            if rank.generation == view.memory.generation
        ]
    return sorted(found, key=lambda each: int(each["rank"]))


def _rank(
    report: MemberReport, rank: RankState, at: RankProgress | None, slow: SlowRank | None
) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "member": report.member,
        "pid": rank.pid,
        "state": rank.state,
        "step": at.step if at else None,
        "phase": at.phase if at else "",
        "label": at.label if at else "",
        "loss": reports.finite(at.loss) if at else None,
        "step_s": at.step_s if at else None,
        "p99_s": at.p99_s if at else None,
        "own_s": (at.own_s or None) if at else None,
        "own_data_s": at.own_data_s if at and at.own_s else None,
        "note": rank.note,
        "slow": round(slow.factor, 2) if slow else None,
        "slow_since": slow.since if slow else None,
        "peers_s": slow.peers_s if slow else None,
    }


def _resumed(view: View) -> dict[str, Any] | None:
    """Return the state that the current generation resumed from; None if it began at step 0."""
    found = view.memory.launch.restore if view.memory.launch is not None else None
    return {"step": found.step, "source": found.source} if found is not None else None


def _checkpoint(view: View, found: Checkpoint | None) -> dict[str, Any] | None:
    errors = [m.report.durable.error for m in view.members if m.report and m.report.durable.error]
    if found is None and not errors:
        return None
    return {
        "step": found.step if found else None,
        "path": found.path if found else None,
        "error": errors[0] if errors else "",
    }
