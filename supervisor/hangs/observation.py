"""A group in which no step ends: which ranks are late since when, and what inspections showed. Pure.

A view alone has no past, so the supervisor folds each view into what it knew before (`update`). A new
supervisor begins with what the members report again: since when the ranks wait, and what they do now.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.launcher_messages import RankInspection
from holdfast.protocol.member_messages import RankStall
from supervisor.hangs import deadlock, evidence
from supervisor.view import reports
from supervisor.view.model import LateRank, LearnedStall, MemberView, PendingException, StallWatch, View

ENDED = frozenset({"idle", "done"})  # phases of a rank that is in no loop
IN_LOOP = frozenset({"joining", "restoring", "data", "forward", "backward", "optimizer", "tail"})
WORTH_S = 5.0  # a shorter stall, over without a restart, teaches nothing: the limits are longer anyway


def update(watch: StallWatch, view: View) -> StallWatch:
    """Return `watch` after `view`."""
    memory = view.memory
    if watch.generation != memory.generation:
        watch = StallWatch(memory.generation)
    if memory.phase != "running":
        return StallWatch(memory.generation)
    untold_ns = watch.untold_ns or view.now_ns
    watch = replace(
        watch,
        hints=_hints(watch, view),
        untold_ns=untold_ns if reports.members_without_rank_report(view) else 0,
    )
    before = {each.rank: each for each in watch.ranks}
    found: list[LateRank] = []
    for member in view.members:
        report = member.report
        if report is None or member.name not in memory.placement:
            continue
        looks = {look.rank: look for look in reports.looks(view, report)}
        found += [
            _seen(before.get(stall.rank), view, member, stall, looks.get(stall.rank))
            for stall in reports.stalls(view, report)
        ]
    found += _others(before, view, frozenset(each.rank for each in found))
    found = _with_stopped(found, before, view)
    ranks = tuple(sorted(found, key=lambda each: each.rank))
    if not ranks and watch.ranks:
        return replace(watch, ranks=(), rests=(), passed=_passed(watch, view))
    return replace(watch, ranks=ranks, rests=deadlock.update_resting(watch.rests, view) if ranks else ())


def _hints(watch: StallWatch, view: View) -> tuple[PendingException, ...]:
    """Return the exceptions that are perhaps ending their ranks, and since when each is known."""
    known = {(each.rank, each.failed_ns): each for each in watch.hints}
    found: list[PendingException] = []
    for report in reports.reports(view):
        assert report.launcher is not None
        for rank in report.launcher.ranks:
            if rank.ending is not None and reports.is_unwinding(report, rank):
                key = (rank.rank, rank.ending.failed_ns)
                found.append(known.get(key) or PendingException(*key, view.now_ns))
    return tuple(found)


def _with_stopped(found: list[LateRank], before: dict[int, LateRank], view: View) -> list[LateRank]:
    """Return `found` with the ranks that their launchers report as stopped, late or not: all will wait."""
    known = {each.rank: each for each in found}
    for report in reports.reports(view):
        assert report.launcher is not None
        phases = {each.rank: each.phase for each in report.progress}
        for rank in report.launcher.ranks:
            if not rank.stopped or rank.generation != view.memory.generation:
                continue
            late = before.get(rank.rank)
            if late is None or late.role != evidence.STOPPED:
                step = reports.step_of(report, rank.rank)
                late = LateRank(rank.rank, step, phases.get(rank.rank, "starting"), view.now_ns)
            known[rank.rank] = replace(known.get(rank.rank, late), role=evidence.STOPPED)
    return list(known.values())


def _others(before: dict[int, LateRank], view: View, late: frozenset[int]) -> list[LateRank]:
    """Return the ranks that are not late and must be watched all the same.

    Those are ranks that live and are in no loop, while others may wait for them; and ranks that are still in
    their loop after another has left it for good.
    """
    phases = (ENDED if late else frozenset()) | (IN_LOOP if _has_left(view) else frozenset())
    found: list[LateRank] = []
    for report in reports.reports(view):
        assert report.launcher is not None
        alive = {rank.rank for rank in report.launcher.ranks if rank.state == "running"}
        looks = {look.rank: look for look in reports.looks(view, report)}
        for at in report.progress:
            if at.rank not in alive or at.rank in late or at.phase not in phases:
                continue
            seen = before.get(at.rank)
            if seen is None or (seen.step, seen.phase) != (at.step, at.phase):
                seen = LateRank(at.rank, at.step, at.phase, view.now_ns)
            look = looks.get(at.rank)
            fresh = look is not None and look.number != seen.look
            found.append(_looked(seen, look, view.now_ns) if look is not None and fresh else seen)
    return found


def _has_left(view: View) -> bool:
    """True when a rank of the group has ended well."""
    return any(map(reports.ended_well, reports.ranks(view)))


def discount_pause(watch: StallWatch, late_ns: int) -> StallWatch:
    """Return `watch` without a time of `late_ns` in which the supervisor did not run and saw nothing."""
    moved = tuple(
        replace(
            each,
            since_ns=each.since_ns + late_ns,
            worked_ns=each.worked_ns + late_ns,
            apart_ns=each.apart_ns and each.apart_ns + late_ns,
        )
        for each in watch.ranks
    )
    hints = tuple(replace(each, since_ns=each.since_ns + late_ns) for each in watch.hints)
    untold_ns = watch.untold_ns and watch.untold_ns + late_ns
    return replace(watch, ranks=moved, hints=hints, untold_ns=untold_ns)


def _seen(
    before: LateRank | None, view: View, member: MemberView, stall: RankStall, look: RankInspection | None
) -> LateRank:
    if before is None or (before.step, before.phase) != (stall.step, stall.phase_name):
        since_ns = view.now_ns - int((member.silent_s + stall.stalled_s) * 1e9)
        same = before is not None and before.step == stall.step
        apart_ns = before.apart_ns if before is not None and same else 0
        before = LateRank(stall.rank, stall.step, stall.phase_name, since_ns, apart_ns=apart_ns)
    before = replace(before, begun=stall.begun)
    if look is None or look.step not in (stall.step, -1) or look.number == before.look:
        return before
    return _looked(before, look, view.now_ns)


def _looked(before: LateRank, look: RankInspection, now_ns: int) -> LateRank:
    found = evidence.findings(look)
    at = look.at.rpartition(":")[0]
    again = before.look > 0
    signs = found.evidence if before.begun else evidence.shows_work(look)
    moved = signs or (again and (look.phase_seq, at) != (before.phase_seq, before.at))
    role, work = found.role, found.work
    if moved and role in (evidence.BUSY, evidence.IDLE, evidence.LOCKED):
        role, work = evidence.WORKS, work or evidence.COMPUTES
    works = before.works if not work or work in before.works else (*before.works, work)
    apart = evidence.waits_for_no_rank(look)
    return replace(
        before,
        role=role,
        work=work,
        worked_ns=now_ns if moved else before.worked_ns,
        busy=before.busy or role == evidence.BUSY,
        look=look.number,
        phase_seq=look.phase_seq,
        at=at,
        works=works,
        looks=before.looks + 1,
        apart=apart,
        apart_ns=now_ns if apart else before.apart_ns,
    )


def _passed(watch: StallWatch, view: View) -> tuple[LearnedStall, ...]:
    """Return how long a stall lasted that is over without a restart, for each kind of work seen in it."""
    lasted_s = (view.now_ns - watch.since_ns) / 1e9
    if lasted_s < WORTH_S or not all(each.begun for each in watch.ranks):
        return watch.passed
    kinds = dict.fromkeys(work for each in watch.ranks for work in each.works if work != evidence.COLLECTIVE)
    kinds = kinds or dict.fromkeys(work for each in watch.ranks for work in each.works)
    return tuple(LearnedStall(kind, round(lasted_s, 1)) for kind in kinds)
