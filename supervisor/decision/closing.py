"""The way out of a run: its last checkpoint, and the end of its members. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from holdfast.protocol.launcher_messages import UNFLUSHED
from holdfast.protocol.member_messages import CheckpointReport, RankProgress
from holdfast.protocol.progress import Phase, name_of
from supervisor.decision import remedy, resume_point
from supervisor.view import cut_off_work, failed_start, members, reports, uneven_steps
from supervisor.view.model import (
    UNREAD,
    Action,
    CutOffWork,
    Done,
    End,
    Fault,
    JobState,
    MemberView,
    Policy,
    Save,
    View,
    Wait,
)

EXIT_INTERRUPTED = 130
EXIT_CUT_SHORT = 3  # the script finished, and not all that it did after its commits was done
FINISHED = "all ranks have finished"
_QUIET = 0.6  # of the silence after which a member counts as lost
_DONE = name_of(Phase.DONE)
_S = 1_000_000_000
_IDLE_S = 60.0
CONFIRM_S = 10.0  # that storage may take to say what it holds
_STOPPED = re.compile(r"^stopped(, as asked)?")
_SLACK_S = 10.0  # beyond the members' own grace, before they are left to whoever keeps them


def finished(view: View, policy: Policy) -> Save | Wait | End:
    """End a run whose ranks have all finished, with 0 only if nothing of the script's work is missing.

    First have its last state written to storage, so that the same command, given again, has nothing to do.
    """
    missed = view.memory.missed
    if not missed:
        last = _last(view, policy)
        return end_without_checkpoint(view, last) if isinstance(last, str) else last
    known = next((each.incident for each in missed if each.incident), 0)
    where = f" (see holdfast explain {known})" if known else " by a stop"
    return End(EXIT_CUT_SHORT, f"{FINISHED}; {cut_off_work.describe(missed)}{where}")


def is_finish(end: End) -> bool:
    """True when the script was done, and not stopped or given up, though not all of its work may be there."""
    return end.exit_code == 0 or end.why.startswith(FINISHED)


def end_without_checkpoint(view: View, why: str) -> End:
    """End a run that has finished; `why` its last state is not on storage, "" where that needs no word."""
    code, unflushed = _unflushed(view)
    rest = f"{_left(view.memory)}{unflushed}"
    if not why:
        return End(code, f"{FINISHED}{rest}")
    missing = f"no checkpoint of step {_reached(view)} could be written: {why}{_newest(view)}"
    return End(code, f"{FINISHED}, but {missing}{rest}", warning=missing)


def _newest(view: View) -> str:
    """Name the newest checkpoint, where it is known what storage holds."""
    if view.stored.error:
        return ""
    stored = resume_point.newest_checkpoint(view)
    return "; there is no other" if stored is None else f"; the newest is of step {stored.step}"


def _reached(view: View) -> int:
    """Return the step with which the script has ended."""
    return max(
        (each.step for report in reports.reports(view) for each in reports.progress(view, report)),
        default=view.memory.save_step,
    )


def _unflushed(view: View) -> tuple[int, str]:
    """Return the code of a rank that could not write all of its output, and which it was; 0 for none."""
    for rank in reports.ranks(view):
        ending = rank.ending
        if ending is not None and ending.fail == UNFLUSHED:
            return ending.code or 0, f"; rank {rank.rank} could not write all of its output: {ending.message}"
    return 0, ""


def _last(view: View, policy: Policy) -> Save | Wait | str:
    """Return the order to save the state that the script ended with, or why there is no checkpoint of it.

    That is "" where it is stored, or where none is wanted. All ranks must have said that nothing has changed
    it since (`progress.Phase.DONE`). A member that has said nothing for a moment is waited for, but not until
    it would count as lost: the run has finished.
    """
    if policy.checkpoint_every_s <= 0 or not reports.has_protected_state(view):
        return ""
    step = _reached(view)
    read_ns = view.stored.failed_ns + int(CONFIRM_S * _S)
    if view.stored.error == UNREAD and view.now_ns < read_ns:  # by a supervisor that has just taken over
        return Wait(read_ns, "looking what is on storage")
    stored = resume_point.newest_checkpoint(view)
    if (stored is not None and stored.step >= step) or failed_start.is_from_scratch(view.memory, step):
        return ""
    if why := _unkept(view):
        return why if step > 0 else ""
    if view.stored.error:
        return f"storage: {'it does not answer' if view.stored.error == UNREAD else view.stored.error}"
    found = resume_point.newest(view, None, cut_off_work.void_states(view))
    if found.source == "slot" and found.step == step:
        return Save(found.holders[0], found, f"{FINISHED}: a checkpoint of the last step", finished=True)
    left_s = max((_QUIET * policy.member_timeout_s - each.silent_s for each in _quiet(view)), default=0.0)
    if left_s > 0:
        return Wait(view.now_ns + int(left_s * _S), "a member says nothing")
    return (
        resume_point.missing_private_state(view, step) or "no member holds a snapshot of it that can be used"
    )


def _unkept(view: View) -> str:
    """Return why not all ranks have said that their last state is kept, "" when they have."""
    ranks: dict[int, RankProgress] = {}
    told: dict[int, str] = {}
    for report in reports.reports(view):
        ranks |= {each.rank: each for each in reports.progress(view, report)}
        told |= {
            each.rank: each.left for each in (report.launcher.ranks if report.launcher else ()) if each.left
        }
    silent = [n for n in range(view.memory.world_size) if n not in ranks or ranks[n].phase != _DONE]
    for number in silent:
        if number in told:
            return told[number]
    if silent:
        return f"rank {silent[0]} ended without a word, as by os._exit(), or within its loop"
    steps = sorted({each.step for each in ranks.values()})
    return "" if len(steps) == 1 else f"the ranks ended with different steps, {steps[0]} and {steps[-1]}"


def _quiet(view: View) -> tuple[MemberView, ...]:
    """Return the members with ranks that do not speak, though they are there."""
    return tuple(
        each
        for each in view.members
        if each.name in view.memory.placement and each.exists and not members.is_reporting(each)
    )


def _left(memory: JobState) -> str:
    """Name the first rank that left its loop by itself, and was restarted; "" if none did."""
    left = next((each for each in memory.history if each.signature == uneven_steps.EXITED_IN_LOOP), None)
    if left is None:
        return ""
    said = f"rank {left.rank} left its loop by itself at step {left.step}, and was restarted"
    return f"; {said}: all ranks must leave"


def summary(memory: JobState) -> str:
    """Say how the run ended, how many incidents it had, and what a stop has cut short."""
    if memory.missed and (memory.exit_code == EXIT_INTERRUPTED or memory.end is not None):
        memory = replace(memory, why=f"{memory.why}; {cut_off_work.describe(memory.missed)}", missed=())
    count = memory.incidents - memory.before
    said = "1 incident" if count == 1 else f"{count} incidents"
    if not count:
        return memory.why
    if memory.why.startswith(FINISHED):
        return f"{FINISHED} after {said}{memory.why.removeprefix(FINISHED)}"
    return f"{memory.why} ({said})"


def save_and_end(view: View, found: tuple[Fault, ...]) -> Action:
    """Have what is secured written to storage before the end, if it is not there.

    Where the stop cuts off work after a commit, that is a state from before it, as for a restart: the next
    run does it again. A checkpoint is named only if storage was seen to hold it since the end was asked for.
    """
    return _for_its_reason(view.memory, _save_and_end(view, found))


def _for_its_reason(memory: JobState, action: Action) -> Action:
    """Return `action` with the reason and the code of an end that nobody has asked for (`JobState.end`)."""
    if memory.end is None or not isinstance(action, End):
        return action
    saved = _STOPPED.sub("", action.why, count=1)
    return replace(memory.end, why=f"{memory.end.why}{saved}", cut=action.cut, back=action.back)


def _save_and_end(view: View, found: tuple[Fault, ...]) -> Action:
    cuts = cut_off_work.find(view, found)
    resumed = remedy.resume_before(view, cuts, remedy.last_good_step(found))
    cuts = (*cuts, *cut_off_work.lost_changes(view, resumed))
    if failed_start.is_from_scratch(view.memory, resumed.step):
        return End(EXIT_INTERRUPTED, "stopped, as asked, before the first step")
    if resumed.source == "slot":
        return Save(resumed.holders[0], resumed, "stop asked: a checkpoint of what is secured", cuts)
    deadline = view.memory.since_ns + int(CONFIRM_S * _S)
    asked = view.stored.error or view.stored.looked_ns < view.memory.since_ns
    if asked and view.now_ns < deadline:
        return Wait(deadline, "looking what is on storage")
    if asked:
        why = view.stored.error or "it does not answer"
        return _interrupted(f"stopped, as asked, without a new checkpoint; storage: {why}", cuts)
    if resumed.source == "checkpoint":
        why = f"stopped, as asked; the newest checkpoint has step {resumed.step}"
        return _interrupted(why, cuts, resumed.step)
    if reports.script_keeps_own_state(view):
        return _interrupted("stopped, as asked; the script keeps its own state", cuts)
    return _interrupted("stopped, as asked; no member holds a state to save", cuts)


def first_signal(view: View, action: End) -> str:
    """Return how ranks are asked to end before they get SIGTERM (`LauncherOrder`), "" for not at all.

    A script that does not join saves what it likes when it is interrupted, as its author does at a terminal:
    by Ctrl-C it gets SIGINT. A command stops it by the signal that it has a handler for.
    """
    if action.exit_code != EXIT_INTERRUPTED or not reports.script_keeps_own_state(view):
        return ""
    return {"interrupt": "interrupt", "graceful": "handled"}.get(view.memory.stop, "")


def _interrupted(why: str, cuts: tuple[CutOffWork, ...], stored: int | None = None) -> End:
    """End a run that was asked to stop. `stored`: a checkpoint of that step is on storage, and not void.

    Only what that comes before is done again by the next run; then what is beyond it must not be used.
    """
    again = tuple(each for each in cuts if stored is not None and stored <= each.at_most)
    if not again:
        return End(EXIT_INTERRUPTED, why, cut=cuts)
    named, side = cut_off_work.list_places(again, 1), cut_off_work.side_of_commit(again)
    why = f"{why}, from before the work {side} commit that was cut off ({named}): it is done again"
    return End(EXIT_INTERRUPTED, why, cut=cuts, back=stored)


def saving(view: View, policy: Policy) -> Action:
    """Rule for the phase `saving`."""
    return _for_its_reason(view.memory, _saving(view, policy))


def _saving(view: View, policy: Policy) -> Action:
    memory = view.memory
    member = view.member(memory.save_member)
    durable = member.report.durable if member and member.report else None
    deadline = _moved_ns(view, member) + int(policy.save_s * _S)
    if durable is not None and durable.asked >= memory.save:
        if durable.error and memory.finished:
            return end_without_checkpoint(view, durable.error)
        if durable.error:
            return _interrupted(f"stopped; the last checkpoint failed: {durable.error}", memory.cut)
        return _confirmed(view, durable, deadline)
    lost = member is None or members.is_lost(view, member, policy)
    if lost and (another := _another(view)) is not None:
        return another
    if lost and _may_hold_it(view, policy):
        until_ns = view.now_ns + int(members.next_timeout_s(view, policy, policy.member_timeout_s) * _S)
        return Wait(until_ns, f"member {memory.save_member} is lost: waiting for the others to be heard")
    if lost or view.now_ns >= deadline:
        late = f"storage took nothing of it for {policy.save_s:g} s"
        why = f"member {memory.save_member} is lost" if lost else late
        if memory.finished:
            return end_without_checkpoint(view, why)
        return _interrupted(f"stopped without its last checkpoint: {why}", memory.cut)
    return Wait(min(deadline, view.now_ns + int(policy.member_timeout_s * _S)), "saving")


def _may_hold_it(view: View, policy: Policy) -> bool:
    """True while a member that does not report now may still report that it holds the state.

    A busy machine can keep the only other holder from reporting for longer than `members.QUIET_S`: without
    this wait, the loss of the member that saves would cost the last checkpoint at that very moment.
    """
    quiet = (each for each in _quiet(view) if each.name != view.memory.save_member)
    return any(not members.is_lost(view, each, policy) for each in quiet)


def _moved_ns(view: View, member: MemberView | None) -> int:
    """Return when the last checkpoint was asked for, or, if later, when storage last took some of it."""
    report = member.report if member is not None else None
    if member is None or report is None or report.unmoved_s < 0:
        return view.memory.since_ns
    return max(view.memory.since_ns, view.now_ns - int((report.unmoved_s + member.silent_s) * _S))


def _another(view: View) -> Save | None:
    """Have another member that holds the state save it; None where none is left.

    For a stop an older state will do if that is what is left: what it lacks is done again by the next run.
    """
    memory = view.memory
    found = resume_point.newest(view, memory.save_step, cut_off_work.void_states(view))
    holders = tuple(name for name in found.holders if name != memory.save_member)
    if found.source != "slot" or not holders or (memory.finished and found.step != memory.save_step):
        return None
    why = f"member {memory.save_member} is lost: a checkpoint of step {found.step} by member {holders[0]}"
    return Save(holders[0], found, why, memory.cut, memory.finished)


def _confirmed(view: View, durable: CheckpointReport, deadline: int) -> Action:
    """End with the name of a checkpoint that storage was seen to hold after it had been written."""
    memory = view.memory
    named, stored = f"checkpoint of step {durable.step}", view.stored
    if memory.finished:
        return _seen(view, durable, deadline)
    if stored.heard >= memory.save and not stored.error:
        if resume_point.has_checkpoint(view, durable.generation, durable.step):
            passed = cut_off_work.describe_passed_over(view, durable.step)
            end = _interrupted(f"stopped, as asked, with a {named}", memory.cut, durable.step)
            return replace(end, why=f"{end.why}; {passed}") if passed else end
        why = f"stopped; the {named} was written, and is not on storage any more"
        return _interrupted(why, memory.cut)
    if view.now_ns < deadline:
        return Wait(deadline, f"looking whether the {named} is on storage")
    why = stored.error or "it does not answer"
    why = f"stopped; the {named} was written, but storage could not be read: {why}"
    return _interrupted(why, memory.cut)


def _seen(view: View, durable: CheckpointReport, deadline: int) -> Action:
    """End a run that has finished, once storage was seen to hold its last state."""
    memory, stored = view.memory, view.stored
    known = stored.heard >= memory.save and not stored.error
    if known and resume_point.has_checkpoint(view, durable.generation, durable.step):
        return end_without_checkpoint(view, "")
    if known:
        return end_without_checkpoint(view, "it was written, and is not on storage any more")
    if view.now_ns < deadline:
        return Wait(deadline, "looking whether the last checkpoint is on storage")
    return end_without_checkpoint(view, stored.error or "it was written, and storage does not answer")


def stopping(view: View, policy: Policy) -> Action:
    """Rule for the phase `stopping`."""
    left = [m for m in view.members if m.exists and not members.unresponsive_launcher(m)]
    if not left:
        return Done("no member is left")
    grace_s = policy.grace_s * (2 if view.memory.first else 1)
    deadline = view.memory.since_ns + int((grace_s + _SLACK_S) * _S)
    if view.now_ns >= deadline:
        return Done(f"{len(left)} members did not stop in time")
    return Wait(deadline, f"{len(left)} members are stopping")


def ended(view: View, policy: Policy) -> Action:
    """Rule for the phase `ended`."""
    return Wait(view.now_ns + int(_IDLE_S * _S), "ended")
