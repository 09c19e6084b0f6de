"""Why a run ends rather than begin again: a step was saved, and no state is left that may be used. Pure.

Nothing is started over without having been asked for. A message names what there is, and why it is not used.
"""

from __future__ import annotations

from holdfast.messages import Slot
from supervisor import resume
from supervisor.view import End, Fault, MemberView, View

LISTED = 4  # states that a message names


def nothing_left(view: View, cause: Fault | None, good: int | None) -> End | None:
    """End for a group that has no state to resume from though a step was saved; None when none ever was.

    `good` is the most steps that a good state can have, if there is a bound. Without a `cause` it is the
    start of a run, in which only storage counts.
    """
    memory = view.memory
    listed = refused(view, good)
    if cause is None:
        if memory.saved < 0 and not listed:
            return None
        there = f"checkpoints, and none can be used: {_some(listed)}" if listed else _no_longer(memory.saved)
        return End(2, f"the run directory has {there}; --from-scratch starts over from step 0")
    if not resume.had_state(memory) and cause.kind != "restore":
        return None
    stored = view.stored.checkpoints or view.stored.unusable
    if not stored:
        none = _no_longer(memory.saved) if memory.saved >= 0 else "no checkpoint yet (--checkpoint-every)"
        listed = (f"storage has {none}", *listed)
    if len(listed) == (not stored) and memory.held >= 0:
        listed = (*listed, f"the snapshot of step {memory.held} is lost with its members")
    return End(1, f"{cause.detail}; no state is left to resume from: {_some(listed)}", cause=cause)


def refused(view: View, good: int | None) -> tuple[str, ...]:
    """Say of each state that there is why it cannot be resumed from: checkpoints, then snapshots."""
    stored = [
        (each.step, each.path.rpartition("/")[2], resume.why_not(view, each, good))
        for each in view.stored.checkpoints
    ]
    stored += [(each.step, each.name, each.why) for each in view.stored.unusable]
    lines = [f"checkpoint {name}: {why}" for _, name, why in sorted(stored, reverse=True)]
    holders: dict[tuple[int, str], list[str]] = {}
    for member in view.members:
        for slot in member.report.slots if member.report is not None else ():
            why = resume.why_not(view, slot, good) or _why_not_whole(view, member, slot)
            holders.setdefault((slot.step, why), []).append(member.name)
    for (step, why), names in sorted(holders.items(), reverse=True):
        lines.append(f"the snapshot of step {step} on {', '.join(names)}: {why}")
    return tuple(lines)


def _why_not_whole(view: View, member: MemberView, slot: Slot) -> str:
    if member.report is None or not resume.can_give(view, member):
        return "the member is lost"
    if resume.is_damaged(member.report, slot):
        return "it is damaged"
    return resume.incomplete(view, slot.step) or "a run begins with what is on storage"


def _some(listed: tuple[str, ...]) -> str:
    more = f"; and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return "; ".join(listed[:LISTED]) + more


def _no_longer(saved: int) -> str:
    return f"no checkpoint any more, though one of step {saved} was there (is the storage mounted?)"
