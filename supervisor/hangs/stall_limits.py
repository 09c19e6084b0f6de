"""Compute the time limits for stalls that may be work, counted from the last sign of work. Pure.

A limit grows with each sign of work, with stalls of the same kind that ended without a restart, and with each
restart at the same place. There is no limit as long as no rank has been seen waiting for another rank.
"""

from __future__ import annotations

from holdfast.protocol.member_messages import RankStall
from supervisor.hangs import evidence, group_reports, hung_rank, sentences
from supervisor.hangs.verdict import APART, UNBEGUN, StallVerdict, hang_fault
from supervisor.view import reports
from supervisor.view.model import SECOND_NS, LateRank, PastFault, Policy, View

BUSY_FACTOR = 3  # applied to the limit of a rank that computes without visible progress
MOST_FACTOR = 10  # signs of work can extend a limit to at most this multiple
LEARNED_FACTOR = 3  # applied to the longest stall of the same kind that ended without a restart
TWICE_S = 6.0  # the longest time between two inspections, and the longest wait for a second one
PAUSE_SLACK_S = 1.0  # the limit of a pause may equal a process group's timeout: both default to 30 min
_MOST_DOUBLINGS = 10


def limited(view: View, policy: Policy, holding: list[LateRank]) -> StallVerdict:
    """Return the verdict if `holding` may be working.

    The group is restarted when the limit of these ranks has passed.
    """
    named = hung_rank.name_rank(view, holding)
    begun, stalls, since_ns = (
        all(each.begun for each in holding),
        group_reports.stalls(view),
        view.watch.since_ns,
    )
    usual_s = policy.stall_limit_s if begun else policy.first_step_s
    # If a rank is late only after minutes, its steps take minutes, and the limit must not be shorter.
    # No early rank may be restarted before it is late, even if it waits for the others.
    held_up = {each.rank: stalls[each.rank] for each in holding if each.rank in stalls}
    held_up |= group_reports.early_stalls(view)
    limit = max(usual_s, group_reports.longest_limit_s(held_up))
    worked_ns = max(each.worked_ns or since_ns for each in holding)
    apart_s = (_apart_until_ns(view) - since_ns) / 1e9
    limit_s = max(apart_s + limit, (worked_ns - since_ns) / 1e9 + limit)
    if any(each.busy and each.begun for each in holding):
        limit_s = max(limit_s, apart_s + BUSY_FACTOR * limit)
    latest_s = apart_s + MOST_FACTOR * limit if any(each.begun for each in view.watch.ranks) else None
    is_extended = worked_ns > since_ns
    limit_s = min(limit_s, latest_s or limit_s)
    if apart_s > 0:  # the wait may have begun at any time since the last inspection that showed no wait
        limit_s = max(limit_s, apart_s + TWICE_S + policy.look_s)
    expected_s = learned_s(view, holding)
    limit_s = max(limit_s, expected_s)
    place = group_reports.place(view, named)
    times = sum(_is_same(past, place, named.step) for past in view.memory.history)
    limit_s *= doublings(times)
    latest_s = latest_s * doublings(times) if latest_s is not None and is_extended else None
    why = sentences.describe_standstill(view, named, len(holding) > 1 and named.rank < 0)
    act_ns = since_ns + int(limit_s * SECOND_NS)
    if any(each.looks < 2 for each in holding):  # a previous supervisor may have seen the rank working
        act_ns = max(act_ns, view.memory.since_ns + int((TWICE_S + policy.look_s) * SECOND_NS))
    detail = f"{why}; {describe_limit(limit_s, times, expected_s > 0, limit_s > limit)}"
    work = named.work or evidence.UNKNOWN
    at = place or sentences.name_activity(view, named.rank, named.phase)
    fault = hang_fault(view, named, detail, f"stall at {at}", work)
    if named.role == evidence.LOCKED:  # a certain hang that has a limit only because it recurred
        fault = hang_fault(view, named, detail, signature(view, named), "")
    warn_s = apart_s + (limit_s - apart_s if begun else limit) / 2
    return StallVerdict(
        why,
        named.rank,
        place=place if begun else UNBEGUN,
        work=work,
        limit_s=limit_s,
        act_ns=act_ns,
        warn_ns=since_ns + int(warn_s * SECOND_NS),
        fault=fault,
        latest_s=latest_s if latest_s is not None and latest_s > limit_s else None,
    )


def at_floor(view: View, holding: list[LateRank]) -> StallVerdict:
    """Return the verdict if the user's own limit (`Policy.hang_floor_s`) is exceeded."""
    named = hung_rank.name_rank(view, holding)
    place = group_reports.place(view, named)
    why = sentences.describe_standstill(view, named, named.rank < 0)
    fault = hang_fault(view, named, f"{why}; --hang-floor is exceeded", f"hang at {place}", "")
    return StallVerdict(why, named.rank, place=place, limit_s=0.0, act_ns=view.now_ns, fault=fault)


def before_floor(view: View, policy: Policy, early: dict[int, RankStall]) -> StallVerdict:
    """Return the verdict if the user's own limit (`Policy.hang_floor_s`) is not exceeded yet by `early`."""
    last = max(early.values(), key=lambda each: each.limit_s)
    why = sentences.describe_in_time(view, policy, last.rank, last.phase_name)
    return StallVerdict(why, last.rank, limit_s=last.limit_s)


def unlimited(view: View, policy: Policy, only: LateRank) -> StallVerdict:
    """Return the verdict if `only` may be working and no rank waits for it: warn, but do not restart."""
    several = len(view.watch.ranks) > 1 and only.begun
    unaffected = "no rank waits for another" if several else "no other rank waits for it"
    doing = sentences.describe_late_rank(view, only)
    why = f"rank {only.rank} has been {doing} since step {only.step}; {unaffected}"
    late_s = group_reports.longest_limit_s(group_reports.early_stalls(view))
    warn_s = max(policy.stall_limit_s, late_s) if only.begun else policy.first_step_s / 2
    place = UNBEGUN if not only.begun else APART if several else group_reports.place(view, only)
    return StallVerdict(
        why, only.rank, place=place, work=only.work, warn_ns=view.watch.since_ns + int(warn_s * SECOND_NS)
    )


def are_apart(view: View, policy: Policy) -> bool:
    """True if recent inspections of all live ranks showed that none of them waits for another rank."""
    oldest_ns = view.now_ns - int((TWICE_S + policy.look_s) * SECOND_NS)
    apart = {each.rank for each in view.watch.ranks if each.apart and each.apart_ns > oldest_ns}
    return set(group_reports.phases(view)) <= apart


def horizon_s(view: View, policy: Policy) -> float:
    """Return how long the group can stay in collectives before it exceeds a limit or a pause."""
    pauses = [each.pause_left_s for report in reports.reports(view) for each in report.progress]
    learned = [each.seconds for each in view.memory.learned if each.work == evidence.COLLECTIVE]
    late_s = group_reports.longest_limit_s(group_reports.early_stalls(view))
    most_s = max(policy.stall_limit_s, late_s, LEARNED_FACTOR * max(learned, default=0.0))
    if not all(rank.marks.first_step_ns for rank in reports.ranks(view)):
        most_s = max(most_s, policy.first_step_s)
    return max(most_s, max(pauses, default=0.0) - PAUSE_SLACK_S)


def learned_s(view: View, holding: list[LateRank]) -> float:
    """Return the limit for the kinds of work of `holding` that earlier stalls have taught; 0 if none has."""
    kinds = {work for each in holding for work in each.works}
    learned = [each.seconds for each in view.memory.learned if each.work in kinds]
    return LEARNED_FACTOR * max(learned, default=0.0)


def doublings(times: int) -> int:
    """Return how many times longer a limit is after `times` restarts for the same stall."""
    return int(2 ** min(times, _MOST_DOUBLINGS))


def describe_limit(limit_s: float, times: int, is_learned: bool, is_extended: bool) -> str:
    """Return a clause that states the limit and the reason for it. The usual limit needs no reason."""
    if times:
        return f"the limit is now {limit_s:.0f} s, because a restart here did not help"
    if is_learned:
        return f"the limit is {limit_s:.0f} s, learned from stalls that ended without a restart"
    return (
        f"the limit is {limit_s:.0f} s{', extended because there are signs of work' if is_extended else ''}"
    )


def signature(view: View, named: LateRank) -> str:
    """Return the signature of a certain hang."""
    at = group_reports.place(view, named) or sentences.name_activity(view, named.rank, named.phase)
    return f"hang at {at}: {named.role}"


def _apart_until_ns(view: View) -> int:
    """Return when inspections last showed that no rank waits for another. Limits are counted from this time.

    If the inspections have not shown this for every rank, return the time of the last progress.
    """
    seen_ns = [each.apart_ns for each in view.watch.ranks]
    return max(view.watch.since_ns, min(seen_ns)) if all(seen_ns) else view.watch.since_ns


def _is_same(past: PastFault, place: str, step: int) -> bool:
    """True if `past` may have been the same stall: at the same place or step, or at an unknown place.

    After a restart, the script repeats the interrupted work. The next inspection may then find the work
    in another function.
    """
    if past.kind != "hang":
        return False
    if past.place and past.place == place:
        return True
    return bool(past.work) and (past.step == step or not past.place or not place)
