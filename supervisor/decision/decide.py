"""Decide the next action for a job. Pure: no clock, network, logging or randomness.

The supervisor observes the job, calls `decide`, and writes the view and the action to the journal. The
action changes the job's state (`transition.after`), from which the members' orders are derived
(`orders.order_for`). Every decision can therefore be reproduced from its line in the journal. `RULES` lists
the rules of each phase, most urgent first. The first rule that returns an action wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from holdfast import exit_codes
from holdfast.inspection import liveness
from holdfast.protocol import progress
from supervisor.decision import closing, memory_needed, orders, refusal, remedy, resume_point
from supervisor.decision.membership import cut_off_members, departures, joining, placement, resizing
from supervisor.fault_kinds import kind_of
from supervisor.hangs import detection, sentences
from supervisor.hangs.verdict import StallVerdict
from supervisor.view import failed_start, faults, interrupted_work, members, reports, unknown_generation
from supervisor.view.model import (
    SECOND_NS,
    UNREAD,
    Done,
    End,
    Fault,
    JobPhase,
    Learn,
    MemberView,
    Policy,
    Preserve,
    Replace,
    ResumePoint,
    RunAction,
    Save,
    Secure,
    Settle,
    Start,
    View,
    Wait,
    Warn,
)

RESTORE_RETRY_S = 1.0  # the pause before another attempt to restore a state
VOLUME_RETRY_S = 5.0  # the same pause if the memory volume had no room for the state
FOREVER_S = 1e9
MAX_WARNED = 24  # how many places and files to warn about; must be less than `transition.MAX_PAST_WARNINGS`


class _Case:
    """A view with the values that several rules derive from it, each computed at most once."""

    def __init__(self, view: View, policy: Policy) -> None:
        self.observed = view
        self.policy = policy

    @cached_property
    def view(self) -> View:
        """The observed view. In the phase `securing`, the changes of a failed start are left out."""
        if self.observed.memory.phase != "securing":
            return self.observed
        return replace(self.observed, memory=failed_start.without_failed_start(self.observed))

    @cached_property
    def stall(self) -> StallVerdict | None:
        return detection.judge(self.view, self.policy)

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """All faults of the open incident."""
        return faults.of_incident(self.view, self.policy)

    @cached_property
    def cause(self) -> Fault:
        """The fault that explains the others."""
        return faults.explanation(self.view, self.faults)

    @cached_property
    def held_until_ns(self) -> int:
        """The time before which a group with failed ranks is not restarted; 0 if it is restarted at once."""
        return cut_off_members.held_until_ns(self.view, self.policy)

    @cached_property
    def resumed(self) -> ResumePoint:
        """The state that the next generation resumes from."""
        return remedy.next_resume_point(self.view, self.policy, self.cause, self.faults)


DecisionRule: TypeAlias = Callable[[_Case], "RunAction | None"]


def decide(view: View, policy: Policy) -> RunAction:
    """Return the next action for the job."""
    case = _Case(view, policy)
    return next(action for rule in RULES[view.memory.phase] if (action := rule(case)) is not None)


# -- rules for several phases


def stop_at_once(case: _Case) -> End | None:
    """End the run without saving if the user has requested an immediate stop.

    If a fault was about to end the run, the sentence names the fault too.
    """
    memory = case.observed.memory
    if memory.stop != "now":
        return None
    why = "stopped immediately, as requested"
    if memory.end is None:
        return End(exit_codes.INTERRUPTED, why)
    why = f"{why}, while the run was ending: {memory.end.why}"
    return End(exit_codes.INTERRUPTED, why, memory.end.message, cause=memory.end.cause)


def follow_unknown_generation(case: _Case) -> Wait | Secure | None:
    """Restart a group whose generation is not in the journal. First, give all members time to report."""
    view, policy = case.observed, case.policy
    if not unknown_generation.newest(view):
        return None
    awaited = [members.unheard_s(m) for m in view.members if m.exists and m.report is None]
    patience_s = policy.secure_s - min(awaited, default=policy.secure_s)
    if patience_s > 0:
        return Wait(view.now_ns + int(patience_s * SECOND_NS) + 1, "the members run an unknown generation")
    fault = unknown_generation.fault(view)
    return Secure((fault,), True, fault.detail)


def replace_lost_standby(case: _Case) -> Replace | None:
    """Request a replacement for a lost member without ranks, to give the group a standby again."""
    view = case.view
    for member in view.members:
        if member.name in view.memory.positions or member.name in view.memory.lost:
            continue
        if members.is_lost(view, member, case.policy):
            return Replace(member.name, f"member {member.name} is lost and is being replaced")
        if members.unresponsive_launcher(member):
            why = f"member {member.name} is lost: {members.unresponsive_launcher(member)}"
            return Replace(member.name, why)
    return None


def _unread(view: View, policy: Policy, resumed: ResumePoint) -> Wait | End | None:
    """Return a `Wait` if the resume point depends on storage that has not been read or verified yet.

    Returns an `End` if storage has been unreadable for `Policy.storage_s`, and None if the group can resume.
    """
    memory = view.memory
    if resumed.source == "slot" or (policy.from_scratch and memory.phase == "forming"):
        return None
    if not policy.has_storage:  # pods list only the checkpoints on their own volumes, which are ignored
        return None
    if view.stored.error:
        deadline = max(memory.since_ns, view.stored.failed_ns) + int(policy.storage_s * SECOND_NS)
        if view.now_ns < deadline:
            return Wait(deadline, f"storage cannot be read: {view.stored.error}")
        error = "it does not respond" if view.stored.error == UNREAD else view.stored.error
        why = f"storage could not be read for {policy.storage_s:g} s: {error}"
        return End(exit_codes.BAD_INPUT if memory.phase == "forming" else 1, why)
    deadline = memory.since_ns + int(policy.form_s * SECOND_NS)
    doubted = remedy.checkpoint_to_verify(view, policy)
    if doubted is not None and view.now_ns < deadline:
        return Wait(deadline, f"verifying the checkpoint of step {doubted.step}")
    return None


def _end_after_securing(view: View, end: End) -> Secure | End:
    """Return `end`, or a `Secure` before it if members may hold a state worth saving."""
    if view.memory.end is not None or not remedy.has_worked(view) or reports.script_keeps_own_state(view):
        return end
    return Secure((), True, end.why, end)


def _is_finished(view: View) -> bool:
    """True if the script has run to its end on every rank."""
    return sum(map(reports.has_finished, reports.ranks(view))) == view.memory.world_size


# -- rules for `forming`: the first generation


def stop_before_the_start(case: _Case) -> End | None:
    if not case.view.memory.stop:
        return None
    return End(exit_codes.INTERRUPTED, "stopped before the first step")


def end_without_members(case: _Case) -> End | None:
    """End the run if all of its pods have ended, which only the supervisor's backend can see."""
    return case.view.memory.end


def end_script_that_cannot_start(case: _Case) -> End | None:
    return remedy.startup_failure(case.view)


def refuse_to_start_over(case: _Case) -> End | None:
    """End the run if a step was saved but no state can be used, or if storage stays unreadable."""
    view, policy = case.view, case.policy
    begins = remedy.first_resume_point(view, policy)
    if begins.source != "none" or policy.from_scratch:
        return None
    unread = _unread(view, policy, begins)
    if isinstance(unread, Wait):
        return None
    return unread or refusal.no_state_left(view, None, None)


def _forming_deadline_ns(view: View, policy: Policy) -> int:
    """Return the time at which the run ends if members are still missing.

    If a controller creates the members, the run waits forever, because pods can be pending for days.
    """
    limit_s = FOREVER_S if policy.members_created_externally else policy.form_s
    return view.memory.since_ns + int(limit_s * SECOND_NS)


def await_first_members(case: _Case) -> Wait | End | None:
    view, policy = case.view, case.policy
    ready = placement.choose_members(view, policy)
    if len(ready) >= policy.members:
        return None
    deadline_ns = _forming_deadline_ns(view, policy)
    if view.now_ns >= deadline_ns:
        return End(1, f"only {len(ready)} of {policy.members} members became ready")
    timeout_s = members.next_timeout_s(view, policy, policy.form_s)
    until_ns = min(deadline_ns, view.now_ns + int(timeout_s * SECOND_NS))
    return Wait(until_ns, f"{len(ready)} of {policy.members} members are ready")


def await_first_state(case: _Case) -> Wait | End | None:
    """If the run resumes from a checkpoint, wait for storage."""
    return _unread(case.view, case.policy, remedy.first_resume_point(case.view, case.policy))


def start_first_generation(case: _Case) -> Start | End:
    return remedy.start_generation(case.view, case.policy, None, ())


# -- rules for `running`


def secure_after_faults(case: _Case) -> Secure | None:
    found = faults.find_faults(case.view, case.policy)
    if not found or case.held_until_ns:
        return None
    # The evidence about a lost member may be complete by now.
    is_cut_off = cut_off_members.has_lost_peers(case.view, case.policy)
    member = cut_off_members.due(case.view, case.policy) if is_cut_off else None
    return _secure((member,) if member is not None else found)


def replace_cut_off_member(case: _Case) -> Secure | Warn | None:
    """Let a standby replace a member that its peers do not reach; warn the user if no standby can."""
    found = cut_off_members.due(case.view, case.policy)
    return _secure((found,)) if found is not None else cut_off_members.warning(case.view, case.policy)


def act_on_stall(case: _Case) -> Secure | Warn | None:
    """Warn the user about a group that completes no step, and restart the group after its time limit."""
    stall, view = case.stall, case.view
    if stall is None or case.held_until_ns:
        return None
    if stall.fault is not None and stall.act_ns is not None and view.now_ns >= stall.act_ns:
        return _secure((stall.fault,))
    if stall.warn_ns is None or view.now_ns < stall.warn_ns or stall.place in _warned_places(view):
        return None
    return Warn(stall.place, sentences.warning(view, stall))


def _warned_places(view: View) -> frozenset[str]:
    return frozenset(each.place for each in view.memory.warned)


def warn_of_changed_file(case: _Case) -> Warn | None:
    """Warn once for each file of the script that has changed since the run began."""
    known = _warned_places(case.view)
    if len(known) >= MAX_WARNED:  # if there were more, old warnings would be forgotten and then repeated
        return None
    for report in reports.reports(case.view):
        for sentence in report.launcher.changed if report.launcher is not None else ():
            if sentence not in known:
                return Warn(sentence, sentence)
    return None


def end_without_processes(case: _Case) -> Secure | End | None:
    """End a run whose script cannot be started again, unless only members on trial report this."""
    trial = joining.on_trial(case.view, case.policy)
    end = remedy.startup_failure(case.view, trial)
    if end is not None:
        return _end_after_securing(case.view, end)
    unstarted = remedy.unstarted_member(case.view, trial)
    return _secure((unstarted,)) if unstarted is not None else None


def refuse_state_without_room(case: _Case) -> End | None:
    return memory_needed.reason_to_refuse(case.view)


def settle(case: _Case) -> Settle | None:
    memory = case.view.memory
    first_ns = None if memory.settled else _first_step(case.view)
    if first_ns is None:
        return None
    return Settle(first_ns, f"generation {memory.generation} has completed its first step")


def finish(case: _Case) -> Save | Wait | End | None:
    return closing.finished(case.view, case.policy) if _is_finished(case.view) else None


def secure_before_stop(case: _Case) -> Secure | None:
    if not case.view.memory.stop:
        return None
    return Secure((), True, "stop requested: securing the state first")


def swap_departing_members(case: _Case) -> Secure | None:
    """Stop the group between two steps to move the ranks of members that are about to end to standbys."""
    found = departures.due(case.view, case.policy)
    return Secure(found, True, found[0].detail) if found else None


def grow_group(case: _Case) -> Secure | None:
    """Stop a group that is smaller than requested between two steps, to let a ready member join it."""
    found = resizing.due_growth(case.view, case.policy)
    return Secure(found, True, found[0].detail) if found else None


def warn_of_fixed_size(case: _Case) -> Warn | None:
    """Tell the user once if the script does not allow the smaller group that the user allows."""
    why = resizing.why_not(case.view, case.policy)
    is_new = "--min-members" not in _warned_places(case.view)
    return Warn("--min-members", why) if why and is_new else None


def learn_from_stall(case: _Case) -> Learn | None:
    """Remember a stall that ended without a restart if it was longer than all earlier ones of its kind."""
    view = case.view
    known = {each.work: each.seconds for each in view.memory.learned}
    fresh = tuple(each for each in view.watch.passed if each.seconds > known.get(each.work, 0.0))
    if not fresh or view.watch.generation != view.memory.generation:
        return None
    return Learn(fresh, f"{fresh[0].work}: no step for {fresh[0].seconds:g} s, and no restart was needed")


def await_first_step(case: _Case) -> Wait | None:
    """Delay the replacement of a standby while a group starts, because the two would compete for CPU time."""
    view = case.view
    busy_ns = view.memory.since_ns + int(orders.BUSY_S * SECOND_NS)
    if view.memory.settled or view.now_ns >= busy_ns:
        return None
    return Wait(min(_next_decision_ns(case), busy_ns))


def await_next_event(case: _Case) -> Wait:
    why = "the ranks have lost their peers again: waiting for reports about the network"
    return Wait(_next_decision_ns(case), why if case.held_until_ns else "")


def _next_decision_ns(case: _Case) -> int:
    """Return the time at which the next decision is due if no report arrives earlier."""
    view, policy, stall = case.view, case.policy, case.stall
    until_ns = view.now_ns + int(members.next_timeout_s(view, policy, closing.IDLE_S) * SECOND_NS)
    grows_ns = joining.grows_at_ns(view.memory) if view.memory.reduced_by else 0
    if grows_ns > view.now_ns:
        until_ns = min(until_ns, grows_ns)
    if case.held_until_ns:
        until_ns = min(until_ns, case.held_until_ns)
    if stall is None:
        return until_ns
    times_ns = [stall.act_ns, stall.warn_ns, detection.deadline_ns(view, policy)]
    next_ns = min(
        (at for at in times_ns if at is not None and at > view.now_ns), default=view.now_ns + SECOND_NS
    )
    return min(until_ns, next_ns)


def _secure(found: tuple[Fault, ...]) -> Secure:
    """Return the response to these faults. Survivors do not copy a state that a bad number has spoiled."""
    return Secure(found, remedy.last_good_step(found) is None, faults.root_cause(found).detail)


def _first_step(view: View) -> int | None:
    """Return the time of the last rank's first completed step; None if some rank has not completed one."""
    marks = [rank.marks.first_step_ns for rank in reports.ranks(view)]
    if len(marks) < view.memory.world_size or not all(marks):
        return None
    return max(marks)


# -- rules for `securing`: the survivors' state is being copied


def await_secured_state(case: _Case) -> Wait | None:
    view, policy = case.view, case.policy
    waiting = [m for m in view.members if _is_awaited(view, m, policy)]
    limit_ns = int((policy.secure_s + progress.COPIES * reports.snapshot_duration_s(view)) * SECOND_NS)
    since_ns = view.memory.since_ns
    # A member's time limit for securing its state starts at its first report to this supervisor. If its
    # sidecar was away, the limit starts again when the member reports again. Members without ranks have
    # nothing to secure.
    latest_ns = since_ns + int(liveness.HELD_UP_S * SECOND_NS)  # even if a sidecar fails again and again
    heard = (max(m.heard_ns, min(m.back_ns, latest_ns)) for m in waiting if m.name in view.memory.positions)
    deadline = max((since_ns, *heard)) + limit_ns
    if not waiting or view.now_ns >= deadline:
        return None
    return Wait(deadline, f"securing on {', '.join(m.name for m in waiting)}")


def await_unheard_members(case: _Case) -> Wait | None:
    view, policy = case.view, case.policy
    unheard = members.unheard_members(view, policy)
    if not unheard:
        return None
    until_ns = view.now_ns + int(members.next_timeout_s(view, policy, policy.member_timeout_s) * SECOND_NS)
    return Wait(until_ns, f"waiting for the report of {', '.join(unheard)}")


def await_unheard_standbys(case: _Case) -> Wait | None:
    return departures.await_standbys(case.view, case.policy, case.cause) if case.faults else None


def await_unfinished_work(case: _Case) -> Wait | None:
    return interrupted_work.wait_for_survivors(case.view, case.policy)


def finish_without_fault(case: _Case) -> Save | Wait | End | None:
    """End the run if its ranks finished before a planned swap or growth stopped them."""
    return finish(case) if all(kind_of(each.kind).is_planned for each in case.faults) else None


def save_without_fault(case: _Case) -> Save | Wait | End | None:
    memory = case.view.memory
    if case.faults or not (memory.stop or memory.end):
        return None
    return closing.save_and_end(case.view, (), has_storage=case.policy.has_storage)


def restart_unexplained(case: _Case) -> Secure | None:
    """Restart a group that was stopped because of a fault that reports no longer mention."""
    if case.faults:
        return None
    fault = unknown_generation.unexplained(case.view)
    return Secure((fault,), True, fault.detail)


def await_cause(case: _Case) -> Wait | None:
    """While only victims are known, wait up to `Policy.victim_s` for the fault that caused them."""
    patience_ns = case.view.memory.since_ns + int(case.policy.victim_s * SECOND_NS)
    if not faults.is_only_victim(faults.root_cause(case.faults)) or case.view.now_ns >= patience_ns:
        return None
    return Wait(patience_ns, "only victims so far: waiting for the cause")


def end_where_no_restart_helps(case: _Case) -> Save | Wait | End | None:
    """End the run, after its newest good state has been saved and, if need be, waited for."""
    end = remedy.reason_to_stop(case.view, case.policy, case.cause)
    if end is None:
        return None
    wait = await_newer_state(case) if not case.view.memory.stop else None
    return wait or closing.end_after_fault(case.view, case.policy, case.faults, end)


def save_after_fault(case: _Case) -> Save | Wait | End | None:
    memory = case.view.memory
    if not (memory.stop or memory.end):
        return None
    return closing.save_and_end(case.view, case.faults, has_storage=case.policy.has_storage)


def preserve(case: _Case) -> Preserve | None:
    """Save the secured state once while the group waits for a member that a controller must replace.

    The replacement can take a long time, and the remaining members may be lost before it arrives.
    """
    view, policy, memory = case.view, case.policy, case.view.memory
    if not policy.members_created_externally or policy.checkpoint_every_s <= 0 or memory.incident is None:
        return None
    if resizing.is_enough(view, policy, placement.choose_members(view, policy)):
        return None
    resumed = case.resumed
    if resumed.source != "slot" or failed_start.is_from_scratch(memory, resumed.step):
        return None
    if resume_point.has_checkpoint(view, resumed.generation, resumed.step):
        return None
    requested = (memory.save_generation, memory.save_step) == (resumed.generation, resumed.step)
    if memory.incident.preserved == memory.save > 0 and requested and memory.save_member in resumed.holders:
        return None
    why = f"saving a checkpoint of step {resumed.step} while the group lacks a member"
    return Preserve(resumed.holders[0], resumed, why)


def await_members(case: _Case) -> Replace | Secure | Save | End | Wait | None:
    """Replace lost members until the group has enough of them, and wait for the new ones.

    If the user and the script allow it, the group continues without them after a while. It does not wait
    for members that failed when they joined it.
    """
    view, policy, memory = case.view, case.policy, case.view.memory
    able = placement.choose_members(view, policy)
    if len(able) >= policy.members:
        return None
    failed = joining.failed(view, policy)
    away = [name for name in memory.placement if name not in able and name not in failed]
    missing = members.recoverable_members(view, policy, liveness.HELD_UP_S)
    hoped = {name: at_ns for name, at_ns in missing.items() if at_ns > view.now_ns and name not in failed}
    for name in away:
        if name not in memory.lost and name not in hoped:
            return Replace(name, f"member {name} is lost and no standby is left")
    replacement = replace_lost_standby(case)
    if replacement is not None:
        return replacement
    shrinks_ns = resizing.shrinks_at_ns(view, policy, able) if not hoped else None
    if shrinks_ns is not None and view.now_ns >= shrinks_ns:
        return None
    if failed and view.unrecorded and not away:
        until_ns = view.now_ns + int(closing.IDLE_S * SECOND_NS)
        left_out = "will be left out as soon as this can be recorded"
        return Wait(until_ns, f"{', '.join(failed)} failed on joining and {left_out}")
    end = remedy.startup_failure(view)
    if end is not None:
        return _end_after_securing(view, end)
    deadline_ns = _forming_deadline_ns(view, policy)
    if view.now_ns >= deadline_ns:
        alone = End(1, f"no member became ready in place of {', '.join(away)}", cause=case.cause)
        return closing.end_after_fault(view, policy, case.faults, alone)
    timeout_s = members.next_timeout_s(view, policy, policy.form_s)
    until_ns = min(deadline_ns, view.now_ns + int(timeout_s * SECOND_NS), *hoped.values())
    if joining.barred(view):
        until_ns = min(until_ns, joining.grows_at_ns(memory))
    unheard = [
        name for name in hoped if (m := view.member(name)) is not None and members.lacks_launcher_report(m)
    ]
    if unheard:
        return Wait(until_ns, f"waiting for the launcher of {', '.join(unheard)} to report to its sidecar")
    if shrinks_ns is not None:
        size = f"{len(able)} of {policy.members} members"
        why = f"waiting for a replacement of {', '.join(away)}, before the group continues with {size}"
        return Wait(min(until_ns, shrinks_ns), why)
    return Wait(until_ns, f"waiting for {', '.join(away)}, or for a replacement")


def await_standby_for_swap(case: _Case) -> Wait | None:
    """Wait briefly for a standby if the group has stopped to replace a member that is cut off."""
    return cut_off_members.await_standby(case.view, placement.choose_members(case.view, case.policy))


def pause_before_retry(case: _Case) -> Wait | None:
    """Wait before another attempt to restore the same state."""
    cause, view = case.cause, case.view
    retry_s = VOLUME_RETRY_S if cause.signature == faults.VOLUME else RESTORE_RETRY_S
    retry_ns = view.memory.since_ns + int(retry_s * SECOND_NS)
    if not remedy.is_retry(view, cause, case.resumed) or view.now_ns >= retry_ns:
        return None
    return Wait(retry_ns, f"{cause.detail}: retrying soon")


def await_newer_state(case: _Case) -> Wait | None:
    """Wait for members that may hold a newer state. Waiting is cheaper than repeating steps."""
    view, policy, memory, resumed = case.view, case.policy, case.view.memory, case.resumed
    nothing = resumed.source == "none" and resume_point.has_saved_state(memory)
    if not nothing and not (
        reports.has_protected_state(view) and resumed.step + 1 < reports.furthest_step(view)
    ):
        return None
    ends_ns = dict(members.recoverable_members(view, policy, policy.member_timeout_s))
    if view.stored.error:
        ends_ns["storage"] = memory.since_ns + int(policy.member_timeout_s * SECOND_NS)
    hoped = {name: at_ns for name, at_ns in ends_ns.items() if at_ns > view.now_ns}
    if not hoped:
        return None
    until_ns = view.now_ns + int(members.next_timeout_s(view, policy, policy.member_timeout_s) * SECOND_NS)
    first = next(iter(hoped))
    why = f"step {resumed.step} is old, and {first} may have a newer state"
    return Wait(min(until_ns, *hoped.values()), why)


def await_stored_state(case: _Case) -> Wait | End | None:
    """If the group resumes from a checkpoint, wait for storage."""
    return _unread(case.view, case.policy, case.resumed)


def start_next_generation(case: _Case) -> Start | End:
    return remedy.start_generation(case.view, case.policy, case.cause, case.faults, case.resumed)


def _is_awaited(view: View, member: MemberView, policy: Policy) -> bool:
    """True if a member may hold state that the group needs, and has not reported this state as secured.

    This includes a disconnected member with ranks, because it will connect soon after a takeover.
    """
    if not member.connected and member.name not in view.memory.positions:
        return False
    secured = member.report is not None and member.report.secured_for >= view.memory.generation
    return not secured and not members.is_lost(view, member, policy)


# -- rules for `saving`, `stopping` and `ended`: see `closing`


def finish_at_once(case: _Case) -> End | None:
    """End a finished run without a last checkpoint if the user has requested an immediate stop."""
    memory = case.view.memory
    return closing.end_finished(case.view, "") if memory.stop == "now" and memory.finished else None


def save(case: _Case) -> Save | Wait | End:
    return closing.saving(case.view, case.policy)


def await_members_exit(case: _Case) -> Done | Wait:
    return closing.stopping(case.view, case.policy)


def await_nothing(case: _Case) -> Wait:
    return closing.ended(case.view, case.policy)


_RUNNING: tuple[DecisionRule, ...] = (
    stop_at_once,
    follow_unknown_generation,
    secure_after_faults,
    replace_cut_off_member,
    act_on_stall,
    warn_of_changed_file,
    end_without_processes,
    refuse_state_without_room,
    settle,
    finish,
    secure_before_stop,
    swap_departing_members,
    grow_group,
    warn_of_fixed_size,
    learn_from_stall,
    await_first_step,
    replace_lost_standby,
    await_next_event,
)
# The rules of each phase, the most urgent first. The last rule always returns an action.
RULES: Mapping[JobPhase, tuple[DecisionRule, ...]] = MappingProxyType(
    {
        "forming": (
            stop_at_once,
            follow_unknown_generation,
            stop_before_the_start,
            end_without_members,
            end_script_that_cannot_start,
            replace_lost_standby,
            refuse_to_start_over,
            await_first_members,
            await_first_state,
            start_first_generation,
        ),
        "running": _RUNNING,
        "looking": _RUNNING,  # only in journals from before 0.1.0; kept until 0.2.0
        "securing": (
            stop_at_once,
            follow_unknown_generation,
            await_secured_state,
            await_unheard_members,
            await_unheard_standbys,
            await_unfinished_work,
            finish_without_fault,
            save_without_fault,
            restart_unexplained,
            await_cause,
            end_where_no_restart_helps,
            save_after_fault,
            preserve,
            await_members,
            await_standby_for_swap,
            pause_before_retry,
            await_newer_state,
            await_stored_state,
            start_next_generation,
        ),
        "saving": (finish_at_once, stop_at_once, save),
        "stopping": (await_members_exit,),
        "ended": (await_nothing,),
    }
)
