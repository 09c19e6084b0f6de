"""The way out of a run: its last checkpoint, and the end of its members. Pure."""

from __future__ import annotations

from supervisor import presence, remedy
from supervisor.view import Action, Done, End, Fault, Policy, Save, View, Wait

EXIT_INTERRUPTED = 130
_S = 1_000_000_000
_IDLE_S = 60.0
_SLACK_S = 10.0  # beyond the members' own grace, before they are left to whoever keeps them


def save_and_end(view: View, found: tuple[Fault, ...]) -> Action:
    """Have what is secured written to storage before the end, if it is not there."""
    resumed = remedy.resume_point(view, remedy.at_most(found))
    if resumed.source == "slot":
        return Save(resumed.holders[0], resumed, "stop asked: a checkpoint of what is secured")
    if resumed.source == "checkpoint":
        return End(EXIT_INTERRUPTED, f"stopped, as asked; the newest checkpoint has step {resumed.step}")
    return End(EXIT_INTERRUPTED, "stopped, as asked; no member holds a state to save")


def saving(view: View, policy: Policy) -> Action:
    """Rule for the phase `saving`."""
    memory = view.memory
    member = view.member(memory.save_member)
    durable = member.report.durable if member and member.report else None
    if durable is not None and durable.asked >= memory.save:
        if durable.error:
            return End(EXIT_INTERRUPTED, f"stopped; the last checkpoint failed: {durable.error}")
        return End(EXIT_INTERRUPTED, f"stopped, as asked, with a checkpoint of step {durable.step}")
    deadline = memory.since_ns + int(policy.save_s * _S)
    if member is None or view.now_ns >= deadline or presence.is_lost(view, member, policy):
        return End(EXIT_INTERRUPTED, "stopped without its last checkpoint")
    return Wait(min(deadline, view.now_ns + int(policy.member_timeout_s * _S)), "saving")


def stopping(view: View, policy: Policy) -> Action:
    """Rule for the phase `stopping`."""
    left = [m for m in view.members if m.exists and not presence.deaf(m)]
    if not left:
        return Done("no member is left")
    deadline = view.memory.since_ns + int((policy.grace_s + _SLACK_S) * _S)
    if view.now_ns >= deadline:
        return Done(f"{len(left)} members did not stop in time")
    return Wait(deadline, f"{len(left)} members are stopping")


def ended(view: View, policy: Policy) -> Action:
    """Rule for the phase `ended`."""
    return Wait(view.now_ns + int(_IDLE_S * _S), "ended")
