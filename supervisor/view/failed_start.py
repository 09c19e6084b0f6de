"""A generation that fails before its first step: what its start changed is taken back. Pure.

To go back to an older state makes void what was done beyond it. That is right once the group has gone on from
there, and not before: where the older state cannot be restored (it is damaged, its holder dies), the newer
one is what is left. Why the group went back stays known: a bad number bounds the states that may be used as
before, and work that was cut off is done again from before it, or named.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol import lineage
from supervisor.view import replica_divergence, reports, unknown_generation
from supervisor.view.model import CutOffWork, Fault, JobState, PendingStart, SetAsideState, View


def pending_start(
    view: View,
    step: int,
    bound: int | None,
    cut: tuple[CutOffWork, ...],
    raised: tuple[Fault, ...],
    *,
    from_scratch: bool = False,
) -> PendingStart:
    """Return what is to be known of a start until its group has done a step.

    Args:
        step: Where the group begins.
        bound: The most steps that a good state may have.
        cut: The work that the fault before has cut off.
        raised: The exceptions among the faults before.
        from_scratch: The start is the first of a run that was asked to begin from scratch.
    """
    memory, before = view.memory, _failed(view.memory)
    aside = memory.unbegun.aside if memory.unbegun is not None else None
    if from_scratch:
        aside = SetAsideState(memory.lineage, memory.missed, memory.equal, memory.saved)
    known = before.raised if before else ()  # a rank's first exception there is the one to be told
    said = {(fault.rank, fault.kind) for fault in known}
    later = tuple(fault for fault in raised if (fault.rank, fault.kind) not in said)
    limits = [each for each in (bound, before.bound if before else None) if each is not None]
    return PendingStart(
        generation=max(memory.generation, memory.seen) + 1,
        step=step,
        lineage=memory.lineage,
        missed=memory.missed,
        equal=memory.equal,
        bound=min(limits, default=None),
        cut=cut,
        raised=(*known, *later),
        aside=aside,
    )


def state_for_next_run(memory: JobState) -> JobState:
    """Return the memory as the next run in the directory is to find it.

    A run from scratch that has ended before its first step has made nothing void: to begin there was its own
    wish, and may have been a mistake.
    """
    aside = memory.unbegun.aside if memory.unbegun is not None and not memory.settled else None
    if aside is None:
        return memory
    return replace(memory, lineage=aside.lineage, missed=aside.missed, equal=aside.equal, saved=aside.saved)


def is_from_scratch(memory: JobState, step: int) -> bool:
    """True for a run from scratch that is at `step` and has done none.

    To save that would delete the checkpoints that it has made void.
    """
    known = memory.unbegun
    return known is not None and known.aside is not None and not memory.settled and step <= known.step


def without_failed_start(view: View) -> JobState:
    """Return the memory without what the start of a generation changed that has not done a step."""
    memory = view.memory
    known = memory.unbegun
    if known is None or known.failed or memory.settled or known.generation != memory.generation:
        return memory
    if (
        unknown_generation.newest(view)
        or reports.furthest_step(view) > known.step
        or _has_made(view, known.step)
    ):
        return memory
    before, equal = known.lineage, known.equal
    if known.bound is not None:
        before = lineage.extended(before, known.generation, known.bound)
        equal = replica_divergence.rolled_back(equal, known.bound)
    return replace(
        memory, lineage=before, missed=known.missed, equal=equal, unbegun=replace(known, failed=True)
    )


def _has_made(view: View, step: int) -> bool:
    """True when some member holds a state of the present generation from beyond `step`."""
    return any(
        slot.generation == view.memory.generation and slot.step > step
        for member in view.members
        if member.report is not None
        for slot in member.report.slots
    )


def cut_off_before(memory: JobState) -> tuple[CutOffWork, ...]:
    """Return the work that the fault before the failed start has cut off."""
    known = _failed(memory)
    return known.cut if known is not None else ()


def raised_before(memory: JobState) -> tuple[Fault, ...]:
    """Return the exceptions before the failed start."""
    known = _failed(memory)
    return known.raised if known is not None else ()


def _failed(memory: JobState) -> PendingStart | None:
    return memory.unbegun if memory.unbegun is not None and memory.unbegun.failed else None
