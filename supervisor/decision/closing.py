"""Decide how a run ends: its last checkpoint, its exit code, and the sentence that reports it. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast import exit_codes
from holdfast.protocol.launcher_messages import UNFLUSHED, FirstSignal, stop_delays_s
from holdfast.protocol.member_messages import CheckpointReport, RankProgress
from holdfast.protocol.progress import Phase, name_of
from supervisor import wording
from supervisor.decision import remedy, resume_point
from supervisor.view import failed_start, interrupted_work, members, reports, uneven_steps
from supervisor.view.model import (
    SECOND_NS,
    UNREAD,
    Completion,
    Done,
    End,
    Fault,
    InterruptedWork,
    JobState,
    MemberView,
    Policy,
    ResumePoint,
    Save,
    View,
    Wait,
)

CONFIRM_S = 10.0  # limit for a scan of the checkpoints on storage
# Once the run has finished, a silent member has only this fraction of `Policy.member_timeout_s` to report.
_QUIET = 0.6
_DONE = name_of(Phase.DONE)
IDLE_S = 60.0  # the time until the next decision if there is no deadline
_SLACK_S = 10.0  # the keeper kills members that are still running this long after their grace period
MAX_SAVE_TRIES = 3  # how often the last checkpoint is ordered again, if members keep failing
_NAMED = 3  # how many members a sentence lists by name
_AS_REQUESTED = "stopped as requested"  # `why` of a completed stop
_STOPPED = "stopped"  # `why` of a stop whose checkpoint is missing


def finished(view: View, policy: Policy) -> Save | Wait | End:
    """Return the next action for a run whose ranks have all finished.

    The run first writes its last state to storage, so a second run of the same command has nothing left to
    do. The exit code is 0 only if all of the script's work was completed.
    """
    missed = view.memory.missed
    if not missed:
        last = _last_checkpoint(view, policy)
        return end_finished(view, last) if isinstance(last, str) else last
    known = next((each.incident for each in missed if each.incident), 0)
    where = f" (see holdfast explain {known})" if known else " by a stop"
    return _finish(exit_codes.CUT_SHORT, Completion(notes=(f"{interrupted_work.describe(missed)}{where}",)))


def end_finished(view: View, unsaved: str) -> End:
    """Return the `End` of a run that has finished.

    `unsaved` says why the last state is not on storage. It is "" if the state is on storage, or if the user
    does not need to know.
    """
    code, unflushed = _unflushed(view)
    missing = ""
    if unsaved:
        missing = f"no checkpoint of step {_last_step(view)} could be written: {unsaved}{_newest(view)}"
    notes = tuple(note for note in (_exit_in_loop(view.memory), unflushed) if note)
    return _finish(code, Completion(missing, notes))


def _finish(code: int, completion: Completion) -> End:
    sentence = wording.finish(completion.missing, completion.notes)
    return End(code, sentence, warning=completion.missing, completion=completion)


def _newest(view: View) -> str:
    """Return a clause that names the newest checkpoint; "" if storage cannot be read."""
    if view.stored.error:
        return ""
    stored = resume_point.newest_checkpoint(view)
    return "; there is no other" if stored is None else f"; the newest is from step {stored.step}"


def _last_step(view: View) -> int:
    """Return the last step that the script has completed."""
    return max(
        (each.step for report in reports.reports(view) for each in reports.progress(view, report)),
        default=view.memory.save_step,
    )


def _unflushed(view: View) -> tuple[int, str]:
    """Return a rank's exit code and a note if it could not write all of its output; 0 and "" otherwise."""
    for rank in reports.ranks(view):
        ending = rank.ending
        if ending is not None and ending.fail == UNFLUSHED:
            return ending.code or 0, f"rank {rank.rank} could not write all of its output: {ending.message}"
    return 0, ""


def _exit_in_loop(memory: JobState) -> str:
    """Return a note about the first rank that was restarted because it alone left its loop; "" for none."""
    past = next((each for each in memory.history if each.signature == uneven_steps.EXITED_IN_LOOP), None)
    if past is None:
        return ""
    what = f"rank {past.rank} alone left its loop at step {past.step} and was restarted"
    return f"{what}; all ranks must leave the loop"


def _last_checkpoint(view: View, policy: Policy) -> Save | Wait | str:
    """Return the action that saves the script's last state, or the reason why it cannot be saved.

    The reason is "" if the state is already stored or the user wants no checkpoints. Every rank must have
    reported that its state has not changed since the last commit (`progress.Phase.DONE`). Because the run has
    finished, a silent member gets less time to report than `Policy.member_timeout_s`.
    """
    if policy.checkpoint_every_s <= 0 or not reports.has_protected_state(view):
        return ""
    step = _last_step(view)
    read_ns = view.stored.failed_ns + int(CONFIRM_S * SECOND_NS)
    unread = view.stored.error == UNREAD and not view.stored.looked_ns
    if unread and view.now_ns < read_ns:  # this supervisor has just taken over
        return Wait(read_ns, "looking for checkpoints on storage")
    stored = resume_point.newest_checkpoint(view)
    if (stored is not None and stored.step >= step) or failed_start.is_from_scratch(view.memory, step):
        return ""
    if why := _unkept(view):
        return why if step > 0 else ""
    if view.stored.error:
        return f"storage: {'it does not respond' if view.stored.error == UNREAD else view.stored.error}"
    found = resume_point.newest(view, None, interrupted_work.void_states(view))
    if found.source == "slot" and found.step == step:
        why = f"{wording.FINISHED}: saving a checkpoint of the last step"
        return Save(found.holders[0], found, why, finished=True)
    patience_s = max((_QUIET * policy.member_timeout_s - each.silent_s for each in _quiet(view)), default=0.0)
    if patience_s > 0:
        return Wait(view.now_ns + int(patience_s * SECOND_NS), "waiting for a member to report")
    return resume_point.missing_private_state(view, step) or "no member holds a usable snapshot of it"


def _unkept(view: View) -> str:
    """Return why the last state cannot be saved, according to the ranks' final reports; "" if it can."""
    ranks: dict[int, RankProgress] = {}
    reasons: dict[int, str] = {}
    for report in reports.reports(view):
        ranks |= {each.rank: each for each in reports.progress(view, report)}
        reasons |= {
            each.rank: each.left for each in (report.launcher.ranks if report.launcher else ()) if each.left
        }
    unfinished = [n for n in range(view.memory.world_size) if n not in ranks or ranks[n].phase != _DONE]
    for number in unfinished:
        if number in reasons:
            return reasons[number]
    if unfinished:
        return (
            f"rank {unfinished[0]} ended without a report (for example through os._exit()) or inside its loop"
        )
    steps = sorted({each.step for each in ranks.values()})
    return "" if len(steps) == 1 else f"the ranks ended at different steps, {steps[0]} and {steps[-1]}"


def _quiet(view: View) -> tuple[MemberView, ...]:
    """Return the existing members with ranks that do not report."""
    return tuple(
        each
        for each in view.members
        if each.name in view.memory.positions and each.exists and not members.is_reporting(each)
    )


# -- the last sentence of a run


def is_finish(end: End) -> bool:
    """True if the script ran to its end, even if some of its work was cut short."""
    return end.exit_code == 0 or end.completion is not None


def completion_of(memory: JobState) -> Completion | None:
    """Return the parts of a run's last sentence if the script has finished; None for any other end.

    The journal contains only the whole sentence. If the supervisor that decided the end has since died, its
    successor does not know the parts, so the result is None unless the sentence has only one part.
    """
    completion = memory.completion or (Completion() if memory.why == wording.FINISHED else None)
    if completion is None:
        return None
    cut_short = (interrupted_work.describe(memory.missed),) if _names_missed(memory) else ()
    return replace(
        completion, notes=(*completion.notes, *cut_short), incidents=memory.incidents - memory.before
    )


def summary(memory: JobState) -> str:
    """Return a sentence that states how the run ended, its incidents, and what work a stop interrupted."""
    completion = completion_of(memory)
    if completion is not None:
        return wording.finish(completion.missing, completion.notes, completion.incidents)
    missed = f"; {interrupted_work.describe(memory.missed)}" if _names_missed(memory) else ""
    incidents = memory.incidents - memory.before
    return f"{memory.why}{missed}" + (f" ({wording.count(incidents, 'incident')})" if incidents else "")


def _names_missed(memory: JobState) -> bool:
    """True if the last sentence must mention the interrupted work, because `why` does not."""
    return bool(memory.missed) and (memory.exit_code == exit_codes.INTERRUPTED or memory.end is not None)


# -- requested stops, and other ends


def save_and_end(view: View, found: tuple[Fault, ...], *, has_storage: bool = True) -> Save | Wait | End:
    """Return the action that writes the secured state to storage, or an `End` if storage already has it.

    Without storage, the run ends at once, and its last sentence says where the state was.

    If the stop interrupts work after a commit, the saved state precedes that work. The next run then repeats
    the work, as it would after a fault. The run's last sentence mentions a checkpoint only if a scan that
    began after the request to stop found it on storage.
    """
    memory = view.memory
    resumed, cuts = _last_state(view, found)
    if failed_start.is_from_scratch(memory, resumed.step):
        return _stop(memory, _AS_REQUESTED, ", before the first step", ())
    if not has_storage and not reports.script_keeps_own_state(view):
        return _stop(memory, _AS_REQUESTED, _without_storage(resumed), cuts)
    if resumed.source == "slot":
        why = "stop requested: saving a checkpoint of the secured state"
        return Save(resumed.holders[0], resumed, why, cuts)
    deadline = memory.since_ns + int(CONFIRM_S * SECOND_NS)
    is_unseen = view.stored.error or view.stored.looked_ns < memory.since_ns
    if is_unseen and view.now_ns < deadline:
        return Wait(deadline, "looking for checkpoints on storage")
    if is_unseen:
        why = view.stored.error or "it does not respond"
        return _stop(memory, _AS_REQUESTED, f", without a new checkpoint; storage: {why}", cuts)
    if resumed.source == "checkpoint":
        newest = f"; the newest checkpoint is from step {resumed.step}"
        return _stop(memory, _AS_REQUESTED, newest, cuts, resumed.step)
    if reports.script_keeps_own_state(view):
        return _stop(memory, _AS_REQUESTED, "; the script keeps its own state", cuts)
    return _stop(memory, _AS_REQUESTED, "; no member holds a state to save", cuts)


def _last_state(view: View, found: tuple[Fault, ...]) -> tuple[ResumePoint, tuple[InterruptedWork, ...]]:
    """Return the newest state from which the next run repeats all interrupted work, and that work."""
    cuts = interrupted_work.find(view, found)
    resumed = remedy.resume_before(view, cuts, remedy.last_good_step(found))
    return resumed, (*cuts, *interrupted_work.lost_changes(view, resumed))


def end_after_fault(view: View, policy: Policy, found: tuple[Fault, ...], end: End) -> Save | Wait | End:
    """Return the action that saves the newest good state before the run ends with `end`, or `end` itself.

    The members hold this state only in memory, which is lost with the run. It is saved only if it is newer
    than all checkpoints, so it never replaces or voids one. A supervisor that has just taken over therefore
    reads storage first, if storage responds. The state is good as far as `found` shows: it precedes the first
    bad number, and it makes the next run repeat the step in which the script failed.
    """
    if reports.script_keeps_own_state(view):
        return end
    read_ns = view.memory.since_ns + int(CONFIRM_S * SECOND_NS)
    unread = policy.has_storage and view.stored.error == UNREAD and not view.stored.looked_ns
    if unread and view.now_ns < read_ns:  # this supervisor has just taken over
        return Wait(read_ns, "looking for checkpoints on storage")
    view = replace(view, memory=replace(view.memory, end=end))
    resumed, cuts = _last_state(view, found)
    stored = resume_point.newest_checkpoint(view)
    kept = max(0, stored.step) if stored is not None else 0
    if resumed.source != "slot" or resumed.step <= kept:
        return replace(end, why=end.why + _nothing_newer(view, found, kept))
    if not policy.has_storage:
        return replace(end, why=f"{end.why}; {_without_storage(resumed).lstrip(', ')}")
    if failed_start.keeps_states_aside(view.memory) and (view.stored.checkpoints or view.stored.error):
        kept_why = "to keep the checkpoints from before this run, which began from scratch"
        return replace(end, why=f"{end.why}; the state of step {resumed.step} was not saved, {kept_why}")
    why = f"{end.why}: saving a checkpoint of the secured state"
    return Save(resumed.holders[0], resumed, why, cuts, end=end)


def _nothing_newer(view: View, found: tuple[Fault, ...], kept: int) -> str:
    """Return a clause that says why steps after `kept` are lost; "" if none are known to be lost."""
    held = max((each.step for report in reports.reports(view) for each in report.slots), default=0)
    if max(reports.furthest_step(view), held) <= kept:
        return ""
    bound = remedy.last_good_step(found)
    why = resume_point.missing_private_state(view, held) if bound is None and held > kept else ""
    lost = f"; no state after step {kept} could be saved" if kept else "; no state could be saved"
    return lost + (f": {why}" if why else "")


def _without_storage(resumed: ResumePoint) -> str:
    """Return a clause about the state of a job that has no storage for checkpoints."""
    none = ", without a checkpoint: the job has no storage for checkpoints"
    if resumed.source != "slot":
        return f"{none}, and no member holds a state"
    return f"{none}, so the state of step {resumed.step} is only in its pods' memory and is lost with them"


def first_signal(view: View, action: End) -> FirstSignal:
    """Return the signal that the launchers send to their ranks before SIGTERM; "" for none.

    A script that never joins may save its state when it is interrupted. After Ctrl-C it receives SIGINT, as
    in a terminal. After `holdfast stop` it receives a signal that it handles. See `LauncherOrder`.
    """
    if action.exit_code != exit_codes.INTERRUPTED or not reports.script_keeps_own_state(view):
        return ""
    first: dict[str, FirstSignal] = {"interrupt": "interrupt", "graceful": "handled"}
    return first.get(view.memory.stop, "")


def _stop(
    memory: JobState,
    reason: str,
    saved: str,
    cuts: tuple[InterruptedWork, ...],
    stored: int | None = None,
    note: str = "",
) -> End:
    """Return the `End` of a run that the user has stopped, or that ends because of `JobState.end`.

    The sentence `End.why` consists of a reason, `saved` (which says what is on storage) and `note`. If the
    user has stopped the run, the reason is `reason`. Otherwise, `JobState.end` contains the reason and the
    exit code.

    `stored` is the step of a valid checkpoint on storage, or None. If this checkpoint precedes interrupted
    work, the next run resumes from it to repeat the work, and must not use any later state.
    """
    again = tuple(each for each in cuts if stored is not None and stored <= each.at_most)
    back = None
    if again:
        back = stored
    named = interrupted_work.outside_of_steps(again)
    if named:
        where, side = interrupted_work.list_places(named, 1), interrupted_work.side_of_commit(named)
        saved += f"; it precedes the interrupted work {side} a commit ({where}), which will be repeated"
    end = memory.end or End(exit_codes.INTERRUPTED, reason)
    return replace(end, why=f"{end.why}{saved}{note}", cut=cuts, back=back)


# -- rules for the last phases


def saving(view: View, policy: Policy) -> Save | Wait | End:
    """Return the next action in the phase `saving`."""
    memory = view.memory
    member = view.member(memory.save_member)
    durable = member.report.durable if member and member.report else None
    if durable is not None and durable.asked >= memory.save:
        if durable.error and memory.finished:
            return end_finished(view, durable.error)
        if durable.error:
            return _unsaved(memory, f"; the last checkpoint failed: {durable.error}", durable.error)
        confirm = _confirm_finished if memory.finished else _confirm_stopped
        return confirm(view, durable, _moved_ns(view, member) + int(policy.save_s * SECOND_NS))
    is_lost = member is None or members.is_lost(view, member, policy)
    begun_ns = _moved_ns(view, member) if not _is_back_late(view, policy) else memory.since_ns
    deadline = begun_ns + int(policy.save_s * SECOND_NS)
    if not is_lost and view.now_ns < deadline:
        return Wait(min(deadline, view.now_ns + int(policy.member_timeout_s * SECOND_NS)), "saving")
    why = f"member {memory.save_member} is lost" if is_lost else _why_late(view, policy)
    if (another := _another(view, policy, why)) is not None:
        return another
    if is_lost and _may_hold_it(view, policy):
        until_ns = view.now_ns + int(
            members.next_timeout_s(view, policy, policy.member_timeout_s) * SECOND_NS
        )
        return Wait(until_ns, f"member {memory.save_member} is lost: waiting for the others' reports")
    if memory.finished:
        return end_finished(view, why)
    return _unsaved(memory, f" without its last checkpoint: {why}", why)


def _is_back_late(view: View, policy: Policy) -> bool:
    """True if the saving member reported again when its time to save the state was already over.

    Its sidecar may have been replaced, and the new one writes the checkpoint from the beginning. If each
    write counted as progress, a sidecar that dies again and again would keep the run from ending.
    """
    member = view.member(view.memory.save_member)
    return member is not None and member.back_ns > view.memory.since_ns + int(policy.save_s * SECOND_NS)


def _has_begun(view: View) -> bool:
    """True if the saving member has begun to carry out the request, as far as this supervisor knows.

    If the member's first report to this supervisor followed the request, then the request may be older than
    `JobState.since_ns`, because a new supervisor starts all time limits again.
    """
    member, since_ns = view.member(view.memory.save_member), view.memory.since_ns
    if member is None or member.report is None or member.report.unmoved_s < 0:
        return False
    return _moved_ns(view, member) > since_ns or member.heard_ns >= since_ns


def _why_late(view: View, policy: Policy) -> str:
    """Return why the state is not saved although the time for it is over."""
    name = view.memory.save_member
    if _is_back_late(view, policy):
        return f"member {name} stopped reporting while it saved"
    if not _has_begun(view):
        return f"member {name} did not begin to save it for {policy.save_s:g} s"
    return f"storage accepted no more data for {policy.save_s:g} s"


def _unsaved(memory: JobState, clause: str, why: str) -> End:
    """Return the `End` of a run whose last state could not be saved. `clause` follows "stopped"."""
    if memory.end is not None:
        clause = f"; the state of step {memory.save_step} could not be saved: {why}"
    return _stop(memory, _STOPPED, clause, memory.cut)


def _may_hold_it(view: View, policy: Policy) -> bool:
    """True while a silent member may still report that it holds the state.

    On a busy machine, the only other holder may send no report for longer than `members.QUIET_S`. If the
    saving member is lost during that time, only this wait makes a last checkpoint possible.
    """
    quiet = (each for each in _quiet(view) if each.name != view.memory.save_member)
    return any(not members.is_lost(view, each, policy) for each in quiet)


def _moved_ns(view: View, member: MemberView | None) -> int:
    """Return the time at which storage last accepted a part of the last checkpoint, or the write began.

    If the member has not begun, return the time of the request for the checkpoint.
    """
    report = member.report if member is not None else None
    if member is None or report is None or report.unmoved_s < 0:
        return view.memory.since_ns
    return max(view.memory.since_ns, view.now_ns - int((report.unmoved_s + member.silent_s) * SECOND_NS))


def _another(view: View, policy: Policy, why: str) -> Save | None:
    """Return the action that orders a holder of the state to save it after `why`; None if none should.

    After a request to stop, an older state is enough if no newer one is left, because the next run repeats
    the steps. A finished run needs the state of its last step.
    """
    memory = view.memory
    if memory.save_tries >= MAX_SAVE_TRIES:
        return None
    found = resume_point.newest(view, memory.save_step, interrupted_work.void_states(view))
    holders = [name for name in found.holders if _may_save(view, policy, name)]
    if found.source != "slot" or not holders or (memory.finished and found.step != memory.save_step):
        return None
    # A member whose connection was only interrupted is still writing, so it is asked first, but only once.
    again = memory.save_member in holders and not memory.save_tries
    left = memory.save_member if again else min(holders, key=memory.save_member.__eq__)
    why = f"{why}: member {left} saves the checkpoint of step {found.step}"
    return Save(left, found, why, memory.cut, memory.finished)


def _may_save(view: View, policy: Policy, name: str) -> bool:
    """True if it helps to order the member `name` to save the state that the saving member has not saved."""
    saver = view.member(view.memory.save_member)
    if saver is None or members.is_lost(view, saver, policy):
        return name != view.memory.save_member
    if _is_back_late(view, policy):
        return True
    if not _has_begun(view):
        return name != saver.name
    # Storage that does not respond to one node may respond to another. It is tried only once more, because it
    # usually responds to none.
    other = view.member(name)
    if not policy.members_created_externally or view.memory.save_tries or other is None:
        return False
    nodes = {each.report.node if each.report is not None else "" for each in (saver, other)}
    return len(nodes) == 2


def _confirm_stopped(view: View, durable: CheckpointReport, deadline: int) -> Wait | End:
    """Return the `End` of a stopped run, or wait for the scan that shows whether its checkpoint exists."""
    memory, stored = view.memory, view.stored
    named = f"checkpoint of step {durable.step}"
    if stored.heard >= memory.save and not stored.error:
        if resume_point.has_checkpoint(view, durable.generation, durable.step):
            passed = interrupted_work.describe_passed_over(view, durable.step)
            note = f"; {passed}" if passed else ""
            saved = (
                f", with a {named}"
                if memory.end is None
                else f"; the state of step {durable.step} is saved as a checkpoint"
            )
            return _stop(memory, _AS_REQUESTED, saved, memory.cut, durable.step, note)
        return _stop(memory, _STOPPED, f"; the {named} was written but is no longer on storage", memory.cut)
    if view.now_ns < deadline:
        return Wait(deadline, f"checking whether the {named} is on storage")
    why = stored.error or "it does not respond"
    saved = f"; the {named} was written, but storage could not be read: {why}"
    return _stop(memory, _STOPPED, saved, memory.cut)


def _confirm_finished(view: View, durable: CheckpointReport, deadline: int) -> Wait | End:
    """Return the `End` of a finished run, or wait for the scan that shows whether its checkpoint exists."""
    memory, stored = view.memory, view.stored
    is_read = stored.heard >= memory.save and not stored.error
    if is_read and resume_point.has_checkpoint(view, durable.generation, durable.step):
        return end_finished(view, "")
    if is_read:
        return end_finished(view, "it was written but is no longer on storage")
    if view.now_ns < deadline:
        return Wait(deadline, "checking whether the last checkpoint is on storage")
    return end_finished(view, stored.error or "it was written, but storage does not respond")


def stopping(view: View, policy: Policy) -> Done | Wait:
    """Return the next action in the phase `stopping`."""
    there = unended(view, policy)
    if not there:
        return Done("no member is left")
    _, kill_s = stop_delays_s(policy.grace_s, view.memory.first)
    deadline = view.memory.since_ns + int((kill_s + _SLACK_S) * SECOND_NS)
    if view.now_ns >= deadline:
        # On a cluster, nothing kills a member that does not stop. Unless a user asked for the stop, the
        # owner's next pods must not wait for a pod that may be on a lost node.
        if policy.members_created_externally and view.memory.stop in ("graceful", "now"):
            return Wait(view.now_ns + int(IDLE_S * SECOND_NS), unended_in_words(there))
        return Done(f"{len(there)} members did not stop before the deadline")
    return Wait(deadline, f"{len(there)} members are stopping")


def unended(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members that were ordered to end and have not ended.

    The keeper of a local run kills a member whose launcher does not respond. On a cluster, no process does
    this, and a member that is considered lost may still be running. The owner's next pods are not included,
    because they do not belong to the run.
    """
    if not policy.members_created_externally:
        return tuple(m.name for m in view.members if m.exists and not members.unresponsive_launcher(m))
    ordered = {*view.memory.placement, *view.memory.bystanders}
    return tuple(m.name for m in view.members if (m.exists or m.is_listed) and m.name in ordered)


def unended_in_words(names: tuple[str, ...]) -> str:
    """Return a clause about members that were ordered to end and have not ended."""
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    were, have = ("was", "has") if len(names) == 1 else ("were", "have")
    return f"{wording.count(len(names), 'member')} that {were} ordered to end {have} not ended: {named}"


def ended(view: View, policy: Policy) -> Wait:
    """Return the next action in the phase `ended`: always a `Wait`."""
    return Wait(view.now_ns + int(IDLE_S * SECOND_NS), "ended")
