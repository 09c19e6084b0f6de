"""Judge a group whose ranks are in the first step of their generation, within its limit. Pure.

A first step may compile, import, load or download, so its limit (`--first-step-timeout`) is generous. Time
alone therefore proves nothing, but two things are evidence sooner:

- A proof of a hang does not depend on time. If the group has resumed from a state, it is acted on as in any
  other step (`supervisor.hangs.certain_hangs`). At a cold start, it only leads to a warning.
- If the same rank has already hung in this step, at the same place, and stands still again without a sign of
  work, the limit of a stall that a restart did not end applies.

In all other cases, the user learns early which rank waits where, and the group is left alone.
"""

from __future__ import annotations

from holdfast.protocol.member_messages import RankStall
from supervisor.hangs import evidence, group_reports, hung_rank, sentences, stall_limits
from supervisor.hangs.verdict import StallVerdict, hang_fault
from supervisor.view.model import SECOND_NS, Fault, LateRank, PastFault, Policy, View

# A file system, a server, a line of input and a child process may end these waits at any time, so that a
# repetition says nothing about the script.
_OUTSIDE = (evidence.FILE, evidence.NETWORK, evidence.BYTES, evidence.CHILD, evidence.CHILDREN)


def in_time(view: View) -> dict[int, RankStall]:
    """Return the stalls of the ranks whose first steps take long but are within their limits."""
    return {rank: each for rank, each in group_reports.early_stalls(view).items() if each.first_step}


def is_cold(view: View) -> bool:
    """True if a rank is in its first step, within the limit, and has resumed from no state."""
    return any(each.step <= 0 for each in in_time(view).values())


def standing(view: View, policy: Policy, holding: list[LateRank], alone: bool) -> StallVerdict:
    """Return the verdict about a group that `holding` holds up in its first step.

    `alone` is True if no rank waits for another.
    """
    named = hung_rank.name_rank(view, holding)
    begun = all(each.begun for each in holding)
    past = sentences.past_hangs(view, named) if begun and not alone else []
    quiet_ns = max(view.watch.since_ns, *(each.worked_ns for each in holding))
    usual_s = max(policy.stall_limit_s, stall_limits.learned_s(view, holding))
    why = sentences.describe_standstill(view, named, len(holding) > 1 and named.rank < 0)
    most_s = max(policy.first_step_s, group_reports.longest_limit_s(in_time(view)))
    limit_s: float | None = most_s if begun or not alone else None
    warn_ns = _warn_ns(quiet_ns, usual_s, holding, alone=alone, begun=begun)
    act_ns, fault = None, None
    if past and any(each.role == evidence.WORKS for each in holding):
        warn_ns = None  # the next inspection decides which limit applies
    elif past and _are_seen(holding) and all(map(_stands_still, holding)):
        limit_s = min(most_s, usual_s * stall_limits.doublings(len(past)))
        act_ns = quiet_ns + int(limit_s * SECOND_NS)
        detail = f"{why}; {stall_limits.describe_limit(limit_s, len(past), False, False)}"
        fault = hang_fault(view, named, detail, past[-1].signature, "")
    return StallVerdict(
        why,
        named.rank,
        place=warning_place(group_reports.place(view, named), past),
        work=named.work,
        limit_s=limit_s,
        act_ns=act_ns,
        warn_ns=warn_ns,
        fault=fault,
        first_step=True,
    )


def deadlocked(view: View, policy: Policy, why: str, place: str, fault: Fault) -> StallVerdict:
    """Return the verdict if all ranks wait for each other at a cold start: warn at once."""
    limit_s = max(policy.first_step_s, group_reports.longest_limit_s(in_time(view)))
    return StallVerdict(
        why, fault.rank, place=warning_place(place, []), limit_s=limit_s, warn_ns=view.now_ns, first_step=True
    )


def warning_place(place: str, past: list[PastFault]) -> str:
    """Return what identifies a warning, which is not repeated, except after another restart."""
    return f"first step, {len(past)} restarts: {place}"


def repeated_signature(view: View, named: LateRank) -> str:
    """Return the signature of the hang that `named` repeats, to count it as the same failure; "" if none."""
    past = sentences.past_hangs(view, named)
    return past[-1].signature if past and named.work not in _OUTSIDE else ""


def _stands_still(late: LateRank) -> bool:
    """True if the rank neither computes, nor waits for its device or for what is outside of the group."""
    if late.role == evidence.WAITS:
        return not hung_rank.waits_for_device_at(late.at)  # which may load its code or compute
    return late.role == evidence.LOCKED or (late.role == evidence.IDLE and late.work not in _OUTSIDE)


def _are_seen(holding: list[LateRank]) -> bool:
    """True if each rank was inspected twice. The second inspection may prove a hang, or show movement."""
    return all(each.looks > 1 for each in holding)


def _warn_ns(
    quiet_ns: int, usual_s: float, holding: list[LateRank], *, alone: bool, begun: bool
) -> int | None:
    """Return when to warn: at the time of a later step's warning, counted from the last sign of work.

    If no rank waits for another, a script that does not join may be waiting for requests: return None.
    """
    if not _are_seen(holding) or (alone and not begun):
        return None
    factor = stall_limits.BUSY_FACTOR if any(each.busy for each in holding) else 1
    return quiet_ns + int(factor * usual_s * (1.0 if alone else 0.5) * SECOND_NS)
