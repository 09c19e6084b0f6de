"""Where can the group resume? The newest step that can be made whole from all that exists. Pure.

Whole means: somebody has the replicated state of that step, and for every rank somebody has its private
state of that step. A later generation that went on from step s makes void what older ones did beyond s.
What could not be restored again and again is passed over.
"""

from __future__ import annotations

from collections import Counter

from holdfast.lineage import Lineage, valid
from holdfast.messages import MemberReport, PrivateHeld, Slot, Source
from supervisor import faults as symptoms
from supervisor import presence
from supervisor.view import Checkpoint, MemberView, Memory, Resume, View

FROM_THE_BEGINNING = Resume(0, 0, "none")
TRIES = 4  # to restore one and the same state


def point(view: View, at_most: int | None) -> Resume:
    """Return the resume point with no more than `at_most` steps (None: no bound).

    A snapshot in memory goes before a checkpoint of the same step. Without either the group starts
    from the beginning.
    """
    given_up = _given_up(view.memory)
    slot = _newest_slot(view, at_most, given_up)
    durable = _checkpoint(view.checkpoint, view.memory.lineage, at_most, given_up)
    if slot is not None and (durable is None or slot.step >= durable.step):
        return slot
    return durable or FROM_THE_BEGINNING


def _given_up(memory: Memory) -> frozenset[str]:
    """Return the signatures of the states that failed too often when they were to be restored."""
    failed = Counter(past.signature for past in memory.history if past.kind == "restore")
    now = memory.incident.faults if memory.incident else ()
    failed.update({fault.signature for fault in now if fault.kind == "restore"})
    return frozenset(signature for signature, count in failed.items() if count >= TRIES)


def _newest_slot(view: View, at_most: int | None, given_up: frozenset[str]) -> Resume | None:
    reports = [m.report for m in view.members if m.report is not None and _can_give(view, m)]
    bad = {(s.generation, s.step, r.member) for r in reports for s in r.unusable}
    found: dict[tuple[int, int], list[MemberReport]] = {}
    for report in reports:
        for slot in report.slots:
            if (slot.generation, slot.step, report.member) in bad:
                continue
            if _is_allowed(slot, view.memory.lineage, at_most, "slot", given_up):
                found.setdefault((slot.step, slot.generation), []).append(report)
    for (step, generation), holders in sorted(found.items(), reverse=True):
        private = _private_sources(view, reports, step)
        if private is not None:
            where = tuple(Source(h.peer_url, -1, generation, step) for h in holders)
            names = tuple(h.member for h in holders)
            return Resume(step, generation, "slot", "", (*where, *private), names)
    return None


def _can_give(view: View, member: MemberView) -> bool:
    """False for a deaf member: it is ended when the group goes on without it, not before the last save."""
    return presence.obeys(member) or (presence.speaks(member) and bool(view.memory.stop))


def _private_sources(view: View, reports: list[MemberReport], step: int) -> tuple[Source, ...] | None:
    """Return a source of every rank's private state at `step`, None when one is missing."""
    sources: list[Source] = []
    for rank in range(view.memory.world_size):
        held = [
            (private.generation, report)
            for report in reports
            for private in report.privates
            if _fits(private, rank, step, view.memory.lineage)
        ]
        if not held:
            return None
        newest = max(generation for generation, _ in held)
        sources += [
            Source(report.peer_url, rank, newest, step) for generation, report in held if generation == newest
        ]
    return tuple(sources)


def _fits(private: PrivateHeld, rank: int, step: int, lineage: tuple[Lineage, ...]) -> bool:
    return (
        private.rank == rank
        and private.step == step
        and private.final
        and valid(private.generation, step, lineage)
    )


def _checkpoint(
    found: Checkpoint | None, lineage: tuple[Lineage, ...], at_most: int | None, given_up: frozenset[str]
) -> Resume | None:
    if found is None or not _is_allowed(found, lineage, at_most, "checkpoint", given_up):
        return None
    return Resume(found.step, found.generation, "checkpoint", found.path, notes=found.notes)


def _is_allowed(
    state: Slot | Checkpoint,
    lineage: tuple[Lineage, ...],
    at_most: int | None,
    source: str,
    given_up: frozenset[str],
) -> bool:
    if at_most is not None and state.step > at_most:
        return False
    if symptoms.restore_signature(source, state.generation, state.step) in given_up:
        return False
    return valid(state.generation, state.step, lineage)
