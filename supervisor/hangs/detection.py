"""Is a group in which no step ends hung, and who holds up the others? Pure.

Time alone proves nothing. What is certain is acted on at once: a process that is stopped, whatever it was
at, a rank that waits for locks which nothing outside of it can release, a partner that has left. What may be
work (loading, compiling, saving, a file system, a network) has a limit, counted from the last sign of work
and learned from stalls that ended by themselves. While anybody is in time, in a pause that the script
declared or in a debugger, nothing that may be work hangs: the others wait for it.

A script that does not join may never do a step that is seen. Before its first, all that it does may be work:
the time for a first step is counted from the last sign of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from holdfast.inspection import liveness
from holdfast.protocol.launcher_messages import RankInspection, RankState
from holdfast.protocol.member_messages import RankStall
from supervisor.hangs import awaited_ranks, deadlock, evidence, hung_rank, observation
from supervisor.view import reports, uneven_steps
from supervisor.view.model import Fault, LateRank, PastFault, PendingException, Policy, RestingRank, View

_S = 1_000_000_000
BUSY_FACTOR = 3  # of the limit: for one that computes, though it is seen to get nowhere
MOST_FACTOR = 10  # of the limit: for one that works, however much
LEARNED_FACTOR = 3  # of the longest stall of the kind that ended by itself
HINT_S = 5.0  # beyond the time for `finally` blocks: the rank itself tells that it is over
TWICE_S = 6.0  # from one look to the next, at most; beyond it a second one is not waited for
SIDE_S = 0.3  # that a certain hang waits for the looks at the others, which are taken at the same time
TOLD_S = 1.0  # the same, for one that is stopped and not late: nobody has been looked at yet
LEFT_S = (
    5.0  # that ranks wait, seen to do nothing, for one that has left, before it counts though none is late
)
PAUSE_SLACK_S = 1.0  # a group's own time limit may be just that of a pause: both are 30 minutes
_NAMED = 4  # ranks, in a line
_STEPS = frozenset({"data", "forward", "backward", "optimizer", "tail"})
APART = "no rank waits for another"  # where that is warned of: once, wherever the script is
UNBEGUN = "before the first step"  # where that is warned of: once, wherever the script is
_LINE = re.compile(r":\d+\)$")


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """What is to be thought of a group that stands still, and until when."""

    why: str  # in words: "rank 0 is in evaluate (train.py:42), waiting for a file system"
    rank: int = -1  # who holds up the others; -1 when that cannot be told
    place: str = ""
    work: str = ""  # the kind, "" for what is certain
    limit_s: float | None = None  # from `since_ns` on; None: no time makes it a hang
    act_ns: int | None = None
    warn_ns: int | None = None
    fault: Fault | None = None  # what is to be acted on at `act_ns`


def judge(view: View, policy: Policy) -> StallVerdict | None:
    """Return what is to be thought of the group; None while nobody is late."""
    watch = view.watch
    if not watch.ranks or watch.generation != view.memory.generation:
        return None
    untold = reports.members_without_rank_report(view)
    if untold and view.now_ns < watch.untold_ns + int(liveness.HELD_UP_S * _S):
        return StallVerdict(f"member {untold[0]} has not said yet what its ranks do")
    stalls, phases = _stalls(view), _phases(view)
    traced = _traced(view)
    if traced is not None:
        return StallVerdict(f"a debugger is attached to rank {traced}", traced)
    pausing = [r for r, phase in phases.items() if phase in awaited_ranks.PAUSES and r not in stalls]
    told = _told_stopped(view)
    at_work = [r for r in pausing if r not in told and not _waits(view, r)]
    if told and not at_work:
        return _stopped(view, told)
    hints = _hints(view, policy)
    dead = () if hints or told else deadlock.deadlocked_ranks(view, _horizon_s(view, policy))
    if dead:
        return _deadlock(view, policy, dead)
    if pausing:
        first = (at_work or pausing)[0]
        return StallVerdict(awaited_ranks.describe_pause(view, first, phases[first]), first)
    if hints and not any(each.role == evidence.STOPPED for each in watch.ranks):
        why = "runs the `finally` blocks of an exception, which is perhaps on its way out"
        return StallVerdict(f"rank {hints[0].rank} {why}", hints[0].rank)
    over = [stall for rank, stall in sorted(stalls.items()) if stall.limited]
    if over:
        return _over(view, over)
    stopped = [each for each in watch.ranks if each.role == evidence.STOPPED]
    if stopped:
        return _certain(view, stopped[0], "it is stopped (state T)")
    if any(each.phase == "starting" for each in watch.ranks):
        return StallVerdict("a process that was released has not begun yet")
    abandoned = _abandoned(view)
    if abandoned is not None:
        return abandoned
    in_time = [r for r, phase in phases.items() if r not in stalls and phase not in observation.ENDED]
    if in_time:
        return StallVerdict(awaited_ranks.describe_in_time(view, policy, min(in_time), phases[min(in_time)]))
    unseen = [each for each in watch.ranks if not each.role]
    if unseen and view.now_ns < watch.since_ns + int((_late_s(stalls) + policy.look_s) * _S):
        return StallVerdict(f"rank {unseen[0].rank} is being looked at")
    return _standstill(view, policy)


def _hints(view: View, policy: Policy) -> list[PendingException]:
    """Return the exceptions that are perhaps on their way out, and have not had their time for it."""
    until_ns = view.now_ns - int((policy.unwind_s + HINT_S) * _S)
    return [each for each in view.watch.hints if each.since_ns > until_ns]


def _horizon_s(view: View, policy: Policy) -> float:
    """Return how long ranks that are all in collectives, and the pauses that some are in, would have."""
    pauses = [each.pause_left_s for report in reports.reports(view) for each in report.progress]
    learned = [each.seconds for each in view.memory.learned if each.work == evidence.COLLECTIVE]
    most_s = max(policy.stall_limit_s, LEARNED_FACTOR * max(learned, default=0.0))
    if not all(rank.marks.first_step_ns for rank in reports.ranks(view)):
        most_s = max(most_s, policy.first_step_s)
    return max(most_s, max(pauses, default=0.0) - PAUSE_SLACK_S)


def _deadlock(view: View, policy: Policy, dead: tuple[RestingRank, ...]) -> StallVerdict:
    """All wait for each other for ever. If a restart leads to the same again, it is looked at for longer."""
    place, why, step = deadlock.place(dead), deadlock.describe(dead), min(each.step for each in dead)
    past = [each for each in view.memory.history if each.kind == "hang" and each.place == place]
    fault = Fault("hang", -1, "", step, view.watch.since_ns, f"deadlock at {place}", why, place=place)
    if policy.hang_floor_s > 0 or not any(each.step == step for each in past):
        return StallVerdict(why, -1, place, "", 0.0, view.now_ns, None, fault)
    limit_s = policy.stall_limit_s * 2 ** min(len(past), 10)
    source = _source(len(past), learned=False, extended=False)
    detail = f"{why}; the limit for that is {limit_s:.0f} s{source}"
    act_ns, warn_ns = (view.watch.since_ns + int(part * limit_s * _S) for part in (1.0, 0.5))
    return StallVerdict(why, -1, place, "", limit_s, act_ns, warn_ns, replace(fault, detail=detail))


def _stopped(view: View, told: frozenset[int]) -> StallVerdict:
    """A rank is stopped by its launcher's word: it does nothing, and no limit of its phase will help it."""
    named = next(each for each in view.watch.ranks if each.rank in told)
    where = "" if named.phase in _STEPS else f" in {named.phase}"
    found = _certain(view, named, f"it is stopped (state T){where}")
    told_ns = max(view.now_ns, named.since_ns + int(TOLD_S * _S))
    return found if _all_seen(view) else replace(found, act_ns=told_ns)


def _told_stopped(view: View) -> frozenset[int]:
    """Return the ranks that have been stopped for a while, by their launchers: late or not."""
    watched = {each.rank for each in view.watch.ranks if each.role == evidence.STOPPED}
    return frozenset(each.rank for each in reports.ranks(view) if each.stopped and each.rank in watched)


def _traced(view: View) -> int | None:
    """Return a rank of those that live that a debugger is attached to."""
    alive = _phases(view)
    traced = {look.rank for look in _looks(view) if evidence.findings(look).role == evidence.TRACED}
    return min((rank for rank in traced if rank in alive), default=None)


def _waits(view: View, rank: int) -> bool:
    """True when `rank`, where it is now, was seen to wait for other ranks."""
    return any(
        look.rank == rank
        and look.step == reports.step_of_rank(view, rank)
        and evidence.findings(look).role == evidence.WAITS
        for look in _looks(view)
    )


def _abandoned(view: View) -> StallVerdict | None:
    """A rank has ended well, and all others are seen to wait for others in a collective: nobody will come."""
    left = [rank for rank in reports.ranks(view) if reports.ended_well(rank)]
    here = {each.rank: each for each in view.watch.ranks}
    if not left or set(here) != set(_phases(view)):
        return None
    if not all(each.role == evidence.WAITS and hung_rank.is_meeting_point(each.at) for each in here.values()):
        return None
    still_ns = max(max(each.since_ns, each.worked_ns) for each in here.values())
    return replace(_left(view, left[0], list(here.values())), act_ns=still_ns + int(LEFT_S * _S))


def warning(view: View, found: StallVerdict) -> str:
    """Return the line that is said before anything is done: who, where, how long, and what to write."""
    waited_s = (view.now_ns - view.watch.since_ns) / 1e9
    if found.place == UNBEGUN:
        return _warning_unbegun(found, waited_s)
    if found.limit_s is None:
        why = f"{found.why}, so it is left alone"
        return f"{why}: no step for {waited_s:.0f} s. --hang-floor TIME would restart it"
    others = sorted(each.rank for each in view.watch.ranks if each.rank != found.rank)
    waiting = f" while rank {others[0]} waits" if found.rank >= 0 and others else ""
    return (
        f"{found.why}: no step for {waited_s:.0f} s{waiting};"
        f" Holdfast restarts it at {found.limit_s or 0.0:.0f} s."
        ' If this is intended: `with state.pause("eval", limit_s=...)`, or a larger --stall-limit'
    )


def _warning_unbegun(found: StallVerdict, waited_s: float) -> str:
    seen = f"{found.why}: no step of a torch.optim optimizer for {waited_s:.0f} s"
    if found.limit_s is None:
        return f"{seen}. Holdfast sees no other progress of a script that does not join, and leaves it alone"
    return (
        f"{seen}; Holdfast restarts it at {found.limit_s:.0f} s (--first-step-timeout) unless it works."
        " If the script does no such steps, or waits for long before the first: a larger --first-step-timeout"
    )


def deadline_ns(view: View, policy: Policy) -> int:
    """Return when a look that has not come is no longer waited for."""
    return view.watch.since_ns + int((_late_s(_stalls(view)) + policy.look_s) * _S) + 1


def _standstill(view: View, policy: Policy) -> StallVerdict:
    """All are late, and have been looked at."""
    watch = view.watch
    waiting = [each for each in watch.ranks if each.role == evidence.WAITS]
    rest = [each for each in watch.ranks if each.role != evidence.WAITS]
    left = [rank for rank in reports.ranks(view) if reports.ended_well(rank)]
    if not rest and left:
        return _left(view, left[0], waiting)
    ahead = _ahead(view, rest)
    holding = [each for each in rest if each.rank not in ahead]
    # One whose process is gone has ended: its exit is on its way from the launcher, which may be late.
    locked = [each for each in holding if each.role == evidence.LOCKED]
    if policy.hang_floor_s > 0 and all(each.begun for each in watch.ranks):
        return _at_once(view, holding or waiting)
    # Before any step ranks need not wait for each other: they may serve requests, or predict.
    apart = _are_apart(view, policy) or not any(each.begun for each in watch.ranks)
    alone = len(watch.ranks) == 1 or (apart and not waiting)
    if locked and len(locked) == len(holding) and not _again(view, locked[0]):
        return _certain(view, _named(view, locked), "it waits for a lock that nothing will release")
    if alone:
        return _alone(view, policy, watch.ranks[0])
    return _limited(view, policy, holding or waiting)


def _are_apart(view: View, policy: Policy) -> bool:
    """True while all ranks that live are seen not to wait for another one."""
    oldest_ns = view.now_ns - int((TWICE_S + policy.look_s) * _S)
    seen = {each.rank for each in view.watch.ranks if each.apart and each.apart_ns > oldest_ns}
    return set(_phases(view)) <= seen


def _apart_until_ns(view: View) -> int:
    """Return until when no rank waited for another since the last progress: a limit counts from there on."""
    seen_ns = [each.apart_ns for each in view.watch.ranks]
    return max(view.watch.since_ns, min(seen_ns)) if all(seen_ns) else view.watch.since_ns


def _alone(view: View, policy: Policy, only: LateRank) -> StallVerdict:
    """Nobody waits for it, and it may be work: it has all the time, but it is worth a word."""
    several = len(view.watch.ranks) > 1 and only.begun
    nobody = "no rank waits for another" if several else "nobody waits for it"
    why = f"rank {only.rank} has been {_doing(view, only)} since step {only.step}; {nobody}"
    warn_s = policy.stall_limit_s if only.begun else policy.first_step_s / 2
    place = UNBEGUN if not only.begun else APART if several else _place(view, only)
    return StallVerdict(why, only.rank, place, only.work, warn_ns=view.watch.since_ns + int(warn_s * _S))


def _limited(view: View, policy: Policy, holding: list[LateRank]) -> StallVerdict:
    """It may be work: it has until its limit."""
    named = _named(view, holding)
    begun, stalls, since_ns = all(each.begun for each in holding), _stalls(view), view.watch.since_ns
    usual_s = policy.stall_limit_s if begun else policy.first_step_s
    # Who is late only after minutes has steps of minutes: then less says nothing of them.
    limit = max(usual_s, _late_s({each.rank: stalls[each.rank] for each in holding if each.rank in stalls}))
    worked_ns = max(each.worked_ns or since_ns for each in holding)
    apart_s = (_apart_until_ns(view) - since_ns) / 1e9
    limit_s = max(apart_s + limit, (worked_ns - since_ns) / 1e9 + limit)
    if any(each.busy and each.begun for each in holding):
        limit_s = max(limit_s, apart_s + BUSY_FACTOR * limit)
    if any(each.begun for each in view.watch.ranks):
        limit_s = min(limit_s, apart_s + MOST_FACTOR * limit)
    if apart_s > 0:  # who waits now may have begun to at any time since that look
        limit_s = max(limit_s, apart_s + TWICE_S + policy.look_s)
    kinds = {work for each in holding for work in each.works}
    learned = [each.seconds for each in view.memory.learned if each.work in kinds]
    limit_s = max(limit_s, LEARNED_FACTOR * max(learned, default=0.0))
    place = _place(view, named)
    times = sum(_same(past, place, named.step) for past in view.memory.history)
    limit_s *= 2 ** min(times, 10)
    why = _standing(view, named, len(holding) > 1 and named.rank < 0)
    source = _source(times, bool(learned), limit_s > limit)
    act_ns = since_ns + int(limit_s * _S)
    if any(each.looks < 2 for each in holding):  # it may have worked, before the eyes of another supervisor
        act_ns = max(act_ns, view.memory.since_ns + int((TWICE_S + policy.look_s) * _S))
    detail = f"{why}; the limit for that is {limit_s:.0f} s{source}"
    work = named.work or evidence.UNKNOWN
    fault = _fault(view, named, detail, f"stall at {place or named.phase}", work)
    if named.role == evidence.LOCKED:  # that it was looked at for longer makes it no less certain
        fault = _fault(view, named, detail, _signature(place, named), "")
    return StallVerdict(
        why,
        named.rank,
        place if begun else UNBEGUN,
        work,
        limit_s,
        act_ns,
        since_ns + int((apart_s + (limit_s - apart_s if begun else limit) / 2) * _S),
        fault,
    )


def _same(past: PastFault, place: str, step: int) -> bool:
    """True when `past` may have been the same stall: at this place or step, or at a place that was not told.

    Work that was cut off comes again after the restart, and the next look may find it in another function.
    """
    if past.kind != "hang":
        return False
    if past.place and past.place == place:
        return True
    return bool(past.work) and (past.step == step or not past.place or not place)


def _source(times: int, learned: bool, extended: bool) -> str:
    """Say where a limit comes from that is not the usual one."""
    if times:
        return ", more than before: it was restarted at this place already"
    if learned:
        return ", learned from stalls that ended by themselves"
    return ", for it works" if extended else ""


def _at_once(view: View, holding: list[LateRank]) -> StallVerdict:
    """The user gave the limit, and it is over."""
    named = _named(view, holding)
    why = _standing(view, named, named.rank < 0)
    fault = _fault(view, named, f"{why}; --hang-floor is over", f"hang at {_place(view, named)}", "")
    return StallVerdict(why, named.rank, _place(view, named), "", 0.0, view.now_ns, None, fault)


def _certain(view: View, named: LateRank, why: str) -> StallVerdict:
    place, where = _place(view, named), _where(view, named)
    at = f", in {where}" if place and named.role == evidence.LOCKED else ""
    ranks = ", ".join(str(each.rank) for each in view.watch.ranks)
    who = f"rank {named.rank} hangs" if named.rank >= 0 else f"ranks {ranks} hang, and look alike"
    detail = f"{who}: {why}{at}"
    fault = _fault(view, named, detail, _signature(place, named), "")
    act_ns = (
        view.now_ns if _all_seen(view) else view.watch.since_ns + int((_late_s(_stalls(view)) + SIDE_S) * _S)
    )
    return StallVerdict(detail, named.rank, place, "", 0.0, act_ns, None, fault)


def _signature(place: str, named: LateRank) -> str:
    return f"hang at {place or named.phase}: {named.role}"


def _all_seen(view: View) -> bool:
    """True when there are stacks of all ranks that live, of where they are now."""
    there = {look.rank for look in _looks(view) if look.step in (reports.step_of_rank(view, look.rank), -1)}
    return set(_phases(view)) <= there


def _over(view: View, over: list[RankStall]) -> StallVerdict:
    """A limit of its own is over: of a pause, an end, or a first step."""
    own = [
        stall
        for stall in over
        if stall.phase_name not in ("joining", "restoring", "data", "forward", "backward")
    ]
    stall = own[0] if own else over[0]
    seen = {each.rank: each for each in view.watch.ranks}
    named = seen.get(stall.rank)
    if not own and len(over) > 1:
        named = _named(view, [seen[each.rank] for each in over if each.rank in seen])
    named = named or LateRank(stall.rank, stall.step, stall.phase_name, view.now_ns)
    rank = f"rank {named.rank} hangs: it" if named.rank >= 0 else "the group hangs: it"
    lasted = f"has been in {stall.phase_name} for {stall.stalled_s:.1f} s"
    detail = f"{rank} {lasted}, and its limit is {stall.limit_s:g} s"
    fault = _fault(view, named, detail, f"hang in {stall.phase_name}", "")
    return StallVerdict(detail, named.rank, _place(view, named), "", stall.limit_s, view.now_ns, None, fault)


def _left(view: View, gone: RankState, waiting: list[LateRank]) -> StallVerdict:
    """A rank has ended well, and others wait for it in a collective."""
    step = reports.step_of_rank(view, gone.rank)
    detail = (
        f"rank {gone.rank} exited with 0 at step {step} while rank {waiting[0].rank}"
        f" waits for it at step {waiting[0].step}"
    )
    member = view.memory.placement[gone.rank // view.memory.nproc]
    fault = Fault(
        "crash", gone.rank, member, step, view.watch.since_ns, f"exited with 0 at step {step}", detail, code=0
    )
    fault = next(
        iter(uneven_steps.find_uneven_steps(view)), fault
    )  # it may have finished its loop before the others
    return StallVerdict(fault.detail, fault.rank, "", "", 0.0, view.now_ns, None, fault)


def _fault(view: View, named: LateRank, detail: str, signature: str, work: str) -> Fault:
    member = view.memory.placement[named.rank // view.memory.nproc] if named.rank >= 0 else ""
    since_ns = view.watch.since_ns or named.since_ns
    place = _place(view, named)
    return Fault("hang", named.rank, member, named.step, since_ns, signature, detail, place=place, work=work)


def _named(view: View, holding: list[LateRank]) -> LateRank:
    """Return who of them holds up the group; rank -1 where the evidence cannot tell."""
    evidence = tuple(
        each for each in hung_rank.evidence(view) if each.rank in {seen.rank for seen in holding}
    )
    if len(holding) == 1:
        return holding[0]
    if len(evidence) < len(holding):
        return replace(holding[0], rank=-1)
    found = hung_rank.find_hung_rank(evidence)
    named = next(each for each in holding if each.rank == found.rank)
    return named if len(found.outliers) == 1 else replace(named, rank=-1)


def _ahead(view: View, rest: list[LateRank]) -> set[int]:
    """Return who is further than the one furthest behind, and does nothing but wait: perhaps on a device."""
    looks = {look.rank: look for look in _looks(view)}
    places = {each.rank: (each.step, each.phase_seq) for each in rest if each.rank in looks}
    first = min(places.values(), default=(0, 0))
    still = (evidence.BUSY, evidence.IDLE)
    return {each.rank for each in rest if each.role in still and places.get(each.rank, first) > first}


def _again(view: View, named: LateRank) -> bool:
    """True when a restart has brought the group to the very same point: then it is looked at for longer."""
    place = _place(view, named)
    return any(
        past.kind == "hang" and past.place == place and past.step == named.step
        for past in view.memory.history
        if place
    )


def _standing(view: View, named: LateRank, untold: bool) -> str:
    if untold or named.rank < 0:
        apart = _apart(view)
        if apart:
            return apart
        ranks = ", ".join(str(each.rank) for each in view.watch.ranks)
        return f"ranks {ranks} stand still after step {named.step}, and the evidence does not tell them apart"
    return f"rank {named.rank} has been {_doing(view, named)} since step {named.step}"


def _apart(view: View) -> str:
    """Say where ranks wait that are all in collectives, but at different places of the script; else "".

    That alone is no proof that they will never meet: one may have its result before another, whose part is
    still on its way through a network, and groups of ranks cannot be told apart from outside. What proves it
    is that nothing is on its way: `supervisor.hangs.deadlock`.
    """
    places = {each.rank: _where(view, each) for each in view.watch.ranks}
    if len(set(places.values())) < 2 or not all(each.role == evidence.WAITS for each in view.watch.ranks):
        return ""
    first = sorted(places)[:_NAMED]
    named = ", ".join(f"rank {rank} in {places[rank] or 'an unknown place'}" for rank in first)
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"all ranks wait for each other in collectives at different places: {named}{more}"


def _doing(view: View, named: LateRank) -> str:
    """Say where a rank is and what it waits for."""
    place = _where(view, named)
    where = f"in {place}" if place else f"in {named.phase}"
    if named.role in (evidence.WORKS, evidence.BUSY):
        return f"{where} ({named.work})"
    return f"{where} (waiting for {named.work})" if named.work and named.work != evidence.UNKNOWN else where


def _place(view: View, named: LateRank) -> str:
    """Return the function of the script that a rank is in: the same wherever within it a look finds it."""
    return _LINE.sub(")", _where(view, named))


def _where(view: View, named: LateRank) -> str:
    look = next((each for each in _looks(view) if each.rank == named.rank), None)
    return (look.where or look.at) if look is not None else ""


def _looks(view: View) -> tuple[RankInspection, ...]:
    return tuple(look for report in reports.reports(view) for look in reports.looks(view, report))


def _stalls(view: View) -> dict[int, RankStall]:
    found = (each for report in reports.reports(view) for each in reports.stalls(view, report))
    return {each.rank: each for each in found}


def _late_s(stalls: dict[int, RankStall]) -> float:
    return max((each.limit_s for each in stalls.values()), default=0.0)


def _phases(view: View) -> dict[int, str]:
    """Return the phase of each rank of the group that lives; "" where nothing is known of it."""
    pages = {each.rank: each.phase for report in reports.reports(view) for each in report.progress}
    gone = _gone(view)
    return {rank: pages.get(rank, "") for rank in range(view.memory.world_size) if rank not in gone}


def _gone(view: View) -> set[int]:
    return {rank.rank for rank in reports.ranks(view) if rank.state == "exited"}
