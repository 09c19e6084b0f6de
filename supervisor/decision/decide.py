"""What to do next about one job. Pure: no clock, network, log line or randomness below.

The supervisor observes, calls `decide`, writes view and action into the journal, and carries the action
out; so any incident can be decided again from its line. The first rule that applies wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from holdfast.inspection import liveness
from holdfast.protocol import progress
from supervisor.decision import closing, orders, refusal, remedy, resume_point
from supervisor.decision.closing import EXIT_INTERRUPTED
from supervisor.hangs import detection, sentences
from supervisor.hangs.verdict import StallVerdict
from supervisor.view import (
    cut_off_work,
    failed_start,
    faults,
    members,
    memory_needed,
    reports,
    unknown_generation,
)
from supervisor.view.model import (
    UNREAD,
    Action,
    End,
    Fault,
    Learn,
    MemberView,
    Policy,
    Replace,
    ResumePoint,
    Secure,
    Settle,
    View,
    Wait,
    Warn,
)

_S = 1_000_000_000
IDLE_S = 60.0  # nothing has a deadline: look again then all the same
RESTORE_RETRY_S = 1.0  # before the very state is tried again that could not be restored
VOLUME_RETRY_S = 5.0  # before it is asked again of a memory volume that did not take it
MAX_WARNED = 24  # places and files: fewer than `transition.after` remembers
_LIVE = ("forming", "running", "looking", "securing")


def decide(view: View, policy: Policy) -> Action:
    """Return the next action for the job."""
    memory = view.memory
    if memory.stop == "now" and memory.finished and memory.phase == "saving":
        return closing.end_without_checkpoint(view, "")
    if memory.stop == "now" and memory.phase not in ("stopping", "ended"):
        return End(EXIT_INTERRUPTED, "stopped at once, as asked")
    if memory.phase in _LIVE and unknown_generation.newest(view):
        return _adopt_unknown_generation(view, policy)
    if memory.phase == "securing":
        view = replace(view, memory=failed_start.without_failed_start(view))
    return _RULES[memory.phase](view, policy)


def _adopt_unknown_generation(view: View, policy: Policy) -> Action:
    """Form the group anew from what the members say of themselves, once all have had the time to say it."""
    new = [m.silent_s for m in view.members if m.exists and m.report is None]
    left_s = policy.secure_s - min(new, default=policy.secure_s)
    if left_s > 0:
        return Wait(view.now_ns + int(left_s * _S) + 1, "the members run what the journal does not know")
    lost = unknown_generation.fault(view)
    return Secure((lost,), True, lost.detail)


# -- forming: the first generation


def _forming(view: View, policy: Policy) -> Action:
    if view.memory.stop:
        return End(EXIT_INTERRUPTED, "stopped before the first step")
    ended = remedy.startup_failure(view)
    if ended is not None:
        return ended
    lost = _lost_standby(view, policy)
    if lost is not None:
        return lost
    begins = remedy.first_resume_point(view, policy)
    unread = _unread(view, policy, begins)
    if begins.source == "none" and not policy.from_scratch and not isinstance(unread, Wait):
        ended = unread or refusal.no_state_left(view, None, None)
        if ended is not None:
            return ended
    ready = members.eligible_members(view, policy)
    if len(ready) < policy.members:
        deadline = view.memory.since_ns + int(policy.form_s * _S)
        if view.now_ns >= deadline:
            return End(1, f"only {len(ready)} of {policy.members} members became ready")
        left_s = members.next_timeout_s(view, policy, policy.form_s)
        until_ns = min(deadline, view.now_ns + int(left_s * _S))
        return Wait(until_ns, f"{len(ready)} of {policy.members} members are ready")
    return unread or remedy.start_generation(view, policy, None, ())


def _unread(view: View, policy: Policy, resumed: ResumePoint) -> Wait | End | None:
    """Wait where storage decides where to resume, and cannot be read or is being read; None otherwise.

    End when it could not be read for long.
    """
    memory = view.memory
    if resumed.source == "slot" or (policy.from_scratch and memory.phase == "forming"):
        return None
    if view.stored.error:
        deadline = max(memory.since_ns, view.stored.failed_ns) + int(policy.storage_s * _S)
        if view.now_ns < deadline:
            return Wait(deadline, f"storage cannot be read: {view.stored.error}")
        error = "it does not answer" if view.stored.error == UNREAD else view.stored.error
        why = f"storage cannot be read, for {policy.storage_s:g} s now: {error}"
        return End(2 if memory.phase == "forming" else 1, why)
    deadline = memory.since_ns + int(policy.form_s * _S)
    doubted = remedy.checkpoint_to_verify(view, policy)
    if doubted is not None and view.now_ns < deadline:
        return Wait(deadline, f"reading the checkpoint of step {doubted.step} whole")
    return None


# -- running


def _running(view: View, policy: Policy) -> Action:
    memory = view.memory
    found = faults.find_faults(view, policy)
    if found:
        return _secure(found)
    standing = detection.judge(view, policy)
    if standing is not None:
        acted = _standing(view, standing)
        if acted is not None:
            return acted
    changed = _changed(view)
    if changed is not None:
        return changed
    ended = remedy.startup_failure(view)
    if ended is not None:
        return _give_up(view, ended)
    refused = memory_needed.reason_to_refuse(view)
    if refused is not None:
        return refused
    first_ns = None if memory.settled else _first_step(view)
    if first_ns is not None:
        return Settle(first_ns, f"generation {memory.generation} has done its first step")
    if _is_finished(view):
        return closing.finished(view, policy)
    if memory.stop:
        return Secure((), True, "stop asked: securing the state first")
    learnt = _learnt(view)
    if learnt is not None:
        return learnt
    until_ns = view.now_ns + int(members.next_timeout_s(view, policy, IDLE_S) * _S)
    if standing is not None:
        until_ns = min(until_ns, _next_ns(view, policy, standing))
    busy_ns = memory.since_ns + int(orders.BUSY_S * _S)
    if not memory.settled and view.now_ns < busy_ns:
        return Wait(min(until_ns, busy_ns))
    return _lost_standby(view, policy) or Wait(until_ns)


def _standing(view: View, found: StallVerdict) -> Action | None:
    """A group stands still: act when its time is over, and warn before."""
    if found.fault is not None and found.act_ns is not None and view.now_ns >= found.act_ns:
        return _secure((found.fault,))
    told = {each.place for each in view.memory.warned}
    if found.warn_ns is None or view.now_ns < found.warn_ns or found.place in told:
        return None
    return Warn(found.place, sentences.warning(view, found))


def _next_ns(view: View, policy: Policy, found: StallVerdict) -> int:
    times_ns = [found.act_ns, found.warn_ns, detection.deadline_ns(view, policy)]
    return min((at for at in times_ns if at is not None and at > view.now_ns), default=view.now_ns + _S)


def _secure(found: tuple[Fault, ...]) -> Secure:
    """A bad number spoils the survivors' state as well; every other fault leaves it whole."""
    return Secure(found, remedy.last_good_step(found) is None, faults.root_cause(found).detail)


def _give_up(view: View, ended: End) -> Secure | End:
    """End the run, but have what its members hold written to storage before, if they may hold anything."""
    if view.memory.end is not None or not remedy.has_worked(view) or reports.script_keeps_own_state(view):
        return ended
    return Secure((), True, ended.why, ended)


def _learnt(view: View) -> Learn | None:
    """Remember a stall that ended by itself, if none of its kind has lasted as long."""
    known = {each.work: each.seconds for each in view.memory.learned}
    fresh = tuple(each for each in view.watch.passed if each.seconds > known.get(each.work, 0.0))
    if not fresh or view.watch.generation != view.memory.generation:
        return None
    return Learn(fresh, f"{fresh[0].work}: {fresh[0].seconds:g} s without a step, which ended by themselves")


def _changed(view: View) -> Warn | None:
    """Say that a file of the script is not as the run began with it, once."""
    told = {each.place for each in view.memory.warned}
    if len(told) >= MAX_WARNED:  # what is forgotten would be said again
        return None
    for report in reports.reports(view):
        for sentence in report.launcher.changed if report.launcher is not None else ():
            if sentence not in told:
                return Warn(sentence, sentence)
    return None


def _is_finished(view: View) -> bool:
    """True when every rank has ended well: others are faults, or have not ended."""
    return sum(map(reports.ended_well, reports.ranks(view))) == view.memory.world_size


def _first_step(view: View) -> int | None:
    marks = [rank.marks.first_step_ns for rank in reports.ranks(view)]
    if len(marks) < view.memory.world_size or not all(marks):
        return None
    return max(marks)


def _lost_standby(view: View, policy: Policy) -> Action | None:
    """Ask for a new member for one that is lost, so that there is a standby again."""
    for member in view.members:
        if member.name in view.memory.placement or member.name in view.memory.lost:
            continue
        if members.is_lost(view, member, policy):
            return Replace(member.name, f"member {member.name} is lost: another takes its place")
        if members.unresponsive_launcher(member):
            return Replace(
                member.name, f"member {member.name} is lost: {members.unresponsive_launcher(member)}"
            )
    return None


# -- securing: the survivors' state is being copied


def _securing(view: View, policy: Policy) -> Action:
    memory = view.memory
    waiting = [m for m in view.members if _is_awaited(view, m, policy)]
    limit_s = policy.secure_s + progress.COPIES * reports.snapshot_duration_s(view)
    # A supervisor that has taken over can have nothing secured by a member before it hears it. One that is
    # new has nothing to secure.
    heard = (m.heard_ns for m in waiting if m.name in memory.placement)
    deadline = max((memory.since_ns, *heard)) + int(limit_s * _S)
    if waiting and view.now_ns < deadline:
        return Wait(deadline, f"securing on {', '.join(m.name for m in waiting)}")
    unknown = members.unheard_members(view, policy)
    if unknown:
        until_ns = view.now_ns + int(members.next_timeout_s(view, policy, policy.member_timeout_s) * _S)
        return Wait(until_ns, f"waiting for {', '.join(unknown)} to say what it holds")
    unfinished_wait = cut_off_work.wait_for_survivors(view, policy)
    if unfinished_wait is not None:
        return unfinished_wait
    found = faults.of_incident(view, policy)
    if not found and _is_finished(view):
        return closing.finished(view, policy)
    if not found and (memory.stop or memory.end):
        return closing.save_and_end(view, ())
    if not found:
        lost = unknown_generation.unexplained(view)
        return Secure((lost,), True, lost.detail)
    cause = faults.root_cause(found)
    if cause.kind == "victim" or cause.doubtful:
        patience = memory.since_ns + int(policy.victim_s * _S)
        if view.now_ns < patience:
            return Wait(patience, "only victims so far: the cause will show itself")
        cause = faults.first_silent_member(view) or cause
    ended = remedy.reason_to_stop(view, policy, cause)
    if ended is not None:
        return ended
    if memory.stop or memory.end:
        return closing.save_and_end(view, found)
    return _restart(view, policy, cause, found)


def _is_awaited(view: View, member: MemberView, policy: Policy) -> bool:
    """True for who may hold what we need; a new supervisor hears of those with ranks in a moment."""
    if not member.connected and member.name not in view.memory.placement:
        return False
    secured = member.report is not None and member.report.secured_for >= view.memory.generation
    return not secured and not members.is_lost(view, member, policy)


def _restart(view: View, policy: Policy, cause: Fault, found: tuple[Fault, ...]) -> Action:
    """Start the next generation, once there are members for it and a state to go on from."""
    if len(members.eligible_members(view, policy)) < policy.members:
        return _short(view, policy, cause)
    resumed = remedy.next_resume_point(view, policy, cause, found)
    retry_s = VOLUME_RETRY_S if cause.signature == faults.VOLUME else RESTORE_RETRY_S
    retry_ns = view.memory.since_ns + int(retry_s * _S)
    if remedy.is_retry(view, cause, resumed) and view.now_ns < retry_ns:
        return Wait(retry_ns, f"{cause.detail}: tried again soon")
    hoped = _hoped_for(view, policy, resumed) or _unread(view, policy, resumed)
    return hoped or remedy.start_generation(view, policy, cause, found)


def _hoped_for(view: View, policy: Policy, resumed: ResumePoint) -> Wait | None:
    """Wait a little for who may have a newer state than an old one: seconds are cheaper than steps."""
    memory = view.memory
    nothing = resumed.source == "none" and resume_point.has_saved_state(memory)
    if not nothing and not (
        reports.has_protected_state(view) and resumed.step + 1 < reports.furthest_step(view)
    ):
        return None
    ends_ns = dict(members.recoverable_members(view, policy, policy.member_timeout_s))
    if view.stored.error:
        ends_ns["storage"] = memory.since_ns + int(policy.member_timeout_s * _S)
    left = {name: at_ns for name, at_ns in ends_ns.items() if at_ns > view.now_ns}
    if not left:
        return None
    until_ns = view.now_ns + int(members.next_timeout_s(view, policy, policy.member_timeout_s) * _S)
    who = next(iter(left))
    return Wait(min(until_ns, *left.values()), f"step {resumed.step} is old, and {who} may have a newer one")


def _short(view: View, policy: Policy, cause: Fault) -> Action:
    """There are too few members: have new ones made, and wait for them."""
    memory = view.memory
    able = members.eligible_members(view, policy)
    away = [name for name in memory.placement if name not in able]
    missing = members.recoverable_members(view, policy, liveness.HELD_UP_S)
    hoped = {name: at_ns for name, at_ns in missing.items() if at_ns > view.now_ns}
    for name in away:
        if name not in memory.lost and name not in hoped:
            return Replace(name, f"member {name} is lost and no standby is left")
    lost = _lost_standby(view, policy)
    if lost is not None:
        return lost
    ended = remedy.startup_failure(view)
    if ended is not None:
        return _give_up(view, ended)
    deadline = memory.since_ns + int(policy.form_s * _S)
    if view.now_ns >= deadline:
        return End(1, f"no member came for {', '.join(away)}", cause=cause)
    left_s = members.next_timeout_s(view, policy, policy.form_s)
    until_ns = min(deadline, view.now_ns + int(left_s * _S), *hoped.values())
    unheard = [
        name for name in hoped if (m := view.member(name)) is not None and members.lacks_launcher_report(m)
    ]
    if unheard:
        return Wait(until_ns, f"waiting for the sidecar of {', '.join(unheard)} to hear its launcher")
    return Wait(until_ns, f"waiting for {', '.join(away)}, or one in its place")


_RULES: Mapping[str, Callable[[View, Policy], Action]] = MappingProxyType(
    {
        "forming": _forming,
        "running": _running,
        "looking": _running,  # of a journal that an older version wrote
        "securing": _securing,
        "saving": closing.saving,
        "stopping": closing.stopping,
        "ended": closing.ended,
    }
)
