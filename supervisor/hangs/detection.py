"""Decide whether a group that completes no steps hangs. Pure.

Elapsed time alone proves nothing, so stalls are divided into two classes:

- A certain hang is acted on immediately (`supervisor.hangs.certain_hangs`). For example, a process is
  stopped, or a rank waits for locks that no other process can release.
- Possible work, such as loading, compiling or saving, has a time limit (`supervisor.hangs.stall_limits`). The
  limit is counted from the last sign of work, and learned from stalls that ended without a restart.

Possible work is not treated as a hang while any rank is within its time limit, in a pause that the script
declared, or under a debugger, because the other ranks may be waiting for that rank.

A rank is inspected as soon as its step takes much longer than most, even if a slow step in the past has made
its time limit longer. A proof does not depend on time, so a certain hang is acted on then. For anything else,
the time limit applies.

Holdfast may never see a step of a script that does not join. Anything that such a script does before its
first step may be work, so the limit for a first step is counted from the last sign of work.
"""

from __future__ import annotations

from holdfast.inspection import liveness
from holdfast.protocol.progress import NOT_BEGUN, PhaseKind, names_of_kinds
from supervisor.hangs import (
    certain_hangs,
    deadlock,
    evidence,
    first_steps,
    group_reports,
    hung_rank,
    sentences,
    stall_limits,
)
from supervisor.hangs.verdict import StallVerdict
from supervisor.view import reports
from supervisor.view.model import SECOND_NS, LateRank, PendingException, Policy, View

EXCEPTION_S = 5.0  # added to the time for `finally` blocks, to let the rank report the exception itself
_PAUSES = names_of_kinds(PhaseKind.PAUSE, PhaseKind.COPY)
_ENDS = names_of_kinds(PhaseKind.END)


def judge(view: View, policy: Policy) -> StallVerdict | None:
    """Return the verdict about the group; None if no rank is late."""
    watch = view.watch
    if not watch.ranks or watch.generation != view.memory.generation:
        return None
    silent = reports.members_without_rank_report(view)
    if silent and view.now_ns < watch.untold_ns + int(liveness.HELD_UP_S * SECOND_NS):
        return StallVerdict(f"member {silent[0]} has not reported yet what its ranks are doing")
    traced = group_reports.traced_rank(view)
    if traced is not None:
        return StallVerdict(f"a debugger is attached to rank {traced}", traced)
    return _judge_pauses(view, policy) or _judge_others(view, policy)


def _judge_pauses(view: View, policy: Policy) -> StallVerdict | None:
    """Return the verdict if ranks are stopped or deadlocked, or if a pause or exception has time left."""
    stalls, phases = group_reports.stalls(view), group_reports.phases(view)
    pausing = [rank for rank, phase in phases.items() if phase in _PAUSES and rank not in stalls]
    stopped = group_reports.stopped_ranks(view)
    at_work = [r for r in pausing if r not in stopped and not group_reports.waits_for_others(view, r)]
    if stopped and not at_work:
        return certain_hangs.stopped(view, stopped)
    pending = _pending_exceptions(view, policy)
    if not pending and not stopped:
        resting = deadlock.deadlocked_ranks(view, stall_limits.horizon_s(view, policy))
        if resting:
            return certain_hangs.deadlocked(view, policy, resting)
    if pausing:
        first = (at_work or pausing)[0]
        return StallVerdict(sentences.describe_pause(view, first, phases[first]), first)
    if pending and not any(each.role == evidence.STOPPED for each in view.watch.ranks):
        why = "may be running the `finally` blocks of an exception that is about to end it"
        return StallVerdict(f"rank {pending[0].rank} {why}", pending[0].rank)
    return None


def _judge_others(view: View, policy: Policy) -> StallVerdict:
    """Return the verdict if no rank has time left in a pause or for an exception."""
    watch, stalls, phases = view.watch, group_reports.stalls(view), group_reports.phases(view)
    over = [stall for rank, stall in sorted(stalls.items()) if stall.limited]
    if over:
        return certain_hangs.exceeded(view, over)
    stopped = [each for each in watch.ranks if each.role == evidence.STOPPED]
    if stopped:
        return certain_hangs.certain(view, stopped[0], "it is stopped (state T)")
    if any(each.phase == NOT_BEGUN for each in watch.ranks):
        return StallVerdict("a process that was released as a rank has not begun to run yet")
    abandoned = certain_hangs.abandoned(view)
    if abandoned is not None:
        return abandoned
    in_time = [rank for rank, phase in phases.items() if rank not in stalls and phase not in _ENDS]
    if in_time:
        first = min(in_time)
        return StallVerdict(sentences.describe_in_time(view, policy, first, phases[first]))
    uninspected = [each for each in watch.ranks if not each.role]
    if uninspected and view.now_ns < _inspected_by_ns(view, policy):
        return StallVerdict(f"rank {uninspected[0].rank} is being inspected")
    return _standstill(view, policy)


def deadline_ns(view: View, policy: Policy) -> int:
    """Return the time at which the verdict stops waiting for missing inspections."""
    return _inspected_by_ns(view, policy) + 1


def _inspected_by_ns(view: View, policy: Policy) -> int:
    late_s = group_reports.reported_after_s(group_reports.stalls(view))
    return view.watch.since_ns + int((late_s + policy.look_s) * SECOND_NS)


def _pending_exceptions(view: View, policy: Policy) -> list[PendingException]:
    """Return the exceptions that may be about to end their ranks and still have time to do so."""
    until_ns = view.now_ns - int((policy.unwind_s + EXCEPTION_S) * SECOND_NS)
    return [each for each in view.watch.hints if each.since_ns > until_ns]


def _standstill(view: View, policy: Policy) -> StallVerdict:
    """Return the verdict if all ranks are late or ending, and there was time to inspect them."""
    watch = view.watch
    waiting = [each for each in watch.ranks if each.role == evidence.WAITS]
    rest = [each for each in watch.ranks if each.role != evidence.WAITS]
    left = [rank for rank in reports.ranks(view) if reports.has_finished(rank)]
    early = group_reports.early_stalls(view)
    # A rank that waits for its device may wait for a rank that has left, or for a computation.
    on_device = any(hung_rank.waits_for_device_at(each.at) for each in waiting)
    if not rest and left and not early and not on_device:
        return certain_hangs.partner_left(view, left[0], waiting)
    ahead = _ranks_ahead(view, rest)
    holding = [each for each in rest if each.rank not in ahead]
    # `holding` may contain a rank whose process is gone but whose launcher has not reported the exit yet.
    locked = [each for each in holding if each.role == evidence.LOCKED]
    at_floor = policy.hang_floor_s > 0 and all(each.begun for each in watch.ranks)
    if at_floor and not early:
        return stall_limits.at_floor(view, holding or waiting)
    # Before the first step, ranks might not wait for each other: for example, the script may serve requests.
    apart = stall_limits.are_apart(view, policy) or not any(each.begun for each in watch.ranks)
    alone = (len(watch.ranks) == 1 and not (left and waiting)) or (apart and not waiting)
    # The second inspection of an early rank shows that it has not moved since the first.
    is_proven = len(locked) == len(holding) and (not early or all(each.looks > 1 for each in locked))
    is_new = locked and not certain_hangs.is_repeated(view, locked[0]) and not first_steps.is_cold(view)
    if is_proven and is_new:
        named = hung_rank.name_rank(view, locked)
        return certain_hangs.certain(view, named, "it waits for a lock that nothing will release")
    here = first_steps.in_time(view)
    if here and all(each.rank in here for each in holding or waiting):
        return first_steps.standing(view, policy, holding or waiting, alone)
    if at_floor:
        return stall_limits.before_floor(view, policy, early)
    if alone:
        return stall_limits.unlimited(view, policy, watch.ranks[0])
    return stall_limits.limited(view, policy, holding or waiting)


def _ranks_ahead(view: View, rest: list[LateRank]) -> set[int]:
    """Return the ranks that are ahead of the rearmost one and only compute or wait, perhaps for a device."""
    inspected = {each.rank for each in reports.all_inspections(view)}
    places = {each.rank: (each.step, each.phase_seq) for each in rest if each.rank in inspected}
    first = min(places.values(), default=(0, 0))
    still = (evidence.BUSY, evidence.IDLE)
    return {each.rank for each in rest if each.role in still and places.get(each.rank, first) > first}
