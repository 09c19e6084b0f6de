"""Find the group's resume point: the newest step with a complete state. Pure.

The state of a step is complete if some member holds its replicated part and, for every rank, some member
holds the rank's private part. When a generation resumes from step s, the states of older generations beyond s
become void. A state whose restore has failed `TRIES` times is not used.

Members that are cut off from their peers still report what they hold, but others can probably not read it.
Their copies are therefore used only as the last resort. If a state is complete only with a copy of a member
that has lost its ranks for that reason, the state is tried once, because the network may work again, or the
other side may have been at fault. After that, an older state that does not need such a copy is used. If there
is no older state of this kind, the newest state is tried as often as any other state. The supervisor cannot
read a state and pass it on, because members send it only reports. States move only between members.

The functions return `FROM_THE_BEGINNING` if they find no state. Before a caller starts over, it must check
`has_saved_state`, because a group may resume from the beginning only if nothing was ever saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from holdfast.protocol.lineage import valid
from holdfast.protocol.member_messages import HeldSnapshot, MemberReport, StateSource
from supervisor.decision import unreachable_members
from supervisor.decision.state_sources import SNAPSHOT_HOLDERS
from supervisor.identity_cache import by_identity
from supervisor.view import faults, members, reports
from supervisor.view.model import Checkpoint, JobState, MemberView, ResumePoint, View

FROM_THE_BEGINNING = ResumePoint(0, 0, "none")
PRIVATE_HOLDERS = 8  # limit for the sources of one rank's private state, which two members usually hold
TRIES = 4  # attempts to restore the same state

# For each rank, its private states of one step. Each state is given by its generation, by the position (in
# the view) of the member that holds it, and by whether it is final.
_HeldByRank: TypeAlias = "dict[int, list[tuple[int, int, bool]]]"


def newest(view: View, at_most: int | None, void: frozenset[tuple[int, int]] = frozenset()) -> ResumePoint:
    """Return the newest resume point at or before step `at_most` (None: no bound).

    `void` lists states that must not be used, as pairs of generation and step. If a snapshot and a checkpoint
    have the same step, the snapshot wins, because it is already in memory. Returns `FROM_THE_BEGINNING` if
    there is no usable state.
    """
    snapshot, unread = _newest_snapshots(view, at_most, void)
    durable = _newest_checkpoint(view, at_most, void)
    if snapshot is not None and (durable is None or snapshot.step >= durable.step):
        return snapshot
    return durable or unread or FROM_THE_BEGINNING


def _given_up(memory: JobState, tries: int = TRIES) -> frozenset[str]:
    """Return the signatures of the states whose restore has failed `tries` times."""
    failed = Counter(past.signature for past in memory.history if past.kind == "restore")
    now = memory.incident.faults if memory.incident else ()
    failed.update({fault.signature for fault in now if fault.kind == "restore"})
    return frozenset(signature for signature, count in failed.items() if count >= tries)


def _newest_snapshots(
    view: View, at_most: int | None, void: frozenset[tuple[int, int]]
) -> tuple[ResumePoint | None, ResumePoint | None]:
    """Return the newest snapshot to use, and a newer one that is the last resort (`_is_out_of_reach`)."""
    found: dict[tuple[int, int], list[MemberReport]] = {}
    unusable: dict[HeldSnapshot, bool] = {}
    given_up = _given_up(view.memory)
    for report in _usable_reports(view):
        for snapshot in report.slots:
            if snapshot not in unusable:
                why = _reason_unusable(view, snapshot, at_most, given_up)
                unusable[snapshot] = bool(why) or (snapshot.generation, snapshot.step) in void
            if not unusable[snapshot] and not is_damaged(report, snapshot):
                found.setdefault((snapshot.step, snapshot.generation), []).append(report)
    unread: ResumePoint | None = None
    for (step, generation), holders in sorted(found.items(), reverse=True):
        private = _private_sources(view, step, generation)
        if private is None:
            continue
        point = _snapshot_point(view, step, generation, holders, private)
        if not _is_out_of_reach(view, point):
            return point, unread
        unread = unread or point
    return None, unread


def _snapshot_point(
    view: View, step: int, generation: int, holders: list[MemberReport], private: tuple[StateSource, ...]
) -> ResumePoint:
    cut_off = unreachable_members.unreachable(view.memory)
    others = [each for each in holders if each.member not in cut_off]
    holders = [*others, *(each for each in holders if each.member in cut_off)]
    readable = others if len(others) >= SNAPSHOT_HOLDERS else holders
    replicated = tuple(StateSource(h.peer_url, -1, generation, step) for h in readable)
    names = tuple(h.member for h in holders)
    sources, size = (*replicated, *private), _other_size(view, _ranks_of(view.memory, generation))
    return ResumePoint(step, generation, "slot", "", sources, names, world_size=size)


def _is_out_of_reach(view: View, point: ResumePoint) -> bool:
    """True if a part of the state is only on members that are cut off, and it could not be read before."""
    away = unreachable_members.were_cut_off(view.memory)
    if not away or faults.restore_signature("slot", point.generation, point.step) not in _given_up(
        view.memory, 1
    ):
        return False
    urls = {each.peer_url for each in _usable_reports(view) if each.member in away}
    readable = {each.rank for each in point.sources if each.url not in urls}
    return len(readable) <= _ranks_of(view.memory, point.generation)  # -1 stands for the snapshot


def holds_state(view: View) -> bool:
    """True if the group holds a state, according to what members report while their ranks run."""
    if reports.script_keeps_own_state(view) or newest_checkpoint(view) is not None:
        return True
    return any(m.report is not None and m.report.slots and can_serve(view, m) for m in view.members)


def _other_size(view: View, world_size: int) -> int:
    """Return `ResumePoint.world_size` for a state of `world_size` ranks."""
    return 0 if world_size == view.memory.world_size else world_size


def _size_at(memory: JobState, generation: int) -> int:
    """Return how often the group's size had changed by the time `generation` began."""
    return sum(each.generation <= generation for each in memory.sizes)


def _ranks_of(memory: JobState, generation: int) -> int:
    """Return how many ranks `generation` had."""
    changes = _size_at(memory, generation)
    members_then = memory.sizes[changes - 1].members if changes else memory.full_members
    return members_then * memory.nproc


def _usable_reports(view: View) -> list[MemberReport]:
    return [m.report for m in view.members if m.report is not None and can_serve(view, m)]


def is_damaged(report: MemberReport, snapshot: HeldSnapshot) -> bool:
    """True if the snapshot's checksum did not match when the member read it for a restore."""
    return (snapshot.generation, snapshot.step) in _damaged(report.unusable)


@by_identity(1)
def _damaged(unusable: tuple[HeldSnapshot, ...]) -> frozenset[tuple[int, int]]:
    return frozenset((each.generation, each.step) for each in unusable)


def missing_private_state(view: View, step: int) -> str:
    """Return a clause that lists the ranks whose private state of `step` is missing; "" for none."""
    usable = [member.report is not None and can_serve(view, member) for member in view.members]
    lineage = view.memory.lineage
    given, early = set[int](), set[int]()
    index = _private_states(view.members)
    found = index[step] if step in index else _read_private_states(view.members, {step: {}})[step]
    for rank, held in found.items():
        for generation, position, final in held:
            if usable[position] and valid(generation, step, lineage):
                (given if final else early).add(rank)
    lacking = [rank for rank in range(view.memory.world_size) if rank not in given]
    missing = [rank for rank in lacking if rank not in early]
    named = ", ".join(map(str, missing or lacking))
    if not lacking:
        return ""
    why = "is missing" if missing else "is available only from before the commit"
    return f"the private state of rank {named} {why}"


def can_serve(view: View, member: MemberView) -> bool:
    """True if the group can use the state that a member holds.

    If a member reports but cannot be controlled, the group continues without it and the member is ended. Its
    state can therefore be used only for the last checkpoint of a run that is about to end.
    """
    is_last = bool(view.memory.stop) or view.memory.end is not None
    return members.is_controllable(member) or (members.is_reporting(member) and is_last)


@by_identity(1)
def _private_states(members_now: tuple[MemberView, ...]) -> Mapping[int, _HeldByRank]:
    """Return the private states that members hold, for the step of each snapshot.

    A report lists about 30 states per rank, and a decision needs the states of several steps for all ranks.
    The lists are therefore read only once for all decisions about the same reports.
    """
    snapshots = (snapshot for member in members_now if member.report for snapshot in member.report.slots)
    return _read_private_states(members_now, {snapshot.step: {} for snapshot in snapshots})


def _read_private_states(
    members_now: tuple[MemberView, ...], found: dict[int, _HeldByRank]
) -> dict[int, _HeldByRank]:
    """Return `found`, after adding the private states that members hold for each step in it."""
    for position, member in enumerate(members_now):
        for private in member.report.privates if member.report is not None else ():
            states = found.get(private.step)
            if states is not None:
                states.setdefault(private.rank, []).append((private.generation, position, private.final))
    return found


def _private_sources(view: View, step: int, saved_by: int) -> tuple[StateSource, ...] | None:
    """Return the sources of every rank's private state at `step`; None if any rank lacks one.

    Only states from generations of the same size as `saved_by` are used, because ranks have other numbers in
    a group of another size.
    """
    memory = view.memory
    held, world_size, size = (
        _private_states(view.members)[step],
        _ranks_of(memory, saved_by),
        _size_at(memory, saved_by),
    )
    if len(held) < world_size:
        return None
    urls = {
        position: member.report.peer_url
        for position, member in enumerate(view.members)
        if member.report is not None and can_serve(view, member)
    }
    away = unreachable_members.unreachable(memory)
    cut_off = {urls[at] for at, each in enumerate(view.members) if each.name in away and at in urls}
    usable: dict[int, bool] = {}  # by generation
    sources: list[StateSource] = []
    for rank in range(world_size):
        newest, holders = -1, list[str]()
        for generation, position, final in held.get(rank, ()):
            if generation not in usable:
                is_valid = valid(generation, step, memory.lineage)
                usable[generation] = is_valid and _size_at(memory, generation) == size
            if not final or generation < newest or position not in urls or not usable[generation]:
                continue
            if generation > newest:
                newest, holders = generation, []
            holders.append(urls[position])
        if not holders:
            return None
        if cut_off:
            holders.sort(key=cut_off.__contains__)
        sources += [StateSource(url, rank, newest, step) for url in holders[:PRIVATE_HOLDERS]]
    return tuple(sources)


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
    size = _other_size(view, found.world_size)
    return ResumePoint(found.step, found.generation, "checkpoint", found.path, notes=notes, world_size=size)


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
    """Return why a state must not be used; "" if it may be used. Even then, private states may be missing."""
    return _reason_unusable(view, state, at_most, _given_up(view.memory))


def _reason_unusable(
    view: View, state: HeldSnapshot | Checkpoint, at_most: int | None, given_up: frozenset[str]
) -> str:
    source = "slot" if isinstance(state, HeldSnapshot) else "checkpoint"
    if at_most is not None and state.step > at_most:
        return f"it is beyond step {at_most}"
    if faults.restore_signature(source, state.generation, state.step) in given_up:
        return f"its restore failed {TRIES} times"
    lineage = view.memory.lineage
    if not valid(state.generation, state.step, lineage):
        step = min(each.step for each in lineage if each.generation > state.generation)
        return f"the run later went back to step {step}"
    return ""
