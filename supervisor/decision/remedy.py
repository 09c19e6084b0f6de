"""Choose the cheapest remedy for a fault, or end the run if no restart can help. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from holdfast import exit_codes
from holdfast.inspection.victims import mismatch
from holdfast.protocol.launcher_messages import OUT_OF_MEMORY, Ending, LauncherState
from supervisor import wording
from supervisor.decision import refusal, resume_point
from supervisor.decision.membership import joining, placement
from supervisor.fault_kinds import kind_of
from supervisor.view import endings, failed_start, faults, interrupted_work, reports
from supervisor.view.model import (
    SECOND_NS,
    Checkpoint,
    End,
    Fault,
    InterruptedWork,
    PastFault,
    Policy,
    ResumePoint,
    Start,
    View,
)

_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError): ", re.MULTILINE)
_FROM_OUTSIDE = (9, 15)  # SIGKILL and SIGTERM
MAX_PROGRAM_ERRORS = 2  # a second occurrence shows that the first was no coincidence
PROGRAM_ERRORS = frozenset(  # exceptions that only a programming error can cause
    {"TypeError", "AttributeError", "NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError"}
)
MAX_WARM_FAILURES = 3  # consecutive processes that died before they joined
GIVE_UP_S = 60.0  # how long a run that has completed steps tries to create processes before it ends
WORKED_S = 60.0  # a generation that lived this long is considered to have worked, even without a step
VOLUME_TRIES = 3  # attempts to restore a state that does not fit on the memory volume


def startup_failure(view: View, trial: tuple[str, ...] = ()) -> End | None:
    """Return an `End` if the script exits or keeps failing before it joins; None otherwise.

    The members in `trial` have just joined a group that can continue without them: see `unstarted_member`.

    Ranks that are training continue even if no warm process can be created. In a run that has completed
    steps, the script has worked before, so the failure may be temporary: for example, a file that the script
    reads before it joins may be missing for a while. If a run that has completed steps needs processes, it
    therefore ends only after `GIVE_UP_S`.
    """
    forming = view.memory.phase == "forming"
    for member in view.members:
        launcher = member.report.launcher if member.report else None
        ending = launcher.warm_ending if launcher else None
        if launcher is None or ending is None or ending.ours or not member.exists or member.name in trial:
            continue
        code = ending.code if ending.code is not None else 128 + (ending.signal or 0)
        if ending.is_good and forming:
            return End(code, "the script ended before it joined", ending.message)
        for_good = ending.fail in ("system_exit", "bad_input") or _SYNTAX.search(ending.message)
        if for_good and forming:
            return _end(code, "the script cannot start", ending)
        if not needs_processes(view, launcher):
            continue
        tries = launcher.warm_tries if has_worked(view) else launcher.warm_failures
        over = not has_worked(view) or view.now_ns >= view.memory.since_ns + int(GIVE_UP_S * SECOND_NS)
        if tries >= MAX_WARM_FAILURES and over:
            why = f"the script failed {tries} times before it joined"
            return _end(code or 1, why, ending)
    return None


def unstarted_member(view: View, trial: tuple[str, ...]) -> Fault | None:
    """Return the fault of a member in `trial` whose script keeps failing before it joins; None for none."""
    for name in trial:
        member = view.member(name)
        launcher = member.report.launcher if member is not None and member.report is not None else None
        ending = launcher.warm_ending if launcher is not None else None
        if launcher is None or ending is None or ending.ours or not needs_processes(view, launcher):
            continue
        if launcher.warm_tries >= MAX_WARM_FAILURES:
            why = f"on member {name}, the script failed {launcher.warm_tries} times before it joined"
            last_words, rank = endings.last_words(ending), view.memory.positions[name] * view.memory.nproc
            detail, step = f"{why}: {last_words}" if last_words else why, reports.furthest_step(view)
            return Fault("crash", rank, name, step, view.now_ns, "not started", detail, ending.message)
    return None


def _end(code: int, why: str, ending: Ending) -> End:
    """Return an `End` for `why` and the process's last words.

    The words are included because events and job lists show no traceback. The output of the process is
    omitted if it contains nothing else.
    """
    last_words = endings.last_words(ending)
    output = "" if ending.fail == "bad_input" and ending.message.strip() == last_words else ending.message
    return End(code, f"{why}: {last_words}" if last_words else why, output)


def has_worked(view: View) -> bool:
    """True if the script can join: the run has completed steps or saved a state."""
    memory = view.memory
    if memory.phase == "forming":  # this is a new run, perhaps with another script
        return False
    return (
        memory.settled or resume_point.has_saved_state(memory) or any(past.worked for past in memory.history)
    )


def needs_processes(view: View, launcher: LauncherState) -> bool:
    """True if the group waits for the member of `launcher` to create processes."""
    if view.memory.phase == "running":
        return any(rank.pid == 0 and rank.state == "starting" for rank in launcher.ranks)
    return len(launcher.parked) < view.memory.nproc


def reason_to_stop(view: View, policy: Policy, cause: Fault) -> End | None:
    """Return an `End` if no restart can help, for example after a deliberate exit or a repeated failure.

    The failure of a member that has just joined a smaller group never ends this group.
    """
    if kind_of(cause.kind).is_planned or joining.failed(view, policy):
        return None
    history = view.memory.history
    code = _exit_code(cause)
    if cause.kind == "bad_input":
        return End(exit_codes.BAD_INPUT, cause.message or cause.detail, "", cause)
    if cause.kind == "exception" and _SYNTAX.search(cause.message):
        return End(code, cause.detail, cause.message, cause)  # a restart cannot correct a syntax error
    if cause.kind == "exit":
        return End(code, f"{cause.detail}: not restarted, because the script chose to exit", "", cause)
    if kind_of(cause.kind).is_bad_number and _is_repeated(view, cause) and not policy.skip_bad_batches:
        hint = "" if reports.script_keeps_own_state(view) else "; --skip-bad-batches would skip it"
        hint += ", --loss-jump 0 would ignore it" if cause.kind == "loss_jump" else ""
        return End(1, _batch_words(view, cause) + hint, "", cause)
    if cause.signature == faults.VOLUME and _refused_before(view) + 1 >= VOLUME_TRIES:
        why = f"{cause.detail}: tried {VOLUME_TRIES} times. The state itself is intact: free memory there"
        return End(1, f"{why} or enlarge the volume (docker run --shm-size), then resume the run", "", cause)
    same = _count_identical(view, cause)
    sure = cause.kind == "exception" or (cause.kind == "crash" and bool(mismatch(cause.message)))
    limit = policy.identical_failures if sure else policy.identical_crashes
    if _is_program_error(view, policy, cause):
        limit = min(limit, MAX_PROGRAM_ERRORS)
    if kind_of(cause.kind).may_be_a_bug and not cause.work and same + 1 >= limit:
        where = f"at {reports.name_step(view, cause.step)}" if cause.step >= 0 else "before the first step"
        why = f"{cause.detail}: the same failure {same + 1} times {where}; this is a bug, not a fault"
        return End(code, why, cause.message, cause)
    recent = [p for p in history if view.now_ns - p.at_ns < policy.restart_window_s * SECOND_NS]
    if len(recent) >= policy.max_restarts:
        hours = policy.restart_window_s / 3600
        reached = f"--max-restarts {policy.max_restarts} reached: {len(recent)} restarts in {hours:g} h"
        why = f"{reached}; {cause.detail}"
        return End(code, why, cause.message, cause)
    return None


def _is_program_error(view: View, policy: Policy, cause: Fault) -> bool:
    """True if the exception is an error in the program.

    This is assumed if it occurred before any step, or twice on all ranks.
    """
    if cause.kind != "exception" or endings.exception_in(cause.signature) not in PROGRAM_ERRORS:
        return False
    if not (made_progress(view, cause) or any(past.worked for past in view.memory.history)):
        return True
    last = view.memory.history[-1:]
    before = bool(last) and last[0].everywhere and _is_same(view, last[0], cause)
    return before and is_everywhere(view, policy, cause)


def is_everywhere(view: View, policy: Policy, cause: Fault) -> bool:
    """True if every rank of the group has the same fault at the same step."""
    same = (cause.kind, cause.signature, cause.step)
    found = faults.of_incident(view, policy)
    ranks = {each.rank for each in found if (each.kind, each.signature, each.step) == same}
    return len(ranks) == view.memory.world_size


def _exit_code(cause: Fault) -> int:
    return exit_codes.of_failed_process(cause.code, cause.signal)


def _refused_before(view: View) -> int:
    """Return how many consecutive restores before this one failed because the memory volume was full."""
    count = 0
    for past in reversed(view.memory.history):
        if past.signature != faults.VOLUME:
            break
        count += 1
    return count


def _count_identical(view: View, cause: Fault) -> int:
    """Return how often this failure has occurred at its step since the group last passed that step."""
    count = 0
    for past in reversed(view.memory.history):
        if past.step > cause.step:
            break
        count += _is_same(view, past, cause)
    return count


def _is_same(view: View, past: PastFault, cause: Fault) -> bool:
    if (past.kind, past.signature, past.step) != (cause.kind, cause.signature, cause.step):
        return False
    if cause.kind == "crash" and past.rank != cause.rank:
        return False
    # Other processes send these signals, so the script is to blame only if it never makes progress.
    outside = cause.signal in _FROM_OUTSIDE and cause.signature != OUT_OF_MEMORY
    return not outside or not (past.worked or made_progress(view, cause))


def made_progress(view: View, cause: Fault) -> bool:
    """True if the failed generation had completed a step or had lived for `WORKED_S`."""
    launch = view.memory.launch
    began = launch.restore.step if launch and launch.restore else 0
    return cause.step > began or cause.at_ns - view.memory.started_ns > WORKED_S * SECOND_NS


def _is_repeated(view: View, cause: Fault) -> bool:
    """True if the group has already been rolled back for a bad number at this step."""
    return any(kind_of(p.kind).is_bad_number and p.step == cause.step for p in view.memory.history)


def _batch_words(view: View, cause: Fault) -> str:
    where = f" (batch position {cause.position})" if cause.position >= 0 else ""
    step = reports.name_step(view, cause.step)
    return f"{step} of rank {cause.rank}{where} produces a bad number again: {cause.detail}"


def last_good_step(found: tuple[Fault, ...]) -> int | None:
    """Return the last step whose state precedes the first bad number; None if all states are good.

    A bad number is considered even if another fault stopped the group.
    """
    return min((fault.step for fault in found if kind_of(fault.kind).spoils_state), default=None)


def start_generation(
    view: View,
    policy: Policy,
    cause: Fault | None,
    found: tuple[Fault, ...],
    resumed: ResumePoint | None = None,
) -> Start | End:
    """Return the `Start` of the next generation from the newest usable state; an `End` if there is none.

    `found` contains all known faults, and `resumed` is the result of `next_resume_point` if it is known. The
    caller ensures that `placement.choose_members` finds enough members.
    """
    resumed = resumed or next_resume_point(view, policy, cause, found)
    changes = interrupted_work.lost_changes(view, resumed) if cause is not None else ()
    cuts = (*interrupted_work.find(view, found), *changes)
    end = (
        _unrepeatable(view, cause, found, interrupted_work.not_repeated(cuts, resumed.step))
        or _wrong_world_size(view, policy, resumed)
        or _no_state_left(view, policy, cause, found, resumed)
    )
    if end is not None:
        return end
    chosen = placement.choose_members(view, policy)
    moved = [name for name in chosen if name not in view.memory.positions]
    master_addr, master_port = _rendezvous(view, chosen[0])
    skip, skipped = _skipped(view, policy, cause, resumed)
    measure = _measure(view, policy, cause, resumed, moved) + _new_size(view, policy, chosen)
    return Start(
        placement=chosen,
        resume=resumed,
        skip=skip,
        master_addr=master_addr,
        master_port=master_port,
        cause=cause,
        remedy=_remedy(cause, bool(moved)),
        evidence=(
            *skipped,
            *_passed_over(view, cause, resumed),
            *_names_interrupted(cuts, resumed),
            *_not_equal(view, chosen),
        ),
        why=f"{_trigger(cause)}: {measure}",
        measure=measure,
        cut=cuts,
    )


def _unrepeatable(
    view: View, cause: Fault | None, found: tuple[Fault, ...], missed: tuple[InterruptedWork, ...]
) -> End | None:
    """Return an `End` if a restart would skip work that raised an exception; `missed` is the skipped work."""
    if cause is None:
        return None
    ranks = {each.rank for each in missed if each.raised}
    for fault in (*found, *failed_start.raised_before(view.memory)):
        if fault.kind == "exception" and fault.rank in ranks:
            why = f"{fault.detail} after step {fault.step}, and no earlier state is left"
            why += " from which to repeat it"
            return End(_exit_code(fault), why, fault.message, fault)
    return None


def _wrong_world_size(view: View, policy: Policy, resumed: ResumePoint) -> End | None:
    """Return an `End` if the group would resume from a checkpoint of a run with another world size.

    If the user allows other sizes, the ranks decide: they refuse the state unless the script allows it.
    """
    stored = resume_point.checkpoint_of(view, resumed)
    if stored is None or stored.world_size == view.memory.world_size:
        return None
    if policy.min_members and stored.world_size % view.memory.nproc == 0:
        return None
    there, here = stored.world_size, view.memory.world_size
    wrong = f"checkpoint {resumed.path} has world size {there}, but this run has {here}"
    return End(exit_codes.BAD_INPUT, f"{wrong}: resume with {there} ranks, or use another run directory")


def _no_state_left(
    view: View, policy: Policy, cause: Fault | None, found: tuple[Fault, ...], resumed: ResumePoint
) -> End | None:
    """Return an `End` if a group that has saved a state would begin at step 0 without the user's consent."""
    if resumed.source != "none" or (cause is None and policy.from_scratch):
        return None
    return refusal.no_state_left(view, cause, last_good_step(found))


def _rendezvous(view: View, member: str) -> tuple[str, int]:
    """Return the address and port of the rendezvous, which is on `member`, the member of rank 0."""
    master = view.member(member)
    assert master is not None
    assert master.report is not None
    assert master.report.launcher is not None
    return _host(master.report.peer_url), master.report.launcher.port


def _passed_over(view: View, cause: Fault | None, resumed: ResumePoint) -> tuple[str, ...]:
    """Return a line for the incident if the group passes over a state that was changed after its commit."""
    line = interrupted_work.describe_passed_over(view, resumed.step) if cause is not None else ""
    return (line,) if line else ()


def _names_interrupted(cuts: tuple[InterruptedWork, ...], resumed: ResumePoint) -> tuple[str, ...]:
    """Return one line for the incident about each piece of interrupted work whose duration is known."""
    missed = interrupted_work.not_repeated(cuts, resumed.step)
    return tuple(_name_interrupted(each, missed) for each in cuts if each.after_s)


def next_resume_point(
    view: View, policy: Policy, cause: Fault | None, found: tuple[Fault, ...]
) -> ResumePoint:
    """Return the resume point of the next generation, or of the first generation if `cause` is None."""
    if cause is None:
        return first_resume_point(view, policy)
    return resume_before(view, interrupted_work.find(view, found), last_good_step(found))


def resume_before(view: View, cuts: tuple[InterruptedWork, ...], bound: int | None) -> ResumePoint:
    """Return the newest resume point that makes the script repeat the interrupted work.

    If there is none, return the newest resume point at or before step `bound`.
    """
    limit, void = interrupted_work.latest_resume_step(cuts, bound), interrupted_work.void_states(view)
    if limit == bound and not void:
        return resume_point.newest(view, bound)
    resumed = resume_point.newest(view, limit, void)
    is_beginning = limit == 0 and not resume_point.has_saved_state(view.memory)
    return resumed if resumed.source != "none" or is_beginning else resume_point.newest(view, bound)


def _name_interrupted(each: InterruptedWork, missed: tuple[InterruptedWork, ...]) -> str:
    again = "is not repeated, because no earlier state is left" if each in missed else "is repeated"
    where = "in step {} before its commit" if each.early else "after the commit of step {}"
    return f"the work of rank {each.rank} {where.format(each.step)} ({each.after_s:.2f} s) {again}"


def first_resume_point(view: View, policy: Policy) -> ResumePoint:
    """Return the newest checkpoint, or the beginning if there is none or the user wants to start over."""
    return resume_point.FROM_THE_BEGINNING if policy.from_scratch else resume_point.newest(view, None)


def checkpoint_to_verify(view: View, policy: Policy) -> Checkpoint | None:
    """Return the checkpoint that must be read in full before it is used; None if there is none.

    This applies to only two checkpoints: the one that a run begins from, and the one that it resumes from
    after a failed restore. All others were compared while they were written. Members also verify what they
    restore.
    """
    memory = view.memory
    if memory.phase == "forming":
        found = resume_point.checkpoint_of(view, first_resume_point(view, policy))
    elif memory.phase == "securing" and memory.incident is not None:
        view = replace(view, memory=failed_start.without_failed_start(view))
        known = memory.incident.faults
        if not any(fault.kind == "restore" for fault in known):
            return None
        found = resume_point.checkpoint_of(view, next_resume_point(view, policy, known[0], known))
    else:
        return None
    return found if found is not None and not found.verified else None


def _skipped(
    view: View, policy: Policy, cause: Fault | None, resumed: ResumePoint
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the steps to skip from now on, and a line for the incident if the fault adds a step."""
    stored = resume_point.checkpoint_of(view, resumed)
    skip, line = view.memory.skip, ""
    is_bad = cause is not None and kind_of(cause.kind).is_bad_number
    if cause is not None and is_bad and _is_repeated(view, cause) and policy.skip_bad_batches:
        skip = tuple(sorted({*skip, cause.step}))
        line = f"{_batch_words(view, cause)}: step {cause.step} will be skipped"
    if stored is not None:
        skip = tuple(sorted({*skip, *stored.skip}))
    return skip, (line,) if line else ()


def is_retry(view: View, cause: Fault, resumed: ResumePoint) -> bool:
    """True if the group would restore the same state again, or if the memory volume had no room for it."""
    wanted = faults.restore_signature(resumed.source, resumed.generation, resumed.step)
    return cause.kind == "restore" and cause.signature in (wanted, faults.VOLUME)


def _remedy(cause: Fault | None, moved: bool) -> str:
    if cause is None:
        return "start"
    if kind_of(cause.kind).spoils_state:
        return "rollback"
    return "swap" if moved else "restart"


def _trigger(cause: Fault | None) -> str:
    return cause.detail if cause is not None else "all members are ready"


def _measure(view: View, policy: Policy, cause: Fault | None, resumed: ResumePoint, moved: list[str]) -> str:
    """Describe the remedy and the state that the group resumes from."""
    reason = "as requested" if cause is None and policy.from_scratch else "because nothing has been saved yet"
    beginning = f"from the beginning, {reason}"
    if reports.script_keeps_own_state(view):
        beginning = "from the script's first line, because it keeps its own state"
    stored = f"from the {wording.state_name(resumed.source)} of step {resumed.step}"
    state = stored if resumed.source != "none" else beginning
    if cause is None:
        return f"start {state}"
    if kind_of(cause.kind).spoils_state and not reports.script_keeps_own_state(view):
        return f"roll back and resume {state}"
    where = f"on {', '.join(moved)}" if moved else "in place"
    return f"restart the processes {where}, {state}"


def _new_size(view: View, policy: Policy, chosen: tuple[str, ...]) -> str:
    """Return the part of the measure about the group's size; "" if the group has its full size."""
    if len(chosen) >= policy.members and not view.memory.reduced_by:
        return ""
    failed = joining.failed(view, policy)
    without = f", without {', '.join(failed)}, which failed on joining" if failed else ""
    return f", with {len(chosen)} of {policy.members} members{without}"


def _not_equal(view: View, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line for the incident if the group continues with another number of ranks."""
    before, after = view.memory.world_size, len(chosen) * view.memory.nproc
    if before == after:
        return ()
    return (
        f"the world size changes from {before} to {after}: from here on, the weights are no longer bit-equal"
        " to those of an undisturbed run",
    )


def _host(url: str) -> str:
    return url.partition("://")[2].rpartition(":")[0] or "127.0.0.1"
