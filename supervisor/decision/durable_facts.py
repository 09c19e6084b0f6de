"""Record in the job's state the facts that must outlive the members and storage that report them. Pure.

Decisions change the job's state (`View.memory`), and so do the following facts: a member held a training
state, storage has one, the group has reached a step, the replicas matched, or members run a generation. The
next line of the journal records these facts. If the supervisor dies before writing that line, members and
storage report the facts to its successor. If the members die too, the last status still contains the step
that the group had reached. When a member holds a state for the first time, `controller.supervised_run`
writes a line for this fact alone. The time at which all survivors of a fault have secured their state is not
in the journal, because only the incident's timeline uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from holdfast.protocol.lineage import merged, valid
from holdfast.protocol.member_messages import MemberReport
from supervisor.view import replica_divergence, reports, unknown_generation
from supervisor.view.model import JobState, OpenIncident, View, VoidStep

_GENERATION = attrgetter("generation")
# How many of the newest void steps to keep. An older void step is kept only while a state of that step
# exists.
VOIDS = 128


def with_durable_facts(view: View) -> JobState:
    """Return `view.memory` with the facts that the view adds; the same object if it adds none."""
    memory = view.memory
    reported = unknown_generation.reported_history(view)
    lineage = merged(reported.lineage if reported is not None else memory.lineage, view.stored.lineage)
    saved = (c.step for c in view.stored.checkpoints if valid(c.generation, c.step, lineage))
    newest = max((view.stored.generation, *(_generation(m.report) for m in view.members if m.report)))
    if reported is not None:
        newest = max(newest, *(each.generation for each in reported.lineage))
    incident = _with_secured_time(view)
    facts: dict[str, Any] = {
        "lineage": lineage,
        "seen": newest if newest > max(memory.generation, memory.seen) else memory.seen,
        "saved": max((memory.saved, *saved)),
        "held": max(memory.held, _held(view)),
        "reached": reports.furthest_step(view),
        "skip": tuple(sorted({*memory.skip, *reported.skip})) if reported is not None else memory.skip,
        "equal": replica_divergence.equal_steps(view),
        "void": _void(view),
        "incident": incident,
    }
    is_same = incident is memory.incident and all(getattr(memory, name) == facts[name] for name in facts)
    return memory if is_same else replace(memory, **facts)


def with_last_status(memory: JobState, status: Mapping[str, Any] | None) -> JobState:
    """Return the `memory` from the journal, updated from the predecessor's last `status`.

    The last line of the journal may be hours old. The status is newer, so it gives a lower bound for the
    steps that the group has completed. Without a status of the same generation, the step is unknown until
    members report.
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
    """Return the steps of the ranks in `status`; [] if the status belongs to another generation."""
    if status is None or type(status.get("generation")) is not int:
        return []
    ranks = status.get("ranks")
    if status["generation"] != memory.generation or not isinstance(ranks, list):
        return []
    steps = (each.get("step") for each in ranks if isinstance(each, Mapping))
    return [step for step in steps if type(step) is int]


def _generation(report: MemberReport) -> int:
    """Return the newest generation that a member runs, knows about, or holds state of."""
    running = report.launcher.generation if report.launcher is not None else 0
    held = (map(_GENERATION, report.slots), map(_GENERATION, report.privates))  # hundreds in some reports
    newest = max(max(each, default=0) for each in held)
    return max(running, report.durable.generation, report.told.generation, newest)


def _held(view: View) -> int:
    """Return the newest step that all ranks have passed and whose snapshot a member holds; -1 for none.

    Such a snapshot is complete, because by then each rank has sent its private state of that step to another
    member.
    """
    memory = view.memory
    if memory.phase != "running" or not memory.settled:
        return -1
    progress = [each for report in reports.reports(view) for each in report.progress]
    if len(progress) < memory.world_size:
        return -1
    steps, snapshot = [each.step for each in progress], max(each.snapshot_step for each in progress)
    return snapshot if min(steps) > snapshot else -1


def _with_secured_time(view: View) -> OpenIncident | None:
    """Return the open incident, with the current time if all survivors have just secured their state.

    If the group has to wait for another member, the next decision can be much later.
    """
    memory, incident = view.memory, view.memory.incident
    if incident is None or incident.survived_ns or memory.phase != "securing":
        return incident
    survivors = [m for m in view.members if m.name in memory.positions and m.exists and m.connected]
    is_secured = all(m.report is not None and m.report.secured_for >= memory.generation for m in survivors)
    return replace(incident, survived_ns=view.now_ns) if is_secured else incident


def _void(view: View) -> tuple[VoidStep, ...]:
    """Return the void steps.

    A step is void if a rank changed its state after the commit without updating the copies.

    A void step is kept even after the rank's page and its member are gone, because another member may hold a
    copy without the change.
    """
    generation, known = view.memory.generation, set(view.memory.void)
    for report in reports.reports(view):
        for each in reports.progress(view, report):
            known -= {VoidStep(generation, step, each.rank) for step in each.amended}
            known |= {VoidStep(generation, step, each.rank) for step in each.late}
    if not known:
        return ()
    ordered = sorted(known, key=lambda each: (each.generation, each.step, each.rank))
    snapshots = (each for member in view.members if member.report for each in member.report.slots)
    states = {(snapshot.generation, snapshot.step) for snapshot in snapshots}
    states |= {(stored.generation, stored.step) for stored in view.stored.checkpoints}
    old = (each for each in ordered[:-VOIDS] if (each.generation, each.step) in states)
    return (*old, *ordered[-VOIDS:])
