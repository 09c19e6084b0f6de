"""Find the resume point of the group: the newest step for which a complete state exists. Pure.

The state of a step is complete if some member holds its replicated part and, for every rank, some member
holds the rank's private part. When a generation resumes from step s, older generations' states beyond s
become void. A state whose restore has failed `TRIES` times is not used.

The functions return `FROM_THE_BEGINNING` if they find no state. Before a caller starts over, it must check
`has_saved_state`, because a group may resume from the beginning only if nothing was ever saved.
"""

from __future__ import annotations

from collections import Counter

from holdfast.protocol.lineage import Lineage, valid
from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot, MemberReport, StateSource
from supervisor.view import faults, members
from supervisor.view.model import Checkpoint, JobState, MemberView, ResumePoint, View

FROM_THE_BEGINNING = ResumePoint(0, 0, "none")
TRIES = 4  # attempts to restore the same state


def newest(view: View, at_most: int | None, void: frozenset[tuple[int, int]] = frozenset()) -> ResumePoint:
    """Return the newest resume point at or before step `at_most` (None: no bound).

    `void` lists states that must not be used, as pairs of generation and step. If a snapshot and a checkpoint
    have the same step, the snapshot wins, because it is already in memory. Returns `FROM_THE_BEGINNING` if
    there is no usable state.
    """
    slot = _newest_slot(view, at_most, void)
    durable = _newest_checkpoint(view, at_most, void)
    if slot is not None and (durable is None or slot.step >= durable.step):
        return slot
    return durable or FROM_THE_BEGINNING


def _given_up(memory: JobState) -> frozenset[str]:
    """Return the signatures of the states whose restore has failed `TRIES` times."""
    failed = Counter(past.signature for past in memory.history if past.kind == "restore")
    now = memory.incident.faults if memory.incident else ()
    failed.update({fault.signature for fault in now if fault.kind == "restore"})
    return frozenset(signature for signature, count in failed.items() if count >= TRIES)


def _newest_slot(view: View, at_most: int | None, void: frozenset[tuple[int, int]]) -> ResumePoint | None:
    reports = _usable_reports(view)
    found: dict[tuple[int, int], list[MemberReport]] = {}
    for report in reports:
        for slot in report.slots:
            if is_damaged(report, slot):
                continue
            if not reason_unusable(view, slot, at_most) and (slot.generation, slot.step) not in void:
                found.setdefault((slot.step, slot.generation), []).append(report)
    for (step, generation), holders in sorted(found.items(), reverse=True):
        private = _private_sources(view, reports, step)
        if private is not None:
            replicated = tuple(StateSource(h.peer_url, -1, generation, step) for h in holders)
            names = tuple(h.member for h in holders)
            return ResumePoint(step, generation, "slot", "", (*replicated, *private), names)
    return None


def _usable_reports(view: View) -> list[MemberReport]:
    return [m.report for m in view.members if m.report is not None and can_serve(view, m)]


def is_damaged(report: MemberReport, slot: HeldSnapshot) -> bool:
    """True if the snapshot's checksum did not match when the member read it for a restore."""
    return any((bad.generation, bad.step) == (slot.generation, slot.step) for bad in report.unusable)


def missing_private_state(view: View, step: int) -> str:
    """Return a clause that names the ranks whose private state of `step` is missing; "" for none."""
    reports, lineage = _usable_reports(view), view.memory.lineage
    held = [each for report in reports for each in report.privates if each.step == step]
    given = {each.rank for each in held if _fits(each, each.rank, step, lineage)}
    lacking = [rank for rank in range(view.memory.world_size) if rank not in given]
    early = {each.rank for each in held if not each.final and valid(each.generation, step, lineage)}
    missing = [rank for rank in lacking if rank not in early]
    named = ", ".join(map(str, missing or lacking))
    if not lacking:
        return ""
    why = "is missing" if missing else "is available only from before the commit"
    return f"the private state of rank {named} {why}"


def can_serve(view: View, member: MemberView) -> bool:
    """True if the group can use the state that a member holds.

    If a member reports but cannot be controlled, the group continues without it and the member is ended. Its
    state can therefore serve only the last checkpoint of a run, after a request to stop.
    """
    return members.is_controllable(member) or (members.is_reporting(member) and bool(view.memory.stop))


def _private_sources(view: View, reports: list[MemberReport], step: int) -> tuple[StateSource, ...] | None:
    """Return the sources of every rank's private state at `step`; None if any rank lacks one."""
    sources: list[StateSource] = []
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
            StateSource(report.peer_url, rank, newest, step)
            for generation, report in held
            if generation == newest
        ]
    return tuple(sources)


def _fits(private: HeldPrivateState, rank: int, step: int, lineage: tuple[Lineage, ...]) -> bool:
    return (
        private.rank == rank
        and private.step == step
        and private.final
        and valid(private.generation, step, lineage)
    )


def _newest_checkpoint(
    view: View, at_most: int | None, void: frozenset[tuple[int, int]]
) -> ResumePoint | None:
    usable = [
        each
        for each in view.stored.checkpoints
        if not reason_unusable(view, each, at_most) and (each.generation, each.step) not in void
    ]
    if not usable:
        return None
    found = max(usable, key=lambda each: (each.step, each.generation))
    notes = tuple(each.note for each in view.stored.unusable if each.step >= found.step)
    return ResumePoint(found.step, found.generation, "checkpoint", found.path, notes=notes)


def checkpoint_of(view: View, resumed: ResumePoint) -> Checkpoint | None:
    """Return the checkpoint that `resumed` refers to; None if it is a snapshot or the beginning."""
    if resumed.source != "checkpoint":
        return None
    return next((each for each in view.stored.checkpoints if each.path == resumed.path), None)


def newest_checkpoint(view: View) -> Checkpoint | None:
    """Return the newest checkpoint on storage that is not void."""
    return next((each for each in view.stored.checkpoints if _is_valid(each, view.memory)), None)


def has_checkpoint(view: View, generation: int, step: int) -> bool:
    """True if storage has a checkpoint of this generation and step that is not void."""
    return any(
        (each.generation, each.step) == (generation, step) and _is_valid(each, view.memory)
        for each in view.stored.checkpoints
    )


def _is_valid(found: Checkpoint, memory: JobState) -> bool:
    return valid(found.generation, found.step, memory.lineage)


def has_saved_state(memory: JobState) -> bool:
    """True if any step was saved. A restart from the beginning would lose that step."""
    return memory.saved >= 0 or memory.held >= 0


def reason_unusable(view: View, state: HeldSnapshot | Checkpoint, at_most: int | None) -> str:
    """Return why a state must not be used; "" for no reason. A snapshot may still lack private states."""
    source = "slot" if isinstance(state, HeldSnapshot) else "checkpoint"
    if at_most is not None and state.step > at_most:
        return f"it is beyond step {at_most}"
    if faults.restore_signature(source, state.generation, state.step) in _given_up(view.memory):
        return f"its restore failed {TRIES} times"
    lineage = view.memory.lineage
    if not valid(state.generation, state.step, lineage):
        step = min(each.step for each in lineage if each.generation > state.generation)
        return f"the run later went back to step {step}"
    return ""
