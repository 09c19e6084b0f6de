"""What to do next about one job. Pure: no clock, network, log line or randomness below.

The supervisor observes, calls `decide`, writes view and action into the journal, and carries the action
out; so any incident can be decided again from its line. The first rule that applies wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from supervisor import faults as symptoms
from supervisor import remedy, suspect
from supervisor.view import (
    Action,
    Done,
    End,
    Fault,
    Look,
    MemberView,
    Policy,
    Replace,
    Save,
    Secure,
    Settle,
    View,
    Wait,
)

_S = 1_000_000_000
IDLE_S = 60.0  # nothing has a deadline: look again then all the same
EXIT_INTERRUPTED = 130


def decide(view: View, policy: Policy) -> Action:
    """Return the next action for the job."""
    rule = _RULES[view.memory.phase]
    return rule(view, policy)


# -- forming: the first generation, or the one after a supervisor lost track


def _forming(view: View, policy: Policy) -> Action:
    if view.memory.stop:
        return End(EXIT_INTERRUPTED, "stopped before the first step")
    ended = remedy.before_joining(view)
    if ended is not None:
        return ended
    lost = _lost_standby(view, policy)
    if lost is not None:
        return lost
    ready = [m for m in view.members if is_ready(m, view.memory.nproc)]
    if len(ready) < policy.members:
        deadline = view.memory.since_ns + int(policy.form_s * _S)
        if view.now_ns >= deadline:
            return End(1, f"only {len(ready)} of {policy.members} members became ready")
        return Wait(deadline, f"{len(ready)} of {policy.members} members are ready")
    return remedy.start(view, policy, None)


def is_ready(member: MemberView, nproc: int) -> bool:
    """True when every rank of the member could start at once."""
    launcher = member.report.launcher if member.report else None
    if not member.exists or not member.connected or launcher is None:
        return False
    return launcher.strategy == "cold" or len(launcher.parked) >= nproc


# -- running


def _running(view: View, policy: Policy) -> Action:
    memory = view.memory
    found = symptoms.found(view, policy)
    if memory.stop == "now":
        return End(EXIT_INTERRUPTED, "stopped at once, as asked")
    causes = tuple(fault for fault in found if fault.kind != "hang")
    if causes:
        return _secure(view, causes, policy)
    if found:
        return Look(found, found[0].detail)
    ended = remedy.before_joining(view)
    if ended is not None:
        return ended
    if _finished(view):
        return End(0, "all ranks have finished")
    if memory.stop:
        return Secure((), True, "stop asked: securing the state first")
    first_ns = None if memory.settled else _first_step(view)
    if first_ns is not None:
        return Settle(first_ns, f"generation {memory.generation} has done its first step")
    lost = _lost_standby(view, policy)
    if lost is not None:
        return lost
    return Wait(view.now_ns + int(_next_silence_s(view, policy) * _S))


def _secure(view: View, found: tuple[Fault, ...], policy: Policy) -> Action:
    """A bad number spoils the survivors' state as well; every other fault leaves it whole."""
    bad = any(fault.kind in remedy.NUMERIC for fault in found)
    return Secure(found, not bad, symptoms.root(found).detail)


def _finished(view: View) -> bool:
    ranks = [
        rank
        for member in view.members
        if member.report is not None and member.report.launcher is not None
        for rank in member.report.launcher.ranks
        if rank.generation == view.memory.generation
    ]
    done = [rank for rank in ranks if rank.state == "exited"]
    return len(done) == view.memory.world_size


def _first_step(view: View) -> int | None:
    marks = [
        rank.marks.first_step_ns
        for member in view.members
        if member.report is not None and member.report.launcher is not None
        for rank in member.report.launcher.ranks
        if rank.generation == view.memory.generation
    ]
    if len(marks) < view.memory.world_size or not all(marks):
        return None
    return max(marks)


def _next_silence_s(view: View, policy: Policy) -> float:
    """Return when a member that is silent now will count as lost."""
    silent = [m.silent_s for m in view.members if m.exists and not m.connected]
    return max(0.01, policy.member_timeout_s - max(silent)) if silent else IDLE_S


def _lost_standby(view: View, policy: Policy) -> Action | None:
    """Ask for a new member for one that is lost, so that there is a standby again."""
    for member in view.members:
        if member.name in view.memory.placement and view.memory.phase != "forming":
            continue
        if symptoms.is_lost(member, policy) and member.name not in view.memory.lost:
            return Replace(member.name, f"member {member.name} is lost: another takes its place")
    return None


# -- looking: evidence about a hang is being gathered


def _looking(view: View, policy: Policy) -> Action:
    memory = view.memory
    assert memory.incident is not None
    found = symptoms.found(view, policy)
    causes = tuple(fault for fault in found if fault.kind != "hang")
    if causes:  # the hang was the first sign of something plainer
        return _secure(view, causes, policy)
    looked = [
        m.report is not None and m.report.looked_for == memory.generation
        for m in view.members
        if m.name in memory.placement and m.connected
    ]
    deadline = memory.since_ns + int(policy.look_s * _S)
    if not all(looked) and view.now_ns < deadline:
        return Wait(deadline, "gathering stacks")
    return Secure((_hung(view, memory.incident.faults),), True, "evidence of the hang is gathered")


def _hung(view: View, found: tuple[Fault, ...]) -> Fault:
    """Name the rank that holds up the others."""
    seen = symptoms.evidence(view)
    first = min(found, key=lambda fault: (fault.step, fault.rank))
    if not seen:
        return first
    named = suspect.name_hung(seen)
    where = next((f for f in found if f.rank == named.rank), first)
    member = _member_of(view, named.rank)
    return Fault(
        "hang",
        named.rank,
        member,
        where.step,
        where.at_ns,
        f"hang of rank {named.rank}",
        f"rank {named.rank} hangs: {named.why}",
    )


def _member_of(view: View, rank: int) -> str:
    return view.memory.placement[rank // view.memory.nproc]


# -- securing: the survivors' state is being copied


def _securing(view: View, policy: Policy) -> Action:
    memory = view.memory
    deadline = memory.since_ns + int(policy.secure_s * _S)
    waiting = [
        m.name
        for m in view.members
        if (m.connected or m.name in memory.placement)  # a new supervisor hears of them in a moment
        and not symptoms.is_lost(m, policy)
        and not _has_secured(view, m)
    ]
    if waiting and view.now_ns < deadline:
        return Wait(deadline, f"securing on {', '.join(waiting)}")
    if memory.stop == "now":
        return End(EXIT_INTERRUPTED, "stopped at once, as asked")
    found = _all_faults(view, policy)
    if memory.stop and not found:
        return _save_and_end(view)
    if not found:
        return remedy.start(view, policy, None)
    cause = symptoms.root(found)
    if cause.kind == "victim":
        patience = memory.since_ns + int(policy.victim_s * _S)
        if view.now_ns < patience:
            return Wait(patience, "only victims so far: the cause will show itself")
    ended = remedy.verdict(view, policy, cause)
    if ended is not None:
        return ended
    if memory.stop:
        return _save_and_end(view)
    return _restart(view, policy, cause)


def _has_secured(view: View, member: MemberView) -> bool:
    return member.report is not None and member.report.secured_for >= view.memory.generation


def _all_faults(view: View, policy: Policy) -> tuple[Fault, ...]:
    """What was seen first, and what has shown itself since: a cause may come after its victims."""
    known = view.memory.incident.faults if view.memory.incident else ()
    new = symptoms.found(view, policy)
    later = tuple(f for f in new if f.kind != "hang" and not _known(f, known))
    return (*known, *later)


def _known(fault: Fault, known: tuple[Fault, ...]) -> bool:
    return any((fault.rank, fault.kind) == (each.rank, each.kind) for each in known)


def _restart(view: View, policy: Policy, cause: Fault) -> Action:
    """Start the next generation, once there are members for it."""
    able = remedy.able(view, policy)
    if len(able) < policy.members:
        lost = [name for name in view.memory.placement if name not in able]
        for name in lost:
            if name not in view.memory.lost and symptoms.is_lost(view.member(name), policy):
                return Replace(name, f"member {name} is lost and no standby is left")
        deadline = view.memory.since_ns + int(policy.form_s * _S)
        if view.now_ns >= deadline:
            return End(1, f"no member came for {', '.join(lost)}", cause=cause)
        again_ns = view.now_ns + int(_next_silence_s(view, policy) * _S)
        return Wait(min(deadline, again_ns), f"waiting for {', '.join(lost)}, or one in its place")
    return remedy.start(view, policy, cause)


def _save_and_end(view: View) -> Action:
    resumed = remedy.resume_point(view, None)
    if resumed.source != "slot":
        return End(EXIT_INTERRUPTED, f"stopped, as asked; newest state: step {resumed.step}")
    return Save(resumed.holders[0], resumed, "stop asked: a checkpoint of what is secured")


# -- saving and stopping


def _saving(view: View, policy: Policy) -> Action:
    memory = view.memory
    member = view.member(memory.save_member)
    report = member.report if member else None
    durable = report.durable if report else None
    if durable is not None and durable.asked >= memory.save:
        if durable.error:
            return End(EXIT_INTERRUPTED, f"stopped; the last checkpoint failed: {durable.error}")
        return End(EXIT_INTERRUPTED, f"stopped, as asked, with a checkpoint of step {durable.step}")
    deadline = memory.since_ns + int(policy.save_s * _S)
    if memory.stop == "now" or view.now_ns >= deadline or symptoms.is_lost(member, policy):
        return End(EXIT_INTERRUPTED, "stopped without its last checkpoint")
    return Wait(min(deadline, view.now_ns + int(policy.member_timeout_s * _S)), "saving")


def _stopping(view: View, policy: Policy) -> Action:
    left = [m for m in view.members if m.exists]
    if not left:
        return Done("no member is left")
    deadline = view.memory.since_ns + int((policy.grace_s + 10) * _S)
    if view.now_ns >= deadline:
        return Done(f"{len(left)} members did not stop in time")
    return Wait(deadline, f"{len(left)} members are stopping")


def _ended(view: View, policy: Policy) -> Action:
    return Wait(view.now_ns + int(IDLE_S * _S), "ended")


_RULES: Mapping[str, Callable[[View, Policy], Action]] = MappingProxyType(
    {
        "forming": _forming,
        "running": _running,
        "looking": _looking,
        "securing": _securing,
        "saving": _saving,
        "stopping": _stopping,
        "ended": _ended,
    }
)
