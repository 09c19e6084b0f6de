"""Find the faults in a view: which ranks and members failed, how they failed, and which are only victims.

Pure.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.inspection.victims import lost_peers
from holdfast.protocol import foreign_text
from holdfast.protocol.launcher_messages import JUMP, BadNumber, RankState
from holdfast.protocol.member_messages import MemberReport
from supervisor.fault_kinds import DOUBTFUL, kind_of
from supervisor.identity_cache import by_identity
from supervisor.view import endings, members, replica_divergence, reports, uneven_steps
from supervisor.view.model import Fault, MemberView, Policy, View

# Limit for the total size of an incident's fault messages, which each journal line about it contains.
_MESSAGES_BYTES = 1 << 20
_MIN_MESSAGE_BYTES = 256

# Signatures of restores that failed for a reason that casts no doubt on the state. The state stays usable.
OTHER_RESTORE = "restore"
VOLUME = "restore: the memory volume"  # the volume was full; the run ends after a few more attempts


@by_identity(1)
def find_faults(view: View, policy: Policy) -> tuple[Fault, ...]:
    """Return the faults of the current generation, in no particular order."""
    faults: list[Fault] = []
    unresponsive: list[Fault] = []
    for position, name in enumerate(view.memory.placement):
        member = view.member(name)
        if member is None or members.is_lost(view, member, policy):
            faults.append(_lost(view, position, name, member))
            continue
        if members.unresponsive_launcher(member):
            unresponsive.append(_unresponsive(view, position, member))
        if member.report is not None:
            faults += _of_report(view, position, name, member.report, policy)
    if faults and all(each.kind == "victim" for each in faults):
        faults += uneven_steps.find_uneven_steps(view)
    differing = replica_divergence.find_divergence(view) if not faults else None
    if differing is not None:
        faults.append(differing)
    # If no launcher responds, replacing all members would lose the state. It costs less to wait until
    # another fault forces a restart.
    return (
        with_bounded_messages((*faults, *unresponsive))
        if faults or len(unresponsive) < len(view.memory.placement)
        else ()
    )


def with_bounded_messages(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Return `faults` with messages of bounded total size. The message of the cause is never shortened.

    Each launcher already bounds the messages of its own ranks, so this affects only faults of many ranks on
    many members.
    """
    if sum(len(each.message) for each in faults) * 12 <= _MESSAGES_BYTES:
        return faults
    cause = root_cause(faults)
    most = foreign_text.share(_MESSAGES_BYTES, len(faults), _MIN_MESSAGE_BYTES)
    return tuple(
        each if each is cause else replace(each, message=foreign_text.shortened(each.message, most))
        for each in faults
    )


def of_incident(view: View, policy: Policy) -> tuple[Fault, ...]:
    """Return all faults of this generation: those in the open incident, and those found since it opened.

    The cause of a failure can appear after its victims.
    """
    incident = view.memory.incident
    known = incident.faults if incident and incident.generation == view.memory.generation else ()
    recorded = {(each.rank, each.kind) for each in known}
    later = tuple(each for each in find_faults(view, policy) if (each.rank, each.kind) not in recorded)
    return with_bounded_messages((*known, *later))


def first_silent_member(view: View) -> Fault | None:
    """Return the loss of the first silent member with ranks, even if the member may come back."""
    for position, name in enumerate(view.memory.placement):
        member = view.member(name)
        if member is None or not members.is_reporting(member):
            return _lost(view, position, name, member)
    return None


def _lost(view: View, position: int, name: str, member: MemberView | None) -> Fault:
    gone = member is None or not member.exists
    why = "its processes are gone" if gone else "it has stopped reporting"
    # A new leader starts to measure the silence of its members later.
    awaited_s = member.awaited_s if member is not None and member.silent_s <= 0 else 0.0
    if not gone and awaited_s:
        why = f"it has not reported to the new supervisor within {awaited_s:.1f} s"
    if member is not None and members.has_lost_host(view, member):
        why = f"it has stopped reporting, and its host has not answered for {member.unanswered_s:.1f} s"
    ranks = range(position * view.memory.nproc, (position + 1) * view.memory.nproc)
    silent_ns = int((awaited_s or member.silent_s) * 1e9) if member is not None and not gone else 0
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


def _unresponsive(view: View, position: int, member: MemberView) -> Fault:
    """Return the loss of a member whose launcher does not respond.

    The fault begins now, because the ranks have trained until now and are ended together with the member.
    """
    gone = _lost(view, position, member.name, None)
    return replace(gone, detail=f"member {member.name} is lost: {members.unresponsive_launcher(member)}")


def _of_report(view: View, position: int, name: str, report: MemberReport, policy: Policy) -> list[Fault]:
    memory, launcher = view.memory, report.launcher
    faults: list[Fault] = []
    if launcher is not None:
        for rank in launcher.ranks:
            if rank.generation == memory.generation:
                faults += _of_rank(view, name, report, rank)
        if launcher.generation < memory.generation and memory.settled:
            faults.append(_restarted(view, position, name))
        elif report.prepare_error and report.prepare_generation == memory.generation:
            other = report.prepare_occupied and (VOLUME if report.prepare_volume else OTHER_RESTORE)
            faults.append(_unprepared(view, name, report.prepare_error, other or ""))
        elif launcher.generation < memory.generation and _is_unready(view, report, policy.form_s):
            faults.append(_unprepared(view, name, f"not ready after {policy.form_s:g} s"))
    return faults


def _is_unready(view: View, report: MemberReport, limit_s: float) -> bool:
    """True if a member has had `limit_s` to carry out the newest start and is not reading a checkpoint.

    The time runs from the start, or from this supervisor's takeover if a predecessor ordered the start. While
    a member reads a checkpoint, the time restarts with each part that arrives, because storage may be slow.
    """
    unready_s = (view.now_ns - max(view.memory.started_ns, view.memory.since_ns)) / 1e9
    return unready_s > limit_s and not 0 <= report.reading_s <= limit_s


def _restarted(view: View, position: int, name: str) -> Fault:
    """Return the loss of a member whose launcher was restarted.

    The member's ranks have completed a step in this generation, so a launcher that does not know the
    generation must be a new process.
    """
    gone = _lost(view, position, name, None)
    return replace(gone, detail=f"the ranks of member {name} are lost: its launcher was restarted")


def _unprepared(view: View, name: str, why: str, other: str = "") -> Fault:
    """Return the fault of a member that cannot prepare the state.

    If the cause casts no doubt on the state, `other` is its signature; otherwise, `other` is "".
    """
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


def restore_signature(source: str, generation: int, step: int) -> str:
    """Return the signature of a failure to restore this state."""
    return f"restore of {source} {generation}/{step}"


def _describe_number(view: View, flag: BadNumber) -> str:
    if reports.script_keeps_own_state(view):  # such a script does not report its loss
        return "a gradient that is not finite"
    if flag.kind != JUMP and reports.finite(flag.loss) is not None:
        return f"a gradient that is not finite, with a loss of {flag.loss},"
    return f"a loss of {flag.loss}" + (f" ({flag.why})" if flag.why else "")


def _of_rank(view: View, name: str, report: MemberReport, rank: RankState) -> list[Fault]:
    step = reports.step_of(report, rank.rank)
    faults: list[Fault] = []
    if rank.flag is not None:
        at = reports.name_step(view, rank.flag.step)
        bad = "loss_jump" if rank.flag.kind == JUMP else rank.flag.kind
        faults.append(
            Fault(
                bad,
                rank.rank,
                name,
                rank.flag.step,
                rank.flag.at_ns,
                f"{bad} at step {rank.flag.step}",
                f"rank {rank.rank} computed {_describe_number(view, rank.flag)} at {at}"
                + (f", batch position {rank.flag.position}" if rank.flag.position >= 0 else ""),
                position=rank.flag.position,
                value=rank.flag.loss,
            )
        )
    ending = rank.ending
    if ending is None or ending.ours or ending.is_good:
        return faults
    if ending.unwinding and rank.state != "exited":
        is_fault = ending.overdue and reports.is_unwinding(report, rank)
        if not is_fault or reports.pause_left_s(report, rank.rank) > 0:
            return faults
    kind = endings.kind_of_fault(ending)
    words = lost_peers(ending.message) if kind == "victim" else endings.describe(ending)
    faults.append(
        Fault(
            kind,
            rank.rank,
            name,
            step,
            ending.failed_ns or ending.at_ns,
            endings.signature(ending),
            f"rank {rank.rank} {words}",
            ending.message,
            ending.code,
            ending.signal,
            doubtful=ending.doubtful,
        )
    )
    return faults


def root_cause(faults: tuple[Fault, ...]) -> Fault:
    """Return the fault that explains the others.

    Causes precede symptoms. Among equal faults, the earliest wins.
    """
    return min(faults, key=lambda each: (_precedence(each), each.at_ns, each.rank))


def explanation(view: View, found: tuple[Fault, ...]) -> Fault:
    """Return the fault that explains the others.

    If only victims are known and a member is silent, this is the loss of that member.
    """
    cause = root_cause(found)
    if is_only_victim(cause):
        return first_silent_member(view) or cause
    return cause


def is_only_victim(cause: Fault) -> bool:
    """True if the fault is only the effect of another, unknown fault."""
    return cause.kind == "victim" or cause.doubtful


def _precedence(fault: Fault) -> int:
    return DOUBTFUL if fault.doubtful else kind_of(fault.kind).precedence
