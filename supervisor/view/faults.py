"""Read the faults out of a view: who failed, how, and who is only a victim. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from holdfast.inspection import victims
from holdfast.inspection.victims import lost_peers, mismatch
from holdfast.protocol import foreign_text
from holdfast.protocol.launcher_messages import OUT_OF_MEMORY, BadNumber, Ending, RankState
from holdfast.protocol.member_messages import MemberReport, RankProgress
from supervisor.fault_kinds import DOUBTFUL, kind_of
from supervisor.view import members, replica_divergence, reports
from supervisor.view.model import Fault, MemberView, Policy, View

_MESSAGES_BYTES = 1 << 20  # of all faults of an incident: every decision about it is journaled with them
_MESSAGE_LEAST_BYTES = 256
_SAID_BYTES = 1000  # of a `sys.exit`, in one line

_NAMES = (  # signal(7), on x86 and ARM
    "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT"
    " STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS"
)
_SIGNALS = {number: f"SIG{name}" for number, name in enumerate(_NAMES.split(), 1)}


def find_faults(view: View, policy: Policy) -> tuple[Fault, ...]:
    """Return the faults of the present generation, in no order of guilt."""
    faults: list[Fault] = []
    deaf: list[Fault] = []
    for block, name in enumerate(view.memory.placement):
        member = view.member(name)
        if member is None or members.is_lost(view, member, policy):
            faults.append(_lost(view, block, name, member))
            continue
        if members.unresponsive_launcher(member):
            deaf.append(_deaf(view, block, member))
        if member.report is not None:
            faults += _of_report(view, block, name, member.report, policy)
    if faults and all(each.kind == "victim" for each in faults):
        faults += uneven_steps(view)
    differing = replica_divergence.find_divergence(view) if not faults else None
    if differing is not None:
        faults.append(differing)
    # To give up all who have the state would cost more than to wait for a fault that needs them.
    return with_bounded_messages((*faults, *deaf)) if faults or len(deaf) < len(view.memory.placement) else ()


def with_bounded_messages(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Return `faults` with messages that have a bounded sum: the cause's is whole, the others are cut evenly.

    Only those of many ranks on many members are: a member's launcher has bounded its own.
    """
    if sum(len(each.message) for each in faults) * 12 <= _MESSAGES_BYTES:
        return faults
    cause = root_cause(faults)
    most = foreign_text.share(_MESSAGES_BYTES, len(faults), _MESSAGE_LEAST_BYTES)
    return tuple(
        each if each is cause else replace(each, message=foreign_text.shortened(each.message, most))
        for each in faults
    )


def of_incident(view: View, policy: Policy) -> tuple[Fault, ...]:
    """Return what the incident knows of this generation, and what has shown itself since.

    A cause may come after its victims.
    """
    incident = view.memory.incident
    known = incident.faults if incident and incident.generation == view.memory.generation else ()
    later = tuple(f for f in find_faults(view, policy) if not _is_known(f, known))
    return with_bounded_messages((*known, *later))


def _is_known(fault: Fault, known: tuple[Fault, ...]) -> bool:
    return any((fault.rank, fault.kind) == (each.rank, each.kind) for each in known)


def first_silent_member(view: View) -> Fault | None:
    """Return the loss of the first member with ranks that does not speak, though it may come back."""
    for block, name in enumerate(view.memory.placement):
        member = view.member(name)
        if member is None or not members.is_reporting(member):
            return _lost(view, block, name, member)
    return None


def _lost(view: View, block: int, name: str, member: MemberView | None) -> Fault:
    gone = member is None or not member.exists
    why = "its processes are gone" if gone else "it has not been heard of"
    ranks = range(block * view.memory.nproc, (block + 1) * view.memory.nproc)
    silent_ns = int(member.silent_s * 1e9) if member is not None and not gone else 0
    listed = ", ".join(str(rank) for rank in ranks)
    return Fault(
        "member_lost",
        ranks[0],
        name,
        reports.furthest_step(view),
        view.now_ns - silent_ns,
        f"member {name}",
        f"member {name} with {'rank' if len(ranks) == 1 else 'ranks'} {listed} is lost: {why}",
    )


def _deaf(view: View, block: int, member: MemberView) -> Fault:
    """It begins now: its ranks have trained until now, and are given up with it."""
    gone = _lost(view, block, member.name, None)
    return replace(gone, detail=f"member {member.name} is lost: {members.unresponsive_launcher(member)}")


def _of_report(view: View, block: int, name: str, report: MemberReport, policy: Policy) -> list[Fault]:
    memory, launcher = view.memory, report.launcher
    faults: list[Fault] = []
    if launcher is not None:
        for rank in launcher.ranks:
            if rank.generation == memory.generation:
                faults += _of_rank(view, name, report, rank)
        if launcher.generation < memory.generation and memory.settled:
            faults.append(_forgotten(view, block, name))
        elif report.prepare_error and report.prepare_generation == memory.generation:
            other = report.prepare_occupied and (VOLUME if report.prepare_volume else OTHER_RESTORE)
            faults.append(_unprepared(view, name, report.prepare_error, other or ""))
        elif launcher.generation < memory.generation and _unready_s(view) > policy.form_s:
            faults.append(_unprepared(view, name, f"not ready after {policy.form_s:g} s"))
    return faults


def _unready_s(view: View) -> float:
    """Return for how long this supervisor, or the one before it, could have its start carried out."""
    return (view.now_ns - max(view.memory.started_ns, view.memory.since_ns)) / 1e9


def _forgotten(view: View, block: int, name: str) -> Fault:
    """All ranks have done a step: a launcher that knows nothing of it is another one."""
    gone = _lost(view, block, name, None)
    return replace(gone, detail=f"the ranks of member {name} are lost: its launcher was restarted")


def _unprepared(view: View, name: str, why: str, other: str = "") -> Fault:
    """`other` is the signature of a reason that says nothing against the state, where that is why."""
    launch = view.memory.launch
    wanted = launch.restore if launch and not other else None
    return Fault(
        "restore",
        -1,
        name,
        reports.furthest_step(view),
        view.now_ns,
        restore_signature(wanted.source, wanted.generation, wanted.step)
        if wanted
        else other or OTHER_RESTORE,
        f"member {name} cannot prepare the state: {why}",
    )


# What could not be restored for a reason that says nothing against the state: it is not given up for that.
OTHER_RESTORE = "restore"
VOLUME = "restore: the memory volume"  # that does not take it: tried again a few times, then the run ends


def restore_signature(source: str, generation: int, step: int) -> str:
    return f"restore of {source} {generation}/{step}"


def _bad(view: View, flag: BadNumber) -> str:
    if reports.script_keeps_own_state(view):  # its loss is not known
        return "a gradient that is not finite"
    if flag.kind != "jump" and math.isfinite(float(flag.loss)):
        return f"a gradient that is not finite, at a loss of {flag.loss},"
    return f"a loss of {flag.loss}" + (f" ({flag.why})" if flag.why else "")


def _of_rank(view: View, name: str, report: MemberReport, rank: RankState) -> list[Fault]:
    step = reports.step_of(report, rank.rank)
    faults: list[Fault] = []
    if rank.flag is not None:
        at = reports.name_step(view, rank.flag.step)
        kind = "loss_jump" if rank.flag.kind == "jump" else rank.flag.kind
        faults.append(
            Fault(
                kind,
                rank.rank,
                name,
                rank.flag.step,
                rank.flag.at_ns,
                f"{kind} at step {rank.flag.step}",
                f"rank {rank.rank} computed {_bad(view, rank.flag)} at {at}"
                + (f", batch position {rank.flag.position}" if rank.flag.position >= 0 else ""),
                position=rank.flag.position,
                value=rank.flag.loss,
            )
        )
    ending = rank.ending
    if ending is None or ending.ours or ending.is_good:
        return faults
    if ending.unwinding and rank.state != "exited":
        over = ending.overdue and reports.is_unwinding(report, rank)
        if not over or reports.pause_left_s(report, rank.rank) > 0:
            return faults
    as_exit = exit_of(name, rank.rank, ending)
    kind = _kind(as_exit)
    said = lost_peers(ending.message) if kind == "victim" else describe_ending(ending)
    faults.append(
        Fault(
            kind,
            rank.rank,
            name,
            step,
            ending.failed_ns or ending.at_ns,
            signature(as_exit),
            f"rank {rank.rank} {said}",
            ending.message,
            ending.code,
            ending.signal,
            doubtful=ending.doubtful,
        )
    )
    return faults


def exit_of(member: str, rank: int, ending: Ending) -> Exit:
    return Exit(
        rank,
        member,
        ending.at_ns,
        ending.code,
        ending.signal,
        ending.fail,
        ending.failed_ns,
        ending.message,
    )


def _kind(ended: Exit) -> str:
    if is_victim(ended):
        return "victim"
    if ended.signal is None and ended.fail_kind == "system_exit":
        return "exit"
    if ended.signal is None and ended.fail_kind in ("bad_input", "exception"):
        return ended.fail_kind
    return "crash"


def describe_ending(ending: Ending) -> str:
    """Say how a process ended: "raised ValueError: no", "was killed by SIGSEGV"."""
    if ending.signal is not None:
        named = _SIGNALS.get(ending.signal, f"signal {ending.signal}")
        why = f": {ending.message.splitlines()[0]}" if is_out_of_memory(ending.message) else ""
        differs = mismatch(ending.message) if ending.signal == SIGABRT else ""
        why = why or (f": {differs}" if differs else "")
        return f"was killed by {named}{why}"
    if ending.fail == "system_exit":
        said = foreign_text.shortened(ending.message, _SAID_BYTES)
        return f"exited with code {ending.code}" + (f" ({said})" if said else "")
    if ending.fail in ("exception", "distributed", "bad_input", "numeric"):
        last = ending.message.strip().splitlines()[-1:] or ["an exception"]
        return f"raised {ending.raised or last[0][:200]}"
    return f"exited with code {ending.code}"


def root_cause(faults: tuple[Fault, ...]) -> Fault:
    """Return the fault that explains the others: causes before their symptoms, then the earliest."""
    return min(faults, key=lambda each: (_precedence(each), each.at_ns, each.rank))


def _precedence(fault: Fault) -> int:
    return DOUBTFUL if fault.doubtful else kind_of(fault.kind).precedence


# Which exit is the root cause? Pure.
#
# When one rank dies the others fail within milliseconds, in the collective that it never joined.
# Their tracebacks are long and say nothing. So a rank that failed in a collective is blamed only if
# no rank failed in any other way.


SYSTEM_EXIT, DISTRIBUTED = "system_exit", "distributed"

SIGABRT = 6  # how C++ ends when an exception leaves a thread

_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)?(?:[ |+-]*\| )?", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?::\s|:?$)", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_TAIL = 20_000  # characters of a message that are looked at


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one rank. Times are of one clock, the supervisor's."""

    rank: int
    member: str
    at_ns: int
    code: int | None
    signal: int | None  # never one that we sent: those exits are not evidence
    fail_kind: str = ""  # "", exception, system_exit, distributed, bad_input, numeric
    failed_ns: int = 0  # when the rank said that it fails; 0: it did not
    message: str = ""  # the traceback or the tail of stderr


def blame(exits: tuple[Exit, ...]) -> Exit:
    """Return the exit that caused the others. Raises `ValueError` without any."""
    if not exits:
        raise ValueError("no exits: nobody can be blamed")
    return min(exits, key=lambda each: (_exit_class(each), each.failed_ns or each.at_ns, each.rank))


def is_victim(exit_: Exit) -> bool:
    """Say whether this rank failed because another one did: as it said itself, else by the end of its log."""
    if exit_.signal not in (None, SIGABRT) or exit_.fail_kind:
        return exit_.fail_kind == DISTRIBUTED
    return victims.in_log(exit_.message)


def signature(exit_: Exit) -> str:
    """Return what is equal when the same failure happens again: no pids, times or addresses."""
    if exit_.signal is not None:
        return OUT_OF_MEMORY if is_out_of_memory(exit_.message) else f"signal {exit_.signal}"
    if exit_.fail_kind == SYSTEM_EXIT:
        return f"{SYSTEM_EXIT} {exit_.code}"
    kind = exit_.fail_kind or "exit"
    text = _last_traceback(exit_.message)
    frames = list(_FRAME.finditer(text))
    if not frames:  # then what looks like an exception's name may be any line of a log
        return f"{kind} {exit_.code}"
    raised = _RAISED.search(text, frames[-1].end())
    name = raised["name"] if raised is not None else "unknown"
    return f"{kind} {name} at {frames[-1]['file']}:{frames[-1]['line']}"


def is_out_of_memory(message: str) -> bool:
    """Say whether the kernel's own word, put in front of a log's end by the launcher, is that."""
    return message.startswith(f"{OUT_OF_MEMORY}: ")


def _exit_class(exit_: Exit) -> int:
    if exit_.code == 0 and exit_.signal is None and exit_.fail_kind in ("", SYSTEM_EXIT):
        return 2  # a rank that finished
    return 1 if is_victim(exit_) else 0


def _last_traceback(message: str) -> str:
    """Return the last traceback without the prefixes that torch and exception groups add."""
    text = _PREFIX.sub("", message[-_TAIL:])
    start = text.rfind(_TRACEBACK)
    return text if start < 0 else text[start + len(_TRACEBACK) :]


# Ranks that did not do the same number of steps: the cause of what their peers say about connections. Pure.
#
# A rank that has ended with 0 is no fault, and whoever still needs it fails in a collective. Then what it did
# last tells why: it had finished its loop, or left in the middle of a step.


LEFT = "exit 0"  # the signature of a rank that ended well in the middle of its loop
_STEPS = frozenset({"data", "forward", "backward", "optimizer"})


def uneven_steps(view: View) -> tuple[Fault, ...]:
    """Return the fault of the first rank that ended well while another was in a step that needs it."""
    launch = view.memory.launch
    began = launch.restore.step if launch is not None and launch.restore is not None else -1
    left: list[tuple[str, RankState, RankProgress]] = []
    in_step: list[RankProgress] = []
    failed: list[int] = []
    for report in reports.reports(view):
        assert report.launcher is not None
        at = {each.rank: each for each in report.progress}
        for rank in report.launcher.ranks:
            here = at.get(rank.rank)
            if rank.generation != view.memory.generation or here is None or not report.launcher.joins:
                continue
            ending = rank.ending
            if rank.state == "exited" and ending is not None and ending.is_good:
                left.append((report.member, rank, here))
            elif _in_step(here, began):
                in_step.append(here)
            if ending is not None and ending.fail == "distributed" and here.step == began:
                failed.append(rank.rank)
    for member, rank, here in sorted(left, key=lambda each: each[1].rank):
        assert rank.ending is not None
        common = (rank.rank, member, here.step, rank.ending.at_ns)
        if _in_step(here, began):
            what = f"rank {rank.rank} exited with code 0 in the middle of its loop, after step {here.step}"
            return (Fault("crash", *common, LEFT, what, code=1),)
        waits = next((other for other in in_step if other.step >= here.step > began), None)
        if waits is not None:
            what = (
                f"rank {rank.rank} left its loop at step {here.step} while rank {waits.rank} wants step "
                f"{waits.step + 1}: all ranks must do the same number of steps"
            )
            return (Fault("bad_input", *common, "uneven steps", what, what, 2),)
        if failed and here.step == began:  # in a step, or in what comes after the loop: that is not known
            what = (
                f"rank {rank.rank} exited with code 0 at step {here.step} while rank {failed[0]} waited"
                " for it in a collective"
            )
            return (Fault("crash", *common, LEFT, what, code=1),)
    return ()


def _in_step(at: RankProgress, began: int) -> bool:
    """True for a rank that was in a step when it was last seen.

    An exception there ends the loop as well, and its page says idle. So does that of a rank which had nothing
    to do in this generation, that began with `began` steps.
    """
    return at.phase in _STEPS or (at.phase == "idle" and at.tail_s == 0 and at.step > began)
