"""While evidence about a hang is being gathered: is it one, and who holds up the others? Pure."""

from __future__ import annotations

from supervisor import faults as symptoms
from supervisor import presence, remedy, reported, suspect
from supervisor.view import Action, Dismiss, Fault, MemberView, Policy, Secure, View, Wait

_S = 1_000_000_000


def looking(view: View, policy: Policy) -> Action:
    memory = view.memory
    assert memory.incident is not None
    hung = tuple(fault for fault in memory.incident.faults if fault.kind == "hang")
    plain = symptoms.plain(symptoms.found(view, policy))
    if plain:  # the hang was the first sign of something plainer
        return secure(plain)
    if _goes_on(view, hung):
        return Dismiss(f"{hung[0].detail}: it went on by itself")
    waiting = [m.name for m in view.members if m.name in memory.placement and _is_to_look(view, m, policy)]
    deadline = memory.since_ns + int(policy.look_s * _S)
    if waiting and view.now_ns < deadline:
        return Wait(deadline, f"gathering stacks on {', '.join(waiting)}")
    return Secure((_hung(view, hung),), True, "evidence of the hang is gathered")


def secure(found: tuple[Fault, ...]) -> Action:
    """A bad number spoils the survivors' state as well; every other fault leaves it whole."""
    return Secure(found, remedy.at_most(found) is None, symptoms.root(found).detail)


def _is_to_look(view: View, member: MemberView, policy: Policy) -> bool:
    looked = member.report is not None and reported.has_looked(view, member.report)
    return not looked and not presence.is_lost(view, member, policy)


def _goes_on(view: View, hung: tuple[Fault, ...]) -> bool:
    """True when every rank has done a step since: what was late (a starved machine) hangs no more.

    Not before the generation has settled: an incident before it is open still.
    """
    found = reported.reports(view)
    stalls = [each for report in found for each in reported.stalls(view, report)]
    steps = [each.step for report in found for each in report.progress]
    complete = view.memory.settled and len(steps) == view.memory.world_size
    return complete and not stalls and min(steps) > max(fault.step for fault in hung)


def _hung(view: View, found: tuple[Fault, ...]) -> Fault:
    """Name the rank that holds up the others."""
    seen = reported.evidence(view)
    first = min(found, key=lambda fault: (fault.step, fault.rank))
    if not seen:
        return first
    named = suspect.name_hung(seen)
    rank, why = named.rank, named.why
    unseen = set(range(view.memory.world_size)) - {each.rank for each in seen}
    if unseen:
        rank = min(unseen)
        why = "neither its page nor its member says anything"
    where = next((f for f in found if f.rank == rank), first)
    return Fault(
        "hang",
        rank,
        _member_of(view, rank),
        where.step,
        where.at_ns,
        f"hang of rank {rank}",
        f"rank {rank} hangs: {why}",
    )


def _member_of(view: View, rank: int) -> str:
    return view.memory.placement[rank // view.memory.nproc]
