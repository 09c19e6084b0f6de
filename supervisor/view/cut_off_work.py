"""Work beside the steps (saving, evaluating) that a fault cuts off: wait for it, do it again, or say so.

A step that is committed is in the state, so a group that resumes from that state never comes back to what
the script does between the commit and the next step. Such work is usually over in microseconds. Where it is
not, a survivor may finish it before it is ended; and what was cut off is done again by resuming from before
its step.

The same is true of such work within a step, where other ranks have committed the step meanwhile and the group
could resume from that. Nobody can while the rank has not given away its part of the backward pass; so that is
what follows the optimizer's writes, or a pause. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.protocol.launcher_messages import COLLECTIVE, RankState
from holdfast.protocol.member_messages import HeldSnapshot, RankProgress, UncommittedWork
from supervisor.view import failed_start, members, reports
from supervisor.view.model import (
    CutOffWork,
    Fault,
    JobState,
    MemberView,
    Policy,
    ResumePoint,
    UndoneWork,
    View,
    Wait,
)

LONG_S = 0.25  # a machine that is busy for a moment makes a tail of microseconds a tenth of a second long
USUAL = 5.0  # times the median
MOST_S = 600.0  # that is waited for a declared pause, whatever its limit
_NAMED = 3  # of what was cut short, in a line
_S = 1_000_000_000


def wait_for_survivors(view: View, policy: Policy) -> Wait | None:
    """Wait for survivors at work beside the steps, within bounds; None when there is nothing to wait for.

    They cannot be in a collective with the dead: one that gets there fails, and is waited for no longer. When
    the run is to stop, they have no longer than the ranks of a run have to end (`--grace`).
    """
    limits_s = {
        rank.rank: max(policy.tail_s, min(_left_s(at), MOST_S)) for _, rank, at in _at_work(view, policy)
    }
    limits_s |= dict.fromkeys(_on_their_way_out(view, policy), policy.unwind_s)
    most_s = policy.grace_s if view.memory.stop else MOST_S
    deadlines = {
        rank: view.memory.since_ns + int(min(limit_s, most_s) * _S) for rank, limit_s in limits_s.items()
    }
    left = {rank: at_ns for rank, at_ns in deadlines.items() if at_ns > view.now_ns}
    if not left:
        return None
    ranks = ", ".join(map(str, sorted(left)))
    return Wait(min(left.values()), f"rank {ranks} may finish what it is doing outside of a step")


def _on_their_way_out(view: View, policy: Policy) -> Iterator[int]:
    """Yield the ranks that an exception ends whose `finally` blocks still run."""
    for member in view.members:
        report = member.report
        if report is None or report.launcher is None or members.is_lost(view, member, policy):
            continue
        for rank in report.launcher.ranks:
            ending = rank.ending
            if rank.generation != view.memory.generation or rank.state != "failing" or ending is None:
                continue
            out = reports.is_unwinding(report, rank) and not ending.overdue
            if out and ending.fail == "exception" and members.is_reporting(member):
                yield rank.rank


def _at_work(view: View, policy: Policy) -> Iterator[tuple[MemberView, RankState, RankProgress]]:
    hung = _hung(view)
    for member, rank, at in (*_tails(view), *_early(view)):
        alive = (
            rank.state == "running"
            and members.is_reporting(member)
            and not members.is_lost(view, member, policy)
        )
        if alive and rank.rank not in hung and rank.where != COLLECTIVE:
            yield member, rank, at


def _left_s(at: RankProgress) -> float:
    return max(at.pause_left_s, at.early.left_s if at.early is not None else 0.0)


def _tails(view: View) -> Iterator[tuple[MemberView, RankState, RankProgress]]:
    """Yield the ranks of the present generation whose last sign was work after a commit."""
    return (each for each in _ranks(view) if each[2].tail_s > 0)


def _early(view: View) -> Iterator[tuple[MemberView, RankState, RankProgress]]:
    """Yield the ranks whose last sign was work within a step of which another has the state with the step.

    What ended by itself there is no work that was cut off: see `_has_left` for an exception in a pause.
    """
    beyond = max((slot.step for slot in _slots(view)), default=-1)
    for member, rank, at in _ranks(view):
        ended = rank.ending is not None and rank.ending.signal is None
        if ended or not 0 <= at.step < beyond or at.early is None:
            continue
        if _is_unusual(at.early) or (at.early.declared and members.is_reporting(member)):
            yield member, rank, at


def _slots(view: View) -> Iterator[HeldSnapshot]:
    for member in view.members:
        for slot in member.report.slots if member.report is not None else ():
            if slot.generation == view.memory.generation:
                yield slot


def _ranks(view: View) -> Iterator[tuple[MemberView, RankState, RankProgress]]:
    """Yield the ranks of the present generation with what was last heard of each."""
    for member in view.members:
        report = member.report
        if report is None or report.launcher is None or member.name not in view.memory.placement:
            continue
        progress = {each.rank: each for each in report.progress}
        for rank in report.launcher.ranks:
            if rank.generation == view.memory.generation and rank.rank in progress:
                yield member, rank, progress[rank.rank]


def _hung(view: View) -> frozenset[int]:
    """Return the ranks that have had their time: named as hanging, or over a limit of their own."""
    known = view.memory.incident
    found = known.faults if known is not None and known.generation == view.memory.generation else ()
    named = {fault.rank for fault in found if fault.kind == "hang"}
    late = [each for report in reports.reports(view) for each in reports.stalls(view, report)]
    untold = -1 in named  # the evidence did not tell apart those that stand still
    return frozenset(named | {each.rank for each in late if each.limited or untold})


def find(view: View, found: tuple[Fault, ...]) -> tuple[CutOffWork, ...]:
    """Return the work that a restart now leaves undone, unless it resumes at or before its `at_most` steps.

    That is what a script raised an exception in, wherever it was; a declared pause that a rank has not left,
    or only with an exception, however short; and what took longer after a commit, or before it, than it
    usually does. A rank that waits for its peers has lost nothing by that, unless it does so in a pause: what
    it was to do there comes after.
    """
    raised = {fault.rank: fault for fault in found if fault.kind == "exception"}
    cuts: dict[int, CutOffWork] = {}
    ahead = max((at.step for _, _, at in _ranks(view)), default=-1)
    for member, rank, at in _tails(view):
        over = reports.ended_well(rank)
        # What a lost member told last may be of a step that others could not have gone beyond without it.
        declared = at.tail_declared and (members.is_reporting(member) or at.step == ahead)
        is_work = declared or _has_left(rank, at) or (_is_long(at) and rank.where != COLLECTIVE)
        if over or (rank.rank not in raised and not is_work):
            continue
        cuts[rank.rank] = CutOffWork(rank.rank, at.step, at.step - 1, _told_s(at.tail_s), rank.rank in raised)
    for _, rank, at in _early(view):
        waits = rank.where == COLLECTIVE and not (at.early is not None and at.early.declared)
        if at.early is not None and rank.rank not in raised and not waits:
            cuts[rank.rank] = CutOffWork(rank.rank, at.step, at.step, _told_s(at.early.seconds), early=True)
    beyond = max((slot.step for slot in _slots(view)), default=-1)
    for _, rank, at in _ranks(view):
        if rank.rank not in cuts and rank.rank not in raised and _has_left(rank, at) and at.step < beyond:
            cuts[rank.rank] = CutOffWork(rank.rank, at.step, at.step, _told_s(0.0), early=True)
    for rank_number, fault in raised.items():
        if rank_number not in cuts and fault.step >= 0:
            cuts[rank_number] = CutOffWork(rank_number, fault.step, fault.step, 0.0, True)
    return (*(cuts[number] for number in sorted(cuts)), *failed_start.cut_off_before(view.memory))


def void_steps(view: View) -> frozenset[int]:
    """Return the steps of the present generation that the script changed after their commit: see `Progress`.

    Not those of which every rank that can be heard has made its copies with the change. Of two ranks at one
    such step, one may have copied it before; one that is beyond it has forgotten that.
    """
    ranks = [each for report in reports.reports(view) for each in reports.progress(view, report)]
    found = {step for each in ranks for step in each.late} | set(recorded_void_steps(view.memory))
    amended = {step for each in ranks for step in each.amended}
    partly = {
        step
        for step in amended
        for each in ranks
        if each.step >= step and step not in each.amended and max(each.amended, default=-1) < step
    }
    return frozenset(found | partly)


def recorded_void_steps(memory: JobState) -> tuple[int, ...]:
    """Return the steps of the present generation of which no copy is to be used."""
    return tuple(sorted({each.step for each in memory.void if each.generation == memory.generation}))


def void_states(view: View) -> frozenset[tuple[int, int]]:
    """Return generation and step of the states that are passed over."""
    now = view.memory.generation
    before = {(each.generation, each.step) for each in view.memory.void if each.generation != now}
    return frozenset(before | {(now, step) for step in void_steps(view)})


def publishable_step(view: View, member: MemberView) -> int:
    """Return the step of which `member` would write a checkpoint, -1 while some rank may make it void yet.

    A rank that has committed the next step has looked before that at what the script did after this one.
    """
    report = member.report
    if report is None or report.publishing < 0:
        return -1
    ranks = {each.rank: each for found in reports.reports(view) for each in reports.progress(view, found)}
    beyond = all(each.step > report.publishing for each in ranks.values())
    if len(ranks) < view.memory.world_size or not beyond or report.publishing in void_steps(view):
        return -1
    return report.publishing


def describe_passed_over(view: View, step: int) -> str:
    """Say which state beyond `step` cannot be used for that, "" for none."""
    beyond = [each for each in void_steps(view) if each > step]
    return f"the state of step {max(beyond)} was changed after its commit and is not used" if beyond else ""


def lost_changes(view: View, resumed: ResumePoint) -> tuple[CutOffWork, ...]:
    """Return the changes after a commit that are lost with a group that resumes at `resumed` all the same."""
    state = (resumed.generation, resumed.step)
    if resumed.source == "none" or state not in void_states(view):
        return ()
    ranks = {
        each.rank
        for report in reports.reports(view)
        for each in reports.progress(view, report)
        if resumed.generation == view.memory.generation and resumed.step in (*each.late, *each.amended)
    }
    ranks |= {each.rank for each in view.memory.void if (each.generation, each.step) == state}
    return tuple(CutOffWork(rank, resumed.step, resumed.step - 1) for rank in sorted(ranks))


def _has_left(rank: RankState, at: RankProgress) -> bool:
    """True for a rank that an exception ends, which came out of a pause of the script."""
    return rank.ending is not None and not rank.ending.is_good and rank.ending.paused == at.step >= 0


def _is_long(at: RankProgress) -> bool:
    return at.tail_s > max(LONG_S, USUAL * at.tail_usual_s)


def _is_unusual(work: UncommittedWork) -> bool:
    """True for what is not done in each step; a pause is the script's own word that it is work."""
    return work.seconds > max(0.0 if work.declared else LONG_S, USUAL * work.usual_s)


def _told_s(seconds: float) -> float:
    """Return for how long work went on as incidents tell it: never 0, which stands for no work."""
    return max(0.001, round(seconds, 3))


def latest_resume_step(cuts: tuple[CutOffWork, ...], bound: int | None) -> int | None:
    """Return the most steps that a resume point may have that does all of `cuts` again, within `bound`."""
    limits = [each.at_most for each in cuts] + ([bound] if bound is not None else [])
    return min(limits, default=None)


def not_repeated(cuts: tuple[CutOffWork, ...], step: int) -> tuple[CutOffWork, ...]:
    """Return those that a group which resumes at `step` does not come back to."""
    return tuple(each for each in cuts if step > each.at_most)


def describe(cuts: tuple[CutOffWork, ...] | tuple[UndoneWork, ...]) -> str:
    """Say how often work was cut short, and where."""
    times = "1 time" if len(cuts) == 1 else f"{len(cuts)} times"
    return f"work {side_of_commit(cuts)} commit was cut short {times}: {list_places(cuts, _NAMED)}"


def side_of_commit(cuts: tuple[CutOffWork, ...] | tuple[UndoneWork, ...]) -> str:
    """Say on which side of a commit it was."""
    sides = {"before" if each.early else "after" for each in cuts}
    return " or ".join(sorted(sides, reverse=True))


def list_places(cuts: tuple[CutOffWork, ...] | tuple[UndoneWork, ...], most: int) -> str:
    """Name the first `most` of them, and how many more there are."""
    first = ", ".join(
        f"rank {each.rank} {'in' if each.early else 'after'} step {each.step}" for each in cuts[:most]
    )
    return f"{first} and {len(cuts) - most} more" if len(cuts) > most else first
