"""Handle work outside steps that a restart would interrupt, such as saving or evaluating. Pure.

The script's work between a commit and the next step is the tail of the committed step. A group that resumes
from the state of that step does not repeat its tail. A tail usually takes microseconds. If it takes longer,
survivors get time to finish it before their processes are ended. If a tail was interrupted, the group resumes
from an earlier step to repeat it. If there is no earlier state, the tail is reported as missed.

The same applies to work within a step if other ranks have already committed that step, because the group
could resume from its state. No rank can commit a step before all ranks have contributed to the backward pass,
so such work is either a pause or comes after the optimizer's writes.

A step is void if the script changed its state after the commit. Copies made before the change are not used.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.protocol.launcher_messages import COLLECTIVE, RankState
from holdfast.protocol.member_messages import HeldSnapshot, RankProgress, UncommittedWork
from supervisor.identity_cache import by_identity
from supervisor.view import failed_start, members, reports
from supervisor.view.model import (
    SECOND_NS,
    Fault,
    InterruptedWork,
    JobState,
    MemberView,
    MissedWork,
    Policy,
    ResumePoint,
    View,
    Wait,
)

LONG_S = 0.25  # shorter tails are ignored: a load spike can stretch microseconds to a tenth of a second
USUAL_FACTOR = 5.0  # work is unusual if it takes longer than this multiple of the median duration
MAX_PAUSE_WAIT_S = 600.0  # the longest wait for a declared pause, even if its own limit is higher
_MAX_LISTED = 3  # how many places of interrupted work one line lists


def wait_for_survivors(view: View, policy: Policy) -> Wait | None:
    """Return a bounded wait for survivors that are working outside a step; None if there are none.

    Such a rank is not blocked in a collective with a dead rank. If it enters a collective, it fails, which
    ends the wait. While the run is stopping, the wait is at most `--grace`, which is the time that ranks have
    to exit.
    """
    limits_s = {
        rank.rank: max(policy.tail_s, min(_pause_left_s(at), MAX_PAUSE_WAIT_S))
        for _, rank, at in _working_survivors(view, policy)
    }
    limits_s |= dict.fromkeys(_ending_by_exception(view, policy), policy.unwind_s)
    most_s = policy.grace_s if view.memory.stop else MAX_PAUSE_WAIT_S
    deadlines = {
        rank: view.memory.since_ns + int(min(limit_s, most_s) * SECOND_NS)
        for rank, limit_s in limits_s.items()
    }
    pending = {rank: at_ns for rank, at_ns in deadlines.items() if at_ns > view.now_ns}
    if not pending:
        return None
    ranks = ", ".join(map(str, sorted(pending)))
    return Wait(min(pending.values()), f"waiting for rank {ranks} to finish work outside of a step")


def _ending_by_exception(view: View, policy: Policy) -> Iterator[int]:
    """Yield the ranks that raised an exception and are still running their `finally` blocks."""
    for member in view.members:
        report = member.report
        if report is None or report.launcher is None or members.is_lost(view, member, policy):
            continue
        for rank in report.launcher.ranks:
            ending = rank.ending
            if rank.generation != view.memory.generation or rank.state != "failing" or ending is None:
                continue
            unwinding = reports.is_unwinding(report, rank) and not ending.overdue
            if unwinding and ending.fail == "exception" and members.is_reporting(member):
                yield rank.rank


def _working_survivors(view: View, policy: Policy) -> Iterator[tuple[MemberView, RankState, RankProgress]]:
    """Yield the live ranks that are working outside a step and get time to finish."""
    hung = _hung(view)
    for member, rank, at in (*_in_tail(view), *_at_early_work(view)):
        alive = (
            rank.state == "running"
            and members.is_reporting(member)
            and not members.is_lost(view, member, policy)
        )
        if alive and rank.rank not in hung and rank.where != COLLECTIVE:
            yield member, rank, at


def _pause_left_s(at: RankProgress) -> float:
    """Return the seconds until the declared pause reaches its limit; 0 outside a pause."""
    return max(at.pause_left_s, at.early.left_s if at.early is not None else 0.0)


def _in_tail(view: View) -> Iterator[tuple[MemberView, RankState, RankProgress]]:
    """Yield the ranks of the current generation whose last report shows work after a commit."""
    return (each for each in _ranks(view) if each[2].tail_s > 0)


def _at_early_work(view: View) -> Iterator[tuple[MemberView, RankState, RankProgress]]:
    """Yield the ranks whose last report shows work in a step that another rank has already snapshotted.

    A rank whose process ended during that work without a signal was not interrupted, so it is not included.
    `_raised_in_pause` finds the ranks that raised an exception in a pause.
    """
    newest = max((snapshot.step for snapshot in _snapshots(view)), default=-1)
    for member, rank, at in _ranks(view):
        ended = rank.ending is not None and rank.ending.signal is None
        if ended or not 0 <= at.step < newest or at.early is None:
            continue
        if _is_unusual(at.early) or (at.early.declared and members.is_reporting(member)):
            yield member, rank, at


def _snapshots(view: View) -> Iterator[HeldSnapshot]:
    """Yield the snapshots of the current generation that the members hold."""
    for member in view.members:
        for snapshot in member.report.slots if member.report is not None else ():
            if snapshot.generation == view.memory.generation:
                yield snapshot


def _ranks(view: View) -> Iterator[tuple[MemberView, RankState, RankProgress]]:
    """Yield the ranks of the current generation with their last reported progress."""
    for member in view.members:
        report = member.report
        if report is None or report.launcher is None or member.name not in view.memory.positions:
            continue
        progress = {each.rank: each for each in report.progress}
        for rank in report.launcher.ranks:
            if rank.generation == view.memory.generation and rank.rank in progress:
                yield member, rank, progress[rank.rank]


def _hung(view: View) -> frozenset[int]:
    """Return the ranks that get no more time because they hang or have exceeded the limit of their phase."""
    incident = view.memory.incident
    same = incident is not None and incident.generation == view.memory.generation
    blamed = {fault.rank for fault in (incident.faults if incident and same else ()) if fault.kind == "hang"}
    stalls = [each for report in reports.reports(view) for each in reports.stalls(view, report)]
    unknown = -1 in blamed  # the evidence does not show which stalled rank hangs
    return frozenset(blamed | {each.rank for each in stalls if each.limited or unknown})


def find(view: View, found: tuple[Fault, ...]) -> tuple[InterruptedWork, ...]:
    """Return the work that a restart would interrupt now.

    Each piece is repeated only if the group resumes at or before its step `at_most`. Three kinds of work
    are included:

    - work in any phase where the script raised an exception;
    - a declared pause of any length, if the rank is still in it or an exception ended it;
    - work before or after a commit that takes longer than usual.

    A rank that waits for its peers loses no work. This does not apply to a wait in a pause, because the
    rank's own work in the pause can follow the wait.
    """
    raised = {fault.rank: fault for fault in found if fault.kind == "exception"}
    cuts: dict[int, InterruptedWork] = {}
    ahead = max((at.step for _, _, at in _ranks(view)), default=-1)
    for member, rank, at in _in_tail(view):
        done = reports.has_finished(rank)
        # If other ranks are past the step that a lost member last reported, that member had passed the step
        # too.
        declared = at.tail_declared and (members.is_reporting(member) or at.step == ahead)
        is_work = declared or _raised_in_pause(rank, at) or (_is_long(at) and rank.where != COLLECTIVE)
        if done or (rank.rank not in raised and not is_work):
            continue
        cuts[rank.rank] = InterruptedWork(
            rank.rank, at.step, at.step - 1, _recorded_s(at.tail_s), rank.rank in raised
        )
    for _, rank, at in _at_early_work(view):
        waits = rank.where == COLLECTIVE and not (at.early is not None and at.early.declared)
        if at.early is not None and rank.rank not in raised and not waits:
            cuts[rank.rank] = InterruptedWork(
                rank.rank, at.step, at.step, _recorded_s(at.early.seconds), early=True
            )
    newest = max((snapshot.step for snapshot in _snapshots(view)), default=-1)
    for _, rank, at in _ranks(view):
        if (
            rank.rank not in cuts
            and rank.rank not in raised
            and _raised_in_pause(rank, at)
            and at.step < newest
        ):
            cuts[rank.rank] = InterruptedWork(rank.rank, at.step, at.step, _recorded_s(0.0), early=True)
    for rank_number, fault in raised.items():
        if rank_number not in cuts and fault.step >= 0:
            cuts[rank_number] = InterruptedWork(rank_number, fault.step, fault.step, 0.0, True)
    return (*(cuts[number] for number in sorted(cuts)), *failed_start.interrupted_before(view.memory))


@by_identity(1)
def void_steps(view: View) -> frozenset[int]:
    """Return the steps of the current generation whose state must not be restored.

    The script changed the state of such a step after its commit, and a rank copied its state before the
    change. If the copies of all ranks that still report the step contain the change, the step is not void.
    Ranks that have passed the step no longer report it.
    """
    ranks = [each for report in reports.reports(view) for each in reports.progress(view, report)]
    changed = {step for each in ranks for step in each.late} | set(recorded_void_steps(view.memory))
    amended = {step for each in ranks for step in each.amended}
    partly = {
        step
        for step in amended
        for each in ranks
        if each.step >= step and step not in each.amended and max(each.amended, default=-1) < step
    }
    return frozenset(changed | partly)


def recorded_void_steps(memory: JobState) -> tuple[int, ...]:
    """Return the void steps of the current generation that the journal records."""
    return tuple(sorted({each.step for each in memory.void if each.generation == memory.generation}))


def void_states(view: View) -> frozenset[tuple[int, int]]:
    """Return each void state as its generation and step."""
    now = view.memory.generation
    before = {(each.generation, each.step) for each in view.memory.void if each.generation != now}
    return frozenset(before | {(now, step) for step in void_steps(view)})


def publishable_step(view: View, member: MemberView) -> int:
    """Return the step whose checkpoint `member` may publish; -1 while a rank could still make the step void.

    Before a rank commits a step, it checks whether its state has changed since the previous commit. After all
    ranks have committed the next step, the member's step can therefore no longer become void.
    """
    report = member.report
    if report is None or report.publishing < 0:
        return -1
    known, lowest = _lowest_step(view)
    if known < view.memory.world_size or lowest <= report.publishing:
        return -1
    return -1 if report.publishing in void_steps(view) else report.publishing


@by_identity(1)
def _lowest_step(view: View) -> tuple[int, int]:
    """Return how many ranks of the current generation report progress, and the lowest of their steps."""
    found = [each for report in reports.reports(view) for each in reports.progress(view, report)]
    return len({each.rank for each in found}), min((each.step for each in found), default=-1)


def describe_passed_over(view: View, step: int) -> str:
    """Return a sentence about the newest void state beyond `step`; "" if there is none."""
    beyond = [each for each in void_steps(view) if each > step]
    return f"the state of step {max(beyond)} was changed after its commit and is not used" if beyond else ""


def lost_changes(view: View, resumed: ResumePoint) -> tuple[InterruptedWork, ...]:
    """Return the changes that resuming from `resumed` would lose; () if that state is not void."""
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
    return tuple(InterruptedWork(rank, resumed.step, resumed.step - 1) for rank in sorted(ranks))


def _raised_in_pause(rank: RankState, at: RankProgress) -> bool:
    """True if the rank is ending or has ended because the script raised an exception in a pause."""
    return rank.ending is not None and not rank.ending.is_good and rank.ending.paused == at.step >= 0


def _is_long(at: RankProgress) -> bool:
    return at.tail_s > max(LONG_S, USUAL_FACTOR * at.tail_usual_s)


def _is_unusual(work: UncommittedWork) -> bool:
    """True if the work takes longer than in other steps. In a declared pause, there is no minimum."""
    return work.seconds > max(0.0 if work.declared else LONG_S, USUAL_FACTOR * work.usual_s)


def _recorded_s(seconds: float) -> float:
    """Return a duration as incidents record it: at least 1 ms, because 0 means that it is unknown."""
    return max(0.001, round(seconds, 3))


def latest_resume_step(cuts: tuple[InterruptedWork, ...], bound: int | None) -> int | None:
    """Return the newest step up to `bound` that makes the script repeat all of `cuts`; None: any step."""
    limits = [each.at_most for each in cuts] + ([bound] if bound is not None else [])
    return min(limits, default=None)


def not_repeated(cuts: tuple[InterruptedWork, ...], step: int) -> tuple[InterruptedWork, ...]:
    """Return the `cuts` that the script does not repeat if the group resumes at `step`."""
    return tuple(each for each in cuts if step > each.at_most)


def outside_of_steps(cuts: tuple[InterruptedWork, ...]) -> tuple[InterruptedWork, ...]:
    """Return the `cuts` without exceptions that were raised in a step. The next run begins with that step."""
    return tuple(each for each in cuts if each.early or each.at_most < each.step or not each.raised)


def describe(cuts: tuple[InterruptedWork, ...] | tuple[MissedWork, ...]) -> str:
    """Return a clause that says how often work was cut short, and where."""
    times = "1 time" if len(cuts) == 1 else f"{len(cuts)} times"
    return f"work {side_of_commit(cuts)} commit was cut short {times}: {list_places(cuts, _MAX_LISTED)}"


def side_of_commit(cuts: tuple[InterruptedWork, ...] | tuple[MissedWork, ...]) -> str:
    """Return the side of the commit that the work was on: "after", "before" or "before or after"."""
    sides = {"before" if each.early else "after" for each in cuts}
    return " or ".join(sorted(sides, reverse=True))


def list_places(cuts: tuple[InterruptedWork, ...] | tuple[MissedWork, ...], most: int) -> str:
    """Return the places of the first `most` pieces of work, and how many more there are."""
    first = ", ".join(
        f"rank {each.rank} {'in' if each.early else 'after'} step {each.step}" for each in cuts[:most]
    )
    return f"{first} and {len(cuts) - most} more" if len(cuts) > most else first
