"""Undo what the start of a generation changed if the generation fails before its first step. Pure.

Resuming from an older state makes all newer states void. This must not take effect before the group has
completed a step from the older state. If that state is damaged or its holder dies, a newer state may be the
only one left. The reason for going back still applies: a bad number limits the usable states as before, and
interrupted work is either repeated or reported.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol import lineage
from supervisor.view import replica_divergence, reports, unknown_generation
from supervisor.view.model import Fault, InterruptedWork, JobState, PendingStart, SetAsideState, View


def pending_start(
    view: View,
    step: int,
    bound: int | None,
    cut: tuple[InterruptedWork, ...],
    raised: tuple[Fault, ...],
    *,
    from_scratch: bool = False,
) -> PendingStart:
    """Return the record of a start, which `JobState` keeps until the group completes a step.

    Args:
        step: The step that the group resumes from.
        bound: The newest step whose state may be good.
        cut: The work that the last fault interrupted.
        raised: The exceptions among the faults before the start.
        from_scratch: Whether this is the first start of a run that the user began from scratch.
    """
    memory, before = view.memory, _failed_start(view.memory)
    aside = memory.unbegun.aside if memory.unbegun is not None else None
    if from_scratch:
        aside = SetAsideState(memory.lineage, memory.missed, memory.equal, memory.saved)
    earlier = before.raised if before else ()  # only the first exception of each rank is reported
    known = {(fault.rank, fault.kind) for fault in earlier}
    later = tuple(fault for fault in raised if (fault.rank, fault.kind) not in known)
    limits = [each for each in (bound, before.bound if before else None) if each is not None]
    return PendingStart(
        generation=max(memory.generation, memory.seen) + 1,
        step=step,
        lineage=memory.lineage,
        missed=memory.missed,
        equal=memory.equal,
        bound=min(limits, default=None),
        cut=cut,
        raised=(*earlier, *later),
        aside=aside,
    )


def state_for_next_run(memory: JobState) -> JobState:
    """Return the job's state as the next run in the directory should find it.

    If a run from scratch ended before its first step, it has made no state void, because the user may have
    requested a start at step 0 by mistake.
    """
    aside = memory.unbegun.aside if memory.unbegun is not None and not memory.settled else None
    if aside is None:
        return memory
    return replace(memory, lineage=aside.lineage, missed=aside.missed, equal=aside.equal, saved=aside.saved)


def is_from_scratch(memory: JobState, step: int) -> bool:
    """True if `step` is the first state of a run from scratch that has not completed a step yet.

    Such a state must not be saved, because its checkpoint would replace older ones, which become void only
    when the run completes its first step.
    """
    known = memory.unbegun
    return known is not None and keeps_states_aside(memory) and step <= known.step


def keeps_states_aside(memory: JobState) -> bool:
    """True if the next run resumes from the states before this run from scratch if it ended now.

    This holds until all ranks have completed a step of the same generation. A checkpoint would replace them.
    """
    return memory.unbegun is not None and memory.unbegun.aside is not None and not memory.settled


def without_failed_start(view: View) -> JobState:
    """Return the job's state without the changes that a failed start has made.

    If the generation has completed a step, nothing is undone.
    """
    memory = view.memory
    known = memory.unbegun
    if known is None or known.failed or memory.settled or known.generation != memory.generation:
        return memory
    if (
        unknown_generation.newest(view)
        or reports.furthest_step(view) > known.step
        or _holds_later_state(view, known.step)
    ):
        return memory
    before, equal = known.lineage, known.equal
    if known.bound is not None:
        before = lineage.extended(before, known.generation, known.bound)
        equal = replica_divergence.rolled_back(equal, known.bound)
    return replace(
        memory, lineage=before, missed=known.missed, equal=equal, unbegun=replace(known, failed=True)
    )


def _holds_later_state(view: View, step: int) -> bool:
    """True if a member holds a state of the current generation beyond `step`."""
    return any(
        snapshot.generation == view.memory.generation and snapshot.step > step
        for member in view.members
        if member.report is not None
        for snapshot in member.report.slots
    )


def interrupted_before(memory: JobState) -> tuple[InterruptedWork, ...]:
    """Return the work that the fault before the failed start interrupted."""
    known = _failed_start(memory)
    return known.cut if known is not None else ()


def raised_before(memory: JobState) -> tuple[Fault, ...]:
    """Return the exceptions that the ranks raised before the failed start."""
    known = _failed_start(memory)
    return known.raised if known is not None else ()


def _failed_start(memory: JobState) -> PendingStart | None:
    return memory.unbegun if memory.unbegun is not None and memory.unbegun.failed else None
