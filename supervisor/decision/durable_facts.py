"""What the members and storage tell that must outlive them, and the supervisor. Pure.

The memory changes with decisions, and with this: a state that was held or saved, how far the group is,
replicas that were equal, a generation that somebody runs. It is in the journal with the next line; what is
lost with a supervisor that dies before that, storage and the members tell its successor. Where they die with
it, its last status tells how far they were. That a state was held has a line of its own
(`supervisor.controller.job`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.protocol.lineage import merged, valid
from holdfast.protocol.member_messages import MemberReport
from supervisor.view import replica_divergence, reports, unknown_generation
from supervisor.view.model import JobState, View, VoidStep

VOIDS = 128  # the newest are kept; of older ones those of which there is a state


def with_durable_facts(view: View) -> JobState:
    """Return the memory of `view` with what the view teaches; the same one when that is nothing."""
    memory = view.memory
    told = unknown_generation.reported_history(view)
    lineage = merged(told.lineage if told is not None else memory.lineage, view.stored.lineage)
    saved = (c.step for c in view.stored.checkpoints if valid(c.generation, c.step, lineage))
    newest = max((view.stored.generation, *(_generation(m.report) for m in view.members if m.report)))
    if told is not None:
        newest = max(newest, *(each.generation for each in told.lineage))
    after = replace(
        memory,
        lineage=lineage,
        seen=newest if newest > max(memory.generation, memory.seen) else memory.seen,
        saved=max((memory.saved, *saved)),
        held=max(memory.held, _held(view)),
        reached=reports.furthest_step(view),
        skip=tuple(sorted({*memory.skip, *told.skip})) if told is not None else memory.skip,
        equal=replica_divergence.equal_steps(view),
        void=_void(view),
    )
    return memory if after == memory else after


def with_last_status(memory: JobState, status: Mapping[str, Any] | None) -> JobState:
    """Return the memory that a supervisor begins with, after one that left `memory` and that last `status`.

    The line of the journal may be hours old, the status is not: it tells how far the group was at least.
    Without one of the same generation that is not known, until members tell.
    """
    if memory.phase != "running":
        return memory
    steps = _steps(memory, status)
    if not steps or status is None:
        return replace(memory, reached=-1) if memory.settled else memory
    snapshot, held = status.get("snapshot_step"), -1
    if type(snapshot) is int and memory.settled and len(steps) == memory.world_size:
        held = snapshot if min(steps) > snapshot else -1
    return replace(memory, reached=max(memory.reached, *steps), held=max(memory.held, held))


def _steps(memory: JobState, status: Mapping[str, Any] | None) -> list[int]:
    """Return the steps of the ranks by a status of the present generation; none by any other."""
    if status is None or type(status.get("generation")) is not int:
        return []
    ranks = status.get("ranks")
    if status["generation"] != memory.generation or not isinstance(ranks, list):
        return []
    steps = (each.get("step") for each in ranks if isinstance(each, Mapping))
    return [step for step in steps if type(step) is int]


def _generation(report: MemberReport) -> int:
    """Return the newest generation of which a member has anything."""
    running = report.launcher.generation if report.launcher is not None else 0
    slots = (each.generation for each in report.slots)
    privates = (each.generation for each in report.privates)
    return max((running, report.durable.generation, report.told.generation, *slots, *privates))


def _held(view: View) -> int:
    """Return the newest step whose snapshot somebody holds and that all ranks have gone beyond; -1 for none.

    Then it is whole: the private states of its step have been given away.
    """
    memory = view.memory
    if memory.phase != "running" or not memory.settled:
        return -1
    progress = [each for report in reports.reports(view) for each in report.progress]
    if len(progress) < memory.world_size:
        return -1
    steps, snapshot = [each.step for each in progress], max(each.snapshot_step for each in progress)
    return snapshot if min(steps) > snapshot else -1


def _void(view: View) -> tuple[VoidStep, ...]:
    """Return the steps that a rank made void and has not made whole again.

    They outlive its page, and its member: others may hold a copy that lacks what the rank changed.
    """
    generation, known = view.memory.generation, set(view.memory.void)
    for report in reports.reports(view):
        for each in reports.progress(view, report):
            known -= {VoidStep(generation, step, each.rank) for step in each.amended}
            known |= {VoidStep(generation, step, each.rank) for step in each.late}
    if not known:
        return ()
    ordered = sorted(known, key=lambda each: (each.generation, each.step, each.rank))
    slots = (slot for member in view.members if member.report for slot in member.report.slots)
    states = {(slot.generation, slot.step) for slot in slots}
    states |= {(stored.generation, stored.step) for stored in view.stored.checkpoints}
    old = (each for each in ordered[:-VOIDS] if (each.generation, each.step) in states)
    return (*old, *ordered[-VOIDS:])
