"""Recognize certain hangs, which the supervisor acts on within seconds, without a time limit. Pure.

A hang is certain if a process is stopped, if it waits for locks that no other process can release, or if a
rank that it waits for has exited. It is also certain if all ranks wait for each other, or if a rank exceeds
the limit of its own phase.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.launcher_messages import RankState
from holdfast.protocol.member_messages import RankStall
from holdfast.protocol.progress import PhaseKind, meaning_of
from supervisor.hangs import (
    deadlock,
    evidence,
    first_steps,
    group_reports,
    hung_rank,
    sentences,
    stall_limits,
)
from supervisor.hangs.verdict import StallVerdict, hang_fault
from supervisor.view import reports, uneven_steps
from supervisor.view.model import SECOND_NS, Fault, LateRank, Policy, RankAtRest, View

OTHERS_INSPECTED_S = 0.3  # how long to wait for the other ranks' inspections, which have already begun
STOPPED_S = 1.0  # how long to wait if a stopped rank is not late, because no inspection has begun yet
PEER_LEFT_S = 5.0  # how long ranks that are not late must have waited for a rank that has exited


def certain(view: View, named: LateRank, why: str) -> StallVerdict:
    """Return the verdict that `named` hangs because of `why`; if its rank is -1, the whole group hangs."""
    place = group_reports.place(view, named)
    at = f", in {group_reports.position(view, named)}" if place and named.role == evidence.LOCKED else ""
    ranks = ", ".join(str(each.rank) for each in view.watch.ranks)
    again = sentences.hangs_again(view, named.rank, named.step)
    subject = f"ranks {ranks} hang in the same way"
    if named.rank >= 0:
        subject = sentences.describe_hang(view, named.rank, named.step)
    detail = f"{subject}: {why}{at}"
    fault = hang_fault(view, named, detail, stall_limits.signature(view, named), "")
    fault = replace(fault, hung="" if again else f"{why}{at}")
    act_ns = view.now_ns
    if not group_reports.are_all_inspected(view):
        late_s = group_reports.reported_after_s(group_reports.stalls(view))
        act_ns = view.watch.since_ns + int((late_s + OTHERS_INSPECTED_S) * SECOND_NS)
    return StallVerdict(detail, named.rank, place=place, limit_s=0.0, act_ns=act_ns, fault=fault)


def stopped(view: View, ranks: frozenset[int]) -> StallVerdict:
    """Return the verdict about `ranks`, which their launchers report as stopped, in any phase."""
    named = next(each for each in view.watch.ranks if each.rank in ranks)
    meaning = meaning_of(named.phase)
    is_in_step = meaning is not None and meaning.kind in (PhaseKind.STEP, PhaseKind.TAIL)
    where = "" if is_in_step else f" in {sentences.name_activity(view, named.rank, named.phase)}"
    found = certain(view, named, f"it is stopped (state T){where}")
    if group_reports.are_all_inspected(view):
        return found
    return replace(found, act_ns=max(view.now_ns, named.since_ns + int(STOPPED_S * SECOND_NS)))


def exceeded(view: View, over: list[RankStall]) -> StallVerdict:
    """Return the verdict about ranks that exceed the limit for a pause, their exit or a first step."""
    at_fault = [stall for stall in over if not _may_wait(stall)]
    stall = at_fault[0] if at_fault else over[0]
    watched = {each.rank: each for each in view.watch.ranks}
    named = watched.get(stall.rank)
    if not at_fault and len(over) > 1:
        named = hung_rank.name_rank(view, [watched[each.rank] for each in over if each.rank in watched])
    named = named or LateRank(stall.rank, stall.step, stall.phase_name, view.now_ns)
    again = sentences.hangs_again(view, named.rank, named.step)
    subject = sentences.describe_hang(view, named.rank, named.step)
    activity = sentences.name_activity(view, stall.rank, stall.phase_name)
    lasted = f"it has been in {activity} for {stall.stalled_s:.1f} s"
    hung = f"{lasted} (limit for this activity: {stall.limit_s:g} s)"
    detail = f"{subject}: {hung}"
    signature = first_steps.repeated_signature(view, named) or f"hang in {activity}"
    fault = replace(hang_fault(view, named, detail, signature, ""), hung="" if again else hung)
    place = group_reports.place(view, named)
    return StallVerdict(
        detail, named.rank, place=place, limit_s=stall.limit_s, act_ns=view.now_ns, fault=fault
    )


def _may_wait(stall: RankStall) -> bool:
    """True if the rank may have exceeded its limit because it waits for another rank."""
    meaning = meaning_of(stall.phase_name)
    return meaning is not None and meaning.may_wait


def abandoned(view: View) -> StallVerdict | None:
    """Return the verdict if a rank has finished while all others wait in a collective; None otherwise.

    The waiting ranks may be on time, because the rank that has finished will never join the collective.
    """
    left = [rank for rank in reports.ranks(view) if reports.has_finished(rank)]
    here = {each.rank: each for each in view.watch.ranks}
    if not left or set(here) != set(group_reports.phases(view)):
        return None
    if not all(each.role == evidence.WAITS and hung_rank.is_meeting_point(each.at) for each in here.values()):
        return None
    still_ns = max(max(each.since_ns, each.worked_ns) for each in here.values())
    return replace(
        partner_left(view, left[0], list(here.values())), act_ns=still_ns + int(PEER_LEFT_S * SECOND_NS)
    )


def partner_left(view: View, gone: RankState, waiting: list[LateRank]) -> StallVerdict:
    """Return the verdict if `gone` has finished while the ranks in `waiting` wait for it in a collective."""
    step = reports.step_of_rank(view, gone.rank)
    detail = (
        f"rank {gone.rank} exited with 0 at step {step} while rank {waiting[0].rank}"
        f" waits for it at step {waiting[0].step}"
    )
    member = view.memory.placement[gone.rank // view.memory.nproc]
    fault = Fault(
        "crash", gone.rank, member, step, view.watch.since_ns, f"exited with 0 at step {step}", detail, code=0
    )
    # If the rank did fewer steps than the others, report that instead.
    fault = next(iter(uneven_steps.find_uneven_steps(view)), fault)
    return StallVerdict(fault.detail, fault.rank, limit_s=0.0, act_ns=view.now_ns, fault=fault)


def deadlocked(view: View, policy: Policy, resting: tuple[RankAtRest, ...]) -> StallVerdict:
    """Return the verdict if all ranks wait for each other and nothing can end the wait.

    If the group was already restarted at the same step and place, the restart did not help. In that case, a
    time limit applies, which doubles with each such restart.
    """
    place, why = deadlock.place(resting), deadlock.describe(resting)
    step = min(each.step for each in resting)
    past = [each for each in view.memory.history if each.kind == "hang" and each.place == place]
    again = any(each.step == step for each in past)
    if again:
        why = f"{sentences.describe_hang(view, -1, step)}: {why}"
    fault = Fault("hang", -1, "", step, view.watch.since_ns, f"deadlock at {place}", why, place=place)
    if first_steps.is_cold(view) and not again:
        return first_steps.deadlocked(view, policy, why, place, fault)
    if policy.hang_floor_s > 0 or not again:
        return StallVerdict(why, -1, place=place, limit_s=0.0, act_ns=view.now_ns, fault=fault)
    limit_s = policy.stall_limit_s * stall_limits.doublings(len(past))
    if first_steps.in_time(view):
        limit_s = min(limit_s, policy.first_step_s)
    limit = stall_limits.describe_limit(limit_s, len(past), is_learned=False, is_extended=False)
    detail = f"{why}; {limit}"
    act_ns, warn_ns = (view.watch.since_ns + int(part * limit_s * SECOND_NS) for part in (1.0, 0.5))
    return StallVerdict(
        why,
        -1,
        place=place,
        limit_s=limit_s,
        act_ns=act_ns,
        warn_ns=warn_ns,
        fault=replace(fault, detail=detail),
    )


def is_repeated(view: View, named: LateRank) -> bool:
    """True if the group was already restarted for a hang at the same place and step, so a limit applies."""
    place = group_reports.place(view, named)
    return any(
        past.kind == "hang" and past.place == place and past.step == named.step
        for past in view.memory.history
        if place
    )
