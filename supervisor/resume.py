"""Where can the group resume? The newest step that can be made whole from all that exists. Pure.

Whole means: somebody has the replicated state of that step, and for every rank somebody has its private
state of that step. A later generation that went on from step s makes void what older ones did beyond s.
"""

from __future__ import annotations

from holdfast.messages import MemberReport, PrivateHeld, Source
from supervisor.view import Checkpoint, Lineage, Resume, View

FROM_THE_BEGINNING = Resume(0, 0, "none")


def point(view: View, at_most: int | None) -> Resume:
    """Return the resume point with no more than `at_most` steps (None: no bound).

    A snapshot in memory goes before a checkpoint of the same step. Without either the group starts
    from the beginning.
    """
    slot = _newest_slot(view, at_most)
    durable = _checkpoint(view.checkpoint, view.memory.lineage, at_most)
    if slot is not None and (durable is None or slot.step >= durable.step):
        return slot
    return durable or FROM_THE_BEGINNING


def valid(generation: int, step: int, lineage: tuple[Lineage, ...]) -> bool:
    """False when a later generation resumed from before that step."""
    return all(step <= later.step for later in lineage if later.generation > generation)


def _newest_slot(view: View, at_most: int | None) -> Resume | None:
    reports = [m.report for m in view.members if m.report is not None and m.connected and m.exists]
    lineage, bound = view.memory.lineage, float("inf") if at_most is None else at_most
    bad = {(s.generation, s.step, r.member) for r in reports for s in r.unusable}
    found: dict[tuple[int, int], list[MemberReport]] = {}
    for report in reports:
        for slot in report.slots:
            if (slot.generation, slot.step, report.member) in bad or slot.step > bound:
                continue
            if valid(slot.generation, slot.step, lineage):
                found.setdefault((slot.step, slot.generation), []).append(report)
    for (step, generation), holders in sorted(found.items(), reverse=True):
        private = _private_sources(view, reports, step)
        if private is not None:
            where = tuple(Source(h.peer_url, -1, generation, step) for h in holders)
            names = tuple(h.member for h in holders)
            return Resume(step, generation, "slot", "", (*where, *private), names)
    return None


def _private_sources(
    view: View, reports: list[MemberReport], step: int
) -> tuple[Source, ...] | None:
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
            Source(report.peer_url, rank, newest, step)
            for generation, report in held
            if generation == newest
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
    found: Checkpoint | None, lineage: tuple[Lineage, ...], at_most: int | None
) -> Resume | None:
    if found is None or (at_most is not None and found.step > at_most):
        return None
    if not valid(found.generation, found.step, lineage):
        return None
    return Resume(found.step, found.generation, "checkpoint", found.path, notes=found.notes)
