"""End a run that has saved a step but has no usable state left. Pure.

Only the user can decide to start over. The message says why each existing state cannot be used.
"""

from __future__ import annotations

from holdfast import exit_codes
from holdfast.protocol.member_messages import HeldSnapshot
from supervisor.decision import resume_point
from supervisor.view.model import End, Fault, MemberView, View

LISTED = 4  # the number of states that a message lists
MAX_STEPS = 64  # the number of steps whose snapshots are considered; a member holds two snapshots


def no_state_left(view: View, cause: Fault | None, good: int | None) -> End | None:
    """Return the `End` of a run without a usable state; None if no step was ever saved.

    `good` is the last step whose state is good, or None if all are. `cause` is the fault after which the
    group would resume. It is None at the start of a run, which can resume only from storage.
    """
    memory = view.memory
    listed = why_states_are_refused(view, good)
    if cause is None:
        if memory.saved < 0 and not listed:
            return None
        there = (
            f"checkpoints, and none can be used: {_listed(listed)}"
            if listed
            else _no_checkpoint_left(memory.saved)
        )
        return End(
            exit_codes.BAD_INPUT, f"the run directory has {there}; --from-scratch starts over from step 0"
        )
    if not resume_point.has_saved_state(memory) and cause.kind != "restore":
        return None
    stored = view.stored.checkpoints or view.stored.unusable
    if not stored:
        none = (
            _no_checkpoint_left(memory.saved)
            if memory.saved >= 0
            else "no checkpoint yet (--checkpoint-every)"
        )
        listed = (f"storage has {none}", *listed)
    if len(listed) == (not stored) and memory.held >= 0:
        listed = (*listed, f"the snapshot of step {memory.held} is lost with its members")
    return End(1, f"{cause.detail}; no state is left to resume from: {_listed(listed)}", cause=cause)


def why_states_are_refused(view: View, good: int | None) -> tuple[str, ...]:
    """Return why the group cannot resume from each existing state: first checkpoints, then snapshots."""
    stored = [
        (each.step, each.path.rpartition("/")[2], resume_point.reason_unusable(view, each, good))
        for each in view.stored.checkpoints
    ]
    stored += [(each.step, each.name, each.why) for each in view.stored.unusable]
    lines = [f"checkpoint {name}: {why}" for _, name, why in sorted(stored, reverse=True)]
    holders: dict[tuple[int, str], list[str]] = {}
    snapshots = {
        snapshot.step for member in view.members if member.report for snapshot in member.report.slots
    }
    newest = frozenset(sorted(snapshots, reverse=True)[:MAX_STEPS])
    for member in view.members:
        for snapshot in member.report.slots if member.report is not None else ():
            if snapshot.step not in newest:
                continue
            why = resume_point.reason_unusable(view, snapshot, good) or _why_not_whole(view, member, snapshot)
            holders.setdefault((snapshot.step, why), []).append(member.name)
    for (step, why), names in sorted(holders.items(), reverse=True):
        lines.append(f"the snapshot of step {step} on {', '.join(names)}: {why}")
    return tuple(lines)


def _why_not_whole(view: View, member: MemberView, snapshot: HeldSnapshot) -> str:
    if member.report is None or not resume_point.can_serve(view, member):
        return "the member is lost"
    if resume_point.is_damaged(member.report, snapshot):
        return "it is damaged"
    return resume_point.missing_private_state(view, snapshot.step) or "a new run resumes only from storage"


def _listed(listed: tuple[str, ...]) -> str:
    more = f"; and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return "; ".join(listed[:LISTED]) + more


def _no_checkpoint_left(saved: int) -> str:
    return f"no checkpoint left, although step {saved} had one (is the storage mounted?)"
