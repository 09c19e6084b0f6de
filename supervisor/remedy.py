"""Which remedy for which fault, from the cheapest up; and when to stop because a bug is not a fault. Pure."""

from __future__ import annotations

import re

from supervisor import faults as symptoms
from supervisor import resume
from supervisor.view import Action, End, Fault, MemberView, Policy, Resume, Start, View

NUMERIC = frozenset({"nan", "inf", "loss_jump"})
_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError): ", re.MULTILINE)
_S = 1_000_000_000


def before_joining(view: View) -> End | None:
    """End for a script that ends, or fails for good, before it joins: no generation can help it."""
    for member in view.members:
        launcher = member.report.launcher if member.report else None
        ending = launcher.warm_ending if launcher else None
        if launcher is None or ending is None or ending.ours:
            continue
        code = ending.code if ending.code is not None else 128 + (ending.signal or 0)
        if ending.signal is None and code == 0 and view.memory.generation == 0:
            return End(0, "the script ended before it joined", ending.message)
        for_good = ending.fail in ("system_exit", "bad_input") or _SYNTAX.search(ending.message)
        if for_good and view.memory.generation == 0:
            return End(code, "the script cannot start", ending.message)
        if launcher.warm_failures >= 3:
            why = f"the script failed {launcher.warm_failures} times before it joined"
            return End(code or 1, why, ending.message)
    return None


def verdict(view: View, policy: Policy, cause: Fault) -> End | None:
    """End when a restart cannot help: deliberate exits, bad input, the same failure again and again."""
    history = view.memory.history
    code = _exit_code(cause)
    if cause.kind == "bad_input":
        return End(2, cause.detail, cause.message, cause)
    if cause.kind == "exception" and _SYNTAX.search(cause.message):
        return End(code, cause.detail, cause.message, cause)  # it cannot become right by itself
    if cause.kind == "exit":
        return End(code, f"{cause.detail}: the script's own decision", "", cause)
    if cause.kind in NUMERIC and _again(view, cause) and not policy.skip_bad_batches:
        return End(1, _names_batch(cause) + "; --skip-bad-batches would pass over it", "", cause)
    same = _identical(view, cause)
    limit = policy.identical_crashes if cause.kind == "crash" else policy.identical_failures
    if cause.kind in ("exception", "crash", "victim") and same + 1 >= limit:
        why = f"{cause.detail}: {same + 1} times the same, at step {cause.step}; a bug, not a fault"
        return End(code, why, cause.message, cause)
    recent = [p for p in history if view.now_ns - p.at_ns < policy.restart_window_s * _S]
    if len(recent) >= policy.max_restarts:
        hours = policy.restart_window_s / 3600
        why = f"{len(recent)} restarts in {hours:g} h are the limit (--max-restarts): {cause.detail}"
        return End(code, why, cause.message, cause)
    return None


def _exit_code(cause: Fault) -> int:
    if cause.signal is not None:
        return 128 + cause.signal
    return cause.code or 1


def _identical(view: View, cause: Fault) -> int:
    """Count the same failures right before this one, between which no step was gained."""
    count = 0
    for past in reversed(view.memory.history):
        if (past.kind, past.signature) != (cause.kind, cause.signature) or past.step < cause.step:
            break
        if cause.kind == "crash" and past.rank != cause.rank:
            break
        count += 1
    return count


def _again(view: View, cause: Fault) -> bool:
    """True when the same step gave a bad number before, and was rolled back for it."""
    return any(p.kind in NUMERIC and p.step == cause.step for p in view.memory.history)


def _names_batch(cause: Fault) -> str:
    where = f" (batch position {cause.position})" if cause.position >= 0 else ""
    return f"step {cause.step} of rank {cause.rank}{where} gives a bad number again: {cause.detail}"


def able(view: View, policy: Policy) -> tuple[str, ...]:
    """Return the members for the next generation: those that had ranks first, in their places."""
    memory = view.memory
    usable = {m.name: m for m in view.members if _usable(m, policy)}
    standbys = [
        m for m in usable.values() if m.name not in memory.placement and _is_parked(m, memory.nproc)
    ]
    chosen: list[str] = []
    wanted = memory.placement or tuple(list(usable)[: policy.members])
    for name in wanted:
        if name in usable and not (_keeps_failing(view, name) and standbys):
            chosen.append(name)
        elif standbys:
            chosen.append(standbys.pop(0).name)
    return tuple(chosen)


def _usable(member: MemberView, policy: Policy) -> bool:
    if symptoms.is_lost(member, policy) or not member.connected:
        return False
    return member.report is not None and member.report.launcher is not None


def _is_parked(member: MemberView, nproc: int) -> bool:
    launcher = member.report.launcher if member.report else None
    if launcher is None:
        return False
    return launcher.strategy == "cold" or len(launcher.parked) >= nproc


def _keeps_failing(view: View, name: str) -> bool:
    """True when this member's ranks died of signals twice in a row without the group getting on."""
    memory = view.memory
    cause = memory.incident.faults[0] if memory.incident and memory.incident.faults else None
    last = memory.history[-1] if memory.history else None
    if cause is None or last is None or cause.kind != "crash" or last.kind != "crash":
        return False
    return cause.member == last.member == name and cause.step <= last.step


def start(view: View, policy: Policy, cause: Fault | None) -> Action:
    """Form the next generation from the newest state that all its ranks can have."""
    placement = able(view, policy)
    skip = view.memory.skip
    at_most = None
    evidence: list[str] = []
    if cause is not None and cause.kind in NUMERIC:
        at_most = _first_bad(view)
        if _again(view, cause) and policy.skip_bad_batches:
            skip = tuple(sorted({*skip, cause.step}))
            evidence.append(f"{_names_batch(cause)}: step {cause.step} will be skipped")
    resumed = resume_point(view, at_most)
    if resumed.source == "checkpoint" and view.checkpoint is not None:
        if view.checkpoint.world_size != view.memory.world_size:
            there, here = view.checkpoint.world_size, view.memory.world_size
            return End(2, f"checkpoint {resumed.path} is of world size {there}, this run's is {here}")
        skip = tuple(sorted({*skip, *view.checkpoint.skip}))
    master = view.member(placement[0])
    assert master is not None
    assert master.report is not None
    assert master.report.launcher is not None
    moved = [name for name in placement if name not in view.memory.placement]
    remedy = _remedy(cause, bool(moved))
    return Start(
        placement=placement,
        resume=resumed,
        skip=skip,
        master_addr=_host(master.report.peer_url),
        master_port=master.report.launcher.port,
        cause=cause,
        remedy=remedy,
        evidence=tuple(evidence),
        why=_why(cause, resumed, moved),
    )


def _first_bad(view: View) -> int:
    """Return the first step that any rank found bad: the state after it is bad everywhere."""
    assert view.memory.incident is not None
    known = view.memory.incident.faults
    return min(fault.step for fault in known if fault.kind in NUMERIC)


def _remedy(cause: Fault | None, moved: bool) -> str:
    if cause is None:
        return "start"
    if cause.kind in NUMERIC:
        return "rollback"
    return "swap" if moved else "restart"


def _why(cause: Fault | None, resumed: Resume, moved: list[str]) -> str:
    state = {
        "slot": f"from the snapshot of step {resumed.step}",
        "checkpoint": f"from the checkpoint of step {resumed.step}",
        "none": "from the beginning",
    }[resumed.source]
    if cause is None:
        return f"all members are ready: start {state}"
    if cause.kind in NUMERIC:
        return f"{cause.detail}: roll back to before it, {state}"
    where = f"on {', '.join(moved)}" if moved else "where they are"
    return f"{cause.detail}: restart the processes {where}, {state}"


def _host(url: str) -> str:
    return url.partition("://")[2].rpartition(":")[0] or "127.0.0.1"


def resume_point(view: View, at_most: int | None) -> Resume:
    return resume.point(view, at_most)
