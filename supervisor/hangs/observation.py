"""Track a group that completes no steps: which ranks are late, since when, and what inspections showed. Pure.

A view has no history, so the supervisor updates its `StallWatch` with each view (`update`). A new supervisor
rebuilds the watch from the members' reports, which say how long each rank has waited and what it is doing.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.launcher_messages import RankInspection
from holdfast.protocol.member_messages import RankStall
from holdfast.protocol.progress import NOT_BEGUN, PhaseKind, names_of_kinds
from supervisor.hangs import deadlock, evidence
from supervisor.view import reports
from supervisor.view.model import LateRank, LearnedStall, MemberView, PendingException, StallWatch, View

WORTH_S = 5.0  # shorter stalls are not remembered, because all limits are longer
_ENDS = names_of_kinds(PhaseKind.END)
_IN_LOOP = names_of_kinds(PhaseKind.START, PhaseKind.STEP, PhaseKind.TAIL)


def update(watch: StallWatch, view: View) -> StallWatch:
    """Return `watch` updated with the reports in `view`."""
    memory = view.memory
    if watch.generation != memory.generation:
        watch = StallWatch(memory.generation)
    if memory.phase != "running":
        return StallWatch(memory.generation)
    untold_ns = watch.untold_ns or view.now_ns
    watch = replace(
        watch,
        hints=_pending_exceptions(watch, view),
        untold_ns=untold_ns if reports.members_without_rank_report(view) else 0,
    )
    before = {each.rank: each for each in watch.ranks}
    late: list[LateRank] = []
    for member in view.members:
        report = member.report
        if report is None or member.name not in memory.positions:
            continue
        inspections = {each.rank: each for each in reports.inspections(view, report)}
        late += [
            _late_rank(before.get(stall.rank), view, member, stall, inspections.get(stall.rank))
            for stall in reports.stalls(view, report)
        ]
    late += _watched_in_time(before, view, frozenset(each.rank for each in late))
    late = _with_stopped(late, before, view)
    ranks = tuple(sorted(late, key=lambda each: each.rank))
    if not ranks and watch.ranks:
        return replace(watch, ranks=(), rests=(), passed=_learned(watch, view))
    return replace(watch, ranks=ranks, rests=deadlock.update_resting(watch.rests, view) if ranks else ())


def discount_pause(watch: StallWatch, late_ns: int) -> StallWatch:
    """Return `watch` with its times moved forward by `late_ns`, during which the supervisor did not run."""
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


def _pending_exceptions(watch: StallWatch, view: View) -> tuple[PendingException, ...]:
    """Return the exceptions that may be about to end their ranks, with the time of their first report."""
    known = {(each.rank, each.failed_ns): each for each in watch.hints}
    found: list[PendingException] = []
    for report in reports.reports(view):
        assert report.launcher is not None
        for rank in report.launcher.ranks:
            if rank.ending is not None and reports.is_unwinding(report, rank):
                key = (rank.rank, rank.ending.failed_ns)
                found.append(known.get(key) or PendingException(*key, view.now_ns))
    return tuple(found)


def _late_rank(
    before: LateRank | None,
    view: View,
    member: MemberView,
    stall: RankStall,
    inspection: RankInspection | None,
) -> LateRank:
    """Return the record of a rank that its sidecar reports as late, updated with a new inspection if any."""
    if before is None or (before.step, before.phase) != (stall.step, stall.phase_name):
        since_ns = view.now_ns - int((member.silent_s + stall.stalled_s) * 1e9)
        is_same_step = before is not None and before.step == stall.step
        apart_ns = before.apart_ns if before is not None and is_same_step else 0
        before = LateRank(stall.rank, stall.step, stall.phase_name, since_ns, apart_ns=apart_ns)
    before = replace(before, begun=stall.begun, first_step=stall.first_step)
    if inspection is None or inspection.step not in (stall.step, -1) or inspection.number == before.look:
        return before
    return _inspected(before, inspection, view.now_ns)


def _watched_in_time(before: dict[int, LateRank], view: View, late: frozenset[int]) -> list[LateRank]:
    """Return the ranks that are watched although they are not late.

    While other ranks are late, these are the live ranks that have left their loop, because the late ranks may
    wait for them. After a rank has finished, they include the ranks that are still in their loop.
    """
    phases = (_ENDS if late else frozenset()) | (_IN_LOOP if _has_left(view) else frozenset())
    found: list[LateRank] = []
    for report in reports.reports(view):
        assert report.launcher is not None
        alive = {rank.rank for rank in report.launcher.ranks if rank.state == "running"}
        inspections = {each.rank: each for each in reports.inspections(view, report)}
        for at in report.progress:
            if at.rank not in alive or at.rank in late or at.phase not in phases:
                continue
            known = before.get(at.rank)
            if known is None or (known.step, known.phase) != (at.step, at.phase):
                known = LateRank(at.rank, at.step, at.phase, view.now_ns)
            inspection = inspections.get(at.rank)
            if inspection is not None and inspection.number != known.look:
                known = _inspected(known, inspection, view.now_ns)
            found.append(known)
    return found


def _has_left(view: View) -> bool:
    """True if a rank of the group has run its script to the end."""
    return any(map(reports.has_finished, reports.ranks(view)))


def _with_stopped(late: list[LateRank], before: dict[int, LateRank], view: View) -> list[LateRank]:
    """Return `late` plus the ranks that launchers report as stopped.

    The other ranks will soon be waiting for them.
    """
    known = {each.rank: each for each in late}
    for report in reports.reports(view):
        assert report.launcher is not None
        phases = {each.rank: each.phase for each in report.progress}
        for rank in report.launcher.ranks:
            if not rank.stopped or rank.generation != view.memory.generation:
                continue
            stopped = before.get(rank.rank)
            if stopped is None or stopped.role != evidence.STOPPED:
                step = reports.step_of(report, rank.rank)
                stopped = LateRank(rank.rank, step, phases.get(rank.rank, NOT_BEGUN), view.now_ns)
            known[rank.rank] = replace(known.get(rank.rank, stopped), role=evidence.STOPPED)
    return list(known.values())


def _inspected(before: LateRank, inspection: RankInspection, now_ns: int) -> LateRank:
    """Return `before` updated with a new inspection of the rank."""
    found = evidence.findings(inspection)
    at = inspection.at.rpartition(":")[0]
    is_later = before.look > 0
    signs = found.shows_progress if before.begun else evidence.shows_work(inspection)
    moved = signs or (is_later and (inspection.phase_seq, at) != (before.phase_seq, before.at))
    role, work = found.role, found.work
    if moved and role in (evidence.BUSY, evidence.IDLE, evidence.LOCKED):
        role, work = evidence.WORKS, work or evidence.COMPUTES
    works = before.works if not work or work in before.works else (*before.works, work)
    apart = evidence.waits_for_no_rank(inspection)
    return replace(
        before,
        role=role,
        work=work,
        worked_ns=now_ns if moved else before.worked_ns,
        busy=before.busy or role == evidence.BUSY,
        look=inspection.number,
        phase_seq=inspection.phase_seq,
        at=at,
        works=works,
        looks=before.looks + 1,
        apart=apart,
        apart_ns=now_ns if apart else before.apart_ns,
    )


def _learned(watch: StallWatch, view: View) -> tuple[LearnedStall, ...]:
    """Return the duration of a stall that ended without a restart, for each kind of work seen during it.

    A first step, which may compile and load, says nothing about the duration of later ones.
    """
    lasted_s = (view.now_ns - watch.since_ns) / 1e9
    is_usual = all(each.begun and not each.first_step for each in watch.ranks)
    if lasted_s < WORTH_S or not is_usual:
        return watch.passed
    kinds = dict.fromkeys(work for each in watch.ranks for work in each.works if work != evidence.COLLECTIVE)
    kinds = kinds or dict.fromkeys(work for each in watch.ranks for work in each.works)
    return tuple(LearnedStall(kind, round(lasted_s, 1)) for kind in kinds)
