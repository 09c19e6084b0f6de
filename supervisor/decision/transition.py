"""Compute the job's state after an action. Pure: the result can be reproduced from the journal.

`TRANSITIONS` is the job's state machine. It lists the actions that are allowed in each phase, and the phase
that follows each. `mermaid` returns the diagram in `docs/architecture.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypedDict

from holdfast import exit_codes
from holdfast.protocol import lineage
from holdfast.protocol.launcher_messages import Launch, LossJump, Restore
from holdfast.protocol.member_messages import StateSource
from supervisor.decision import closing, remedy, resume_point, unreachable_members
from supervisor.decision.membership import joining, placement, resizing
from supervisor.decision.redundancy import backups
from supervisor.fault_kinds import kind_of
from supervisor.hangs import evidence, hung_rank
from supervisor.view import (
    failed_start,
    faults,
    interrupted_work,
    members,
    replica_divergence,
    reports,
    unknown_generation,
)
from supervisor.view.model import (
    Dismiss,
    Done,
    End,
    Fault,
    InterruptedWork,
    JobPhase,
    JobState,
    Learn,
    LearnedStall,
    Look,
    MissedWork,
    OpenIncident,
    PastFault,
    PastWarning,
    Policy,
    Preserve,
    Replace,
    ResumePoint,
    RunAction,
    Save,
    Secure,
    Settle,
    Start,
    StopRequest,
    View,
    Wait,
    Warn,
)

JUMPS = 64  # loss jumps to remember; a jump matters only until its rank has passed that step
HISTORY = 1000  # faults to remember
MAX_PAST_WARNINGS = 32  # how many warnings are remembered
LOST = 256  # lost members to remember after they have ceased to exist and have no ranks


_RUNNING: Mapping[type[Any], JobPhase] = {
    Secure: "securing",
    Settle: "running",
    Warn: "running",
    Learn: "running",
    Replace: "running",
    Save: "saving",
    End: "stopping",
    Look: "running",
    Dismiss: "running",
}
# The actions that are allowed in each phase, and the phase that follows each. `Wait` is allowed in every
# phase.
TRANSITIONS: Mapping[JobPhase, Mapping[type[Any], JobPhase]] = MappingProxyType(
    {
        "forming": {Start: "running", Replace: "forming", Secure: "securing", End: "stopping"},
        "running": _RUNNING,
        "looking": {kind: "looking" if to == "running" else to for kind, to in _RUNNING.items()},
        "securing": {
            Start: "running",
            Replace: "securing",
            Secure: "securing",
            Preserve: "securing",
            Save: "saving",
            End: "stopping",
        },
        "saving": {Save: "saving", End: "stopping"},
        "stopping": {Done: "ended"},
        "ended": {},
    }
)
_OLDER_PHASES, _OLDER_ACTIONS = frozenset({"looking"}), frozenset({Look, Dismiss})  # kept until 0.2.0


class IllegalTransition(ValueError):
    """The action is not allowed in this phase."""


def phase_after(phase: JobPhase, action: RunAction) -> JobPhase:
    """Return the phase after `action`. Raises `IllegalTransition`."""
    if isinstance(action, Wait):
        return phase
    try:
        return TRANSITIONS[phase][type(action)]
    except KeyError:
        raise IllegalTransition(f"{type(action).__name__} in phase {phase!r}") from None


def mermaid() -> str:
    """Return the diagram of `TRANSITIONS`, without the phases and actions of older versions."""
    lines = ["stateDiagram-v2", "    [*] --> forming"]
    for phase, following in TRANSITIONS.items():
        if phase in _OLDER_PHASES:
            continue
        for to in dict.fromkeys(following.values()):
            kinds = [k.__name__ for k, at in following.items() if at == to and k not in _OLDER_ACTIONS]
            lines.append(f"    {phase} --> {to}: {', '.join(kinds)}")
        if not following:
            lines.append(f"    {phase} --> [*]")
    return "\n".join(lines)


def after(view: View, action: RunAction, policy: Policy) -> JobState:
    """Return the job's state after `action`.

    Raises `IllegalTransition` if the action is not allowed in the current phase.
    """
    phase = phase_after(view.memory.phase, action)
    if isinstance(action, Wait):
        return view.memory
    return replace(_EFFECTS[type(action)](view, action, policy), phase=phase)


def _warn(view: View, action: Warn, _: Policy) -> JobState:
    return replace(view.memory, warned=_warned(view.memory, action.place, action.why))


def _learn(view: View, action: Learn, _: Policy) -> JobState:
    return replace(view.memory, learned=_learned(view.memory, action))


def _settle(view: View, _action: Settle, policy: Policy) -> JobState:
    resizable = bool(policy.min_members) and resizing.can_resize(view)
    return replace(
        view.memory,
        settled=True,
        incident=None,
        unbegun=None,
        resizable=resizable,
        joined=(),
        untried=(),
        asked=(),
        history=unreachable_members.cleared(view.memory.history),
    )


def _save(view: View, action: Save, _: Policy) -> JobState:
    return replace(
        failed_start.without_failed_start(view),
        since_ns=view.now_ns,
        save=view.memory.save + 1,
        save_step=action.resume.step,
        save_generation=action.resume.generation,
        save_member=action.member,
        save_tries=view.memory.save_tries + 1 if view.memory.phase == "saving" else 0,
        sources=action.resume.sources,
        cut=action.cut,
        finished=action.finished,
        end=action.end or view.memory.end,
    )


def _preserve(view: View, action: Preserve, _: Policy) -> JobState:
    """Return the state with the request to save.

    `since_ns` does not change, because the group is still waiting.
    """
    memory, incident = view.memory, view.memory.incident
    return replace(
        memory,
        save=memory.save + 1,
        save_step=action.resume.step,
        save_generation=action.resume.generation,
        save_member=action.member,
        sources=action.resume.sources,
        incident=replace(incident, preserved=memory.save + 1) if incident is not None else None,
    )


def _replace(view: View, action: Replace, _: Policy) -> JobState:
    return replace(view.memory, lost=_lost(view, (action.member,)))


def _lost(view: View, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lost members plus `names`, without old ones that no longer exist."""
    known = (*view.memory.lost, *names)
    there = {each.name for each in view.members if each.exists} | {*view.memory.placement}
    old = (name for name in known[:-LOST] if name in there)
    return (*old, *known[-LOST:])


def _done(view: View, _action: Done, policy: Policy) -> JobState:
    """Return the state of a run that has ended.

    On a cluster, its last sentence lists the members that are still running.
    """
    left = closing.unended(view, policy) if policy.members_created_externally else ()
    why = f"{view.memory.why}; {closing.unended_in_words(left)}" if left else view.memory.why
    return replace(view.memory, since_ns=view.now_ns, why=why)


def _unchanged(view: View, _action: Look | Dismiss, _: Policy) -> JobState:
    return view.memory


def _warned(memory: JobState, place: str, text: str) -> tuple[PastWarning, ...]:
    return (*memory.warned, PastWarning(place, text))[-MAX_PAST_WARNINGS:]


def _learned(memory: JobState, action: Learn) -> tuple[LearnedStall, ...]:
    known = {each.work: each.seconds for each in memory.learned}
    known |= {each.work: max(each.seconds, known.get(each.work, 0.0)) for each in action.learned}
    return tuple(LearnedStall(work, seconds) for work, seconds in known.items())


def _opened(view: View, found: tuple[Fault, ...]) -> OpenIncident:
    memory = view.memory
    known, generation = memory.incident, max(memory.generation, unknown_generation.newest(view))
    if known is not None and known.generation == generation:
        recorded = frozenset(known.faults)
        fresh = tuple(each for each in found if each not in recorded)
        return replace(known, faults=(*known.faults, *fresh))
    return OpenIncident(
        number=memory.incidents + 1,
        generation=generation,
        fault_ns=min(fault.at_ns for fault in found),
        noticed_ns=view.now_ns,
        wall_s=view.wall_s,
        faults=found,
        reached=reports.furthest_step(view),
        own_state=reports.script_keeps_own_state(view),
    )


def _secure(view: View, action: Secure, _: Policy) -> JobState:
    memory = view.memory
    incident = memory.incident
    if action.faults:
        incident = _opened(view, action.faults)
    if incident is not None and any(kind_of(fault.kind).needs_stacks for fault in action.faults):
        incident = _with_evidence(view, incident)
    return replace(
        memory,
        since_ns=view.now_ns,
        incident=incident,
        incidents=_count(memory, incident),
        end=action.end or memory.end,
        **_followed(view),
    )


def _count(memory: JobState, incident: OpenIncident | None) -> int:
    """Return the number of incidents so far, including `incident`."""
    return memory.incidents if incident is None else max(memory.incidents, incident.number)


class _Adopted(TypedDict, total=False):
    generation: int
    placement: tuple[str, ...]
    reached: int


def _followed(view: View) -> _Adopted:
    """Return the fields to adopt from the members' reports if the journal lacks their generation."""
    generation = unknown_generation.newest(view)
    if not generation:
        return {}
    claimed = unknown_generation.claimed_placement(view, generation)
    whole = len(claimed) * view.memory.nproc == view.memory.world_size
    placement = claimed if whole else view.memory.placement
    return {"generation": generation, "placement": placement, "reached": -1}


def _with_evidence(view: View, incident: OpenIncident) -> OpenIncident:
    lines = tuple(map(evidence.describe, reports.all_inspections(view)))
    groups = tuple(
        (group.ranks, group.stack) for group in hung_rank.group_stacks(reports.all_inspections(view))
    )
    return replace(
        incident,
        looked_ns=view.now_ns,
        evidence=(*incident.evidence, *lines),
        stacks=groups,
    )


def _start(view: View, action: Start, policy: Policy) -> JobState:
    view = replace(view, memory=failed_start.without_failed_start(view))
    memory = view.memory
    generation = max(memory.generation, memory.seen) + 1
    resumed, found = action.resume, faults.of_incident(view, policy)
    launch = _launch(view, action, policy, generation)
    restore = launch.restore
    history = memory.history
    is_counted = action.cause is not None and not kind_of(action.cause.kind).is_planned
    # If a member fails and is left out again, its failure is no evidence against the script or the state.
    if action.cause is not None and is_counted and not joining.failed(view, policy):
        history = (*history, _past(view, policy, action.cause, action.placement))[-HISTORY:]
    return replace(
        memory,
        world_size=launch.world_size,
        reduced_by=max(0, policy.members - len(action.placement)) if policy.min_members else 0,
        sizes=resizing.sizes_after(view, policy, generation),
        joined=_joined(view, action, policy) if policy.min_members else (),
        dropped=joining.dropped_after(view, policy, action.placement),
        untried=_untried(memory, action.placement) if policy.members_created_externally else (),
        since_ns=view.now_ns,
        started_ns=view.now_ns,
        generation=generation,
        placement=action.placement,
        launch=launch,
        sources=resumed.sources,
        peers=_peers(view, action.placement),
        lineage=lineage.extended(memory.lineage, generation, resumed.step),
        history=history,
        skip=action.skip,
        incident=_decided(view, action, policy) if memory.incident else None,
        settled=False,
        missed=(*_still_missed(memory, resumed), *_missed(memory, action))[-HISTORY:],
        lost=_lost(view, _members_to_end(view, action, policy)),
        equal=replica_divergence.rolled_back(memory.equal, resumed.step) if restore else (),
        saved=memory.saved if restore else -1,
        held=memory.held if restore else -1,
        reached=-1,
        unbegun=failed_start.pending_start(
            view,
            resumed.step,
            0 if action.cause is None and policy.from_scratch else remedy.last_good_step(found),
            action.cut,
            tuple(fault for fault in found if fault.kind == "exception"),
            from_scratch=action.cause is None and policy.from_scratch,
        ),
        **(_emergency(memory, action) if policy.has_storage else {}),
    )


def _launch(view: View, action: Start, policy: Policy, generation: int) -> Launch:
    """Return the settings that all members start the new generation with."""
    memory, resumed = view.memory, action.resume
    world_size = len(action.placement) * memory.nproc
    restore: Restore | None = None
    states_of: tuple[int, ...] = ()
    if resumed.source != "none":
        # Use only the name, because the path to the checkpoint can differ between members.
        name = resumed.path.rpartition("/")[2]
        saved_ranks = resumed.world_size or memory.world_size
        other_size = saved_ranks if saved_ranks != world_size else 0
        restore = Restore(resumed.step, resumed.generation, resumed.source, name, world_size=other_size)
        states_of = resizing.states_of(view, policy, resumed.generation, saved_ranks // memory.nproc)
    return Launch(
        generation=generation,
        world_size=world_size,
        nproc=memory.nproc,
        master_addr=action.master_addr,
        master_port=action.master_port,
        snapshot_every=policy.snapshot_every,
        snapshot_budget=policy.snapshot_budget,
        skip=action.skip,
        loss_jump=policy.loss_jump,
        loss_jump_fault=policy.loss_jump_fault,
        jumped=_jumped(memory, action.cause),
        patience_s=policy.patience_s,
        restore=restore,
        grace_s=policy.grace_s,
        backups=backups.choose(view, action.placement) if policy.members_created_externally else (),
        states_of=states_of,
        may_resize=bool(policy.min_members),
    )


def _joined(view: View, action: Start, policy: Policy) -> tuple[str, ...]:
    kept = placement.kept_positions(view, policy)
    return joining.joined_after(view.memory, action.placement, kept)


def _untried(memory: JobState, placement: tuple[str, ...]) -> tuple[str, ...]:
    """Return `JobState.untried` after the start of a group with this placement."""
    if not memory.placement:
        return ()
    known = memory.positions.keys() - set(memory.untried)
    return tuple(name for name in placement if name not in known)


def _jumped(memory: JobState, cause: Fault | None) -> tuple[LossJump, ...]:
    """Return the loss jumps that were rolled back. If the same loss recurs, the data is the cause."""
    known = [(past.step, past.value) for past in memory.history if past.kind == "loss_jump"]
    if cause is not None and cause.kind == "loss_jump":
        known.append((cause.step, cause.value))
    return tuple(LossJump(step, value) for step, value in known[-JUMPS:])


def _missed(memory: JobState, action: Start) -> tuple[MissedWork, ...]:
    number = memory.incident.number if memory.incident is not None else 0
    return _as_missed(number, interrupted_work.not_repeated(action.cut, action.resume.step))


def _still_missed(memory: JobState, resumed: ResumePoint) -> tuple[MissedWork, ...]:
    """Return the missed work that a group resuming at `resumed` does not repeat."""
    return tuple(each for each in memory.missed if resumed.step >= each.step + each.early)


def _decided(view: View, action: Start, policy: Policy) -> OpenIncident:
    """Return the open incident with its faults and the decision."""
    incident, resumed = view.memory.incident, action.resume
    assert incident is not None
    world_size = len(action.placement) * view.memory.nproc
    reached = max(incident.reached, reports.furthest_step(view))
    lost_steps = max(0, reached - resumed.step)
    known = reached == 0 or not reports.script_keeps_own_state(view)
    if reached < 0 and view.memory.settled:  # no process is left that knows how many steps were completed
        known = False
    return replace(
        incident,
        faults=faults.of_incident(view, policy),
        secured_ns=view.now_ns,
        manned_ns=view.now_ns if _has_joined_since(view, action, incident) else 0,
        decided_ns=view.now_ns,
        cause=action.cause,
        remedy=action.remedy,
        why=action.why,
        measure=action.measure,
        resume=resumed,
        evidence=(*incident.evidence, *action.evidence, *resumed.notes),
        reached=reached,
        lost=lost_steps if known else None,
        at_least=known and reached > 0 and not reports.is_furthest_step_reported(view),
        cut=action.cut,
        resized=(view.memory.world_size, world_size) if world_size != view.memory.world_size else (),
        skipped=_newly_skipped(view, action),
    )


def _newly_skipped(view: View, action: Start) -> tuple[int, ...]:
    """Return the steps that the group skips because of the fault that it restarts after."""
    stored = resume_point.checkpoint_of(view, action.resume)
    known = {*view.memory.skip, *(stored.skip if stored is not None else ())}
    return tuple(step for step in action.skip if step not in known)


def _has_joined_since(view: View, action: Start, incident: OpenIncident) -> bool:
    """Return True if a member that gets ranks has connected since the fault was noticed."""
    placed = frozenset(action.placement)
    return any(m.name in placed and m.heard_ns > incident.noticed_ns for m in view.members)


def _members_to_end(view: View, action: Start, policy: Policy) -> tuple[str, ...]:
    """Return the members to end, because others take over their ranks and their launchers cannot end them."""
    return tuple(
        name
        for name in view.memory.placement
        if name not in action.placement
        and name not in view.memory.lost
        and (member := view.member(name)) is not None
        and member.exists
        and (not member.connected or members.unresponsive_launcher(member))
    )


class _Saving(TypedDict, total=False):
    save: int
    save_step: int
    save_generation: int
    save_member: str


def _emergency(memory: JobState, action: Start) -> _Saving:
    """Return a request to write the secured state to storage as soon as the group trains again."""
    resumed = action.resume
    able = [name for name in action.placement if name in resumed.holders]
    if action.cause is None or resumed.source != "slot" or not able:
        return {}
    return {
        "save": memory.save + 1,
        "save_step": resumed.step,
        "save_generation": resumed.generation,
        "save_member": able[0],
    }


def _peers(view: View, placement: tuple[str, ...]) -> tuple[StateSource, ...]:
    urls = [m.report.peer_url if (m := view.member(name)) and m.report else "" for name in placement]
    ranks = range(len(placement) * view.memory.nproc)
    return tuple(StateSource(urls[rank // view.memory.nproc], rank) for rank in ranks)


def _past(view: View, policy: Policy, cause: Fault, placement: tuple[str, ...]) -> PastFault:
    if cause.signature == unreachable_members.SIGNATURE and cause.member in placement:
        cause = replace(cause, signature=unreachable_members.KEPT, peers=())
    return PastFault(
        kind=cause.kind,
        rank=cause.rank,
        member=cause.member,
        step=cause.step,
        signature=cause.signature,
        at_ns=view.now_ns,
        generation=view.memory.generation,
        worked=remedy.made_progress(view, cause),
        value=cause.value,
        place=cause.place,
        work=cause.work,
        everywhere=remedy.is_everywhere(view, policy, cause),
        peers=cause.peers,
    )


def _end(view: View, action: End, policy: Policy) -> JobState:
    finished = action.exit_code in (0, exit_codes.CUT_SHORT)
    memory = (
        view.memory if finished else failed_start.state_for_next_run(failed_start.without_failed_start(view))
    )
    view = replace(view, memory=memory)
    incident = memory.incident
    if incident is not None:
        incident = replace(incident, closed_ns=view.now_ns)
        if action.exit_code or incident.resume is None:  # otherwise, the group resumed but had no step left
            incident = replace(
                incident,
                faults=faults.of_incident(view, policy) or incident.faults,
                decided_ns=view.now_ns,
                cause=action.cause or incident.cause,
                remedy="stop",
                why=action.why,
                measure="",
            )
            resumed = incident.resume is not None and not closing.is_finish(action)
            if resumed or memory.end is not None:
                incident = _not_resumed(view, incident, action.back)
    return replace(
        _barred(view, memory, policy, action.back),
        missed=(*memory.missed, *_cut_short(view, memory, action))[-HISTORY:],
        since_ns=view.now_ns,
        first=closing.first_signal(view, action),
        warned=_warned(memory, "the end", action.warning) if action.warning else memory.warned,
        exit_code=action.exit_code,
        why=action.why,
        completion=action.completion,
        message=action.message,
        incident=incident,
        incidents=_count(memory, incident),
        bystanders=_bystanders(view) if policy.members_created_externally else (),
    )


def _bystanders(view: View) -> tuple[str, ...]:
    """Return the members that exist or are listed, but have no ranks."""
    placed = view.memory.positions
    return tuple(m.name for m in view.members if (m.exists or m.is_listed) and m.name not in placed)


def _not_resumed(view: View, incident: OpenIncident, back: int | None) -> OpenIncident:
    """Return `incident` for a run that ends before its next step, which leaves only the state on storage."""
    newest = resume_point.newest_checkpoint(view)
    kept = [newest.step] if newest is not None else [0]
    kept += [back] if back is not None else []
    lost_steps = max(0, incident.reached - min(kept)) if incident.reached >= 0 else None
    unknown = incident.own_state or (incident.resume is not None and incident.lost is None)
    return replace(incident, resume=None, lost=None if unknown else lost_steps)


def _cut_short(view: View, memory: JobState, action: End) -> tuple[MissedWork, ...]:
    """Return the work that a stop interrupts and that the next run does not repeat.

    The next run repeats the work after `action.back`, the step that it resumes from. If it resumes from an
    earlier step, it repeats more work and removes that work from the list (`_still_missed`).
    """
    if failed_start.is_from_scratch(memory, 0):  # the next run repeats all work
        return ()
    if action.exit_code != exit_codes.INTERRUPTED and memory.end is None:
        return _as_missed(0, failed_start.interrupted_before(memory))
    cuts = action.cut or interrupted_work.find(view, ())
    if action.back is not None:
        return _as_missed(0, interrupted_work.not_repeated(cuts, action.back))
    # If a fault ends the run, storage has no state of a later step, so the next run repeats the step.
    known = cuts if memory.end is None else interrupted_work.outside_of_steps(cuts)
    return _as_missed(0, known)


def _as_missed(number: int, cuts: tuple[InterruptedWork, ...]) -> tuple[MissedWork, ...]:
    """Return `cuts` as missed work of the incident `number`, or of a stop if `number` is 0.

    Work that is repeated even if the group resumes at the work's own step is treated as part of the next
    step.
    """
    return tuple(MissedWork(number, each.rank, each.step, each.at_most >= each.step) for each in cuts)


def _barred(view: View, memory: JobState, policy: Policy, back: int | None) -> JobState:
    """Make the states beyond the last good step void, so that the next run in the directory ignores them.

    The lineage is extended as if a generation had resumed from that step and completed no step. `back` is the
    step from which the next run repeats interrupted work; None if there is no such work.
    """
    bad = remedy.last_good_step(faults.of_incident(view, policy))
    good = min((each for each in (bad, back) if each is not None), default=None)
    if good is None:
        return memory
    barred = max(memory.generation, memory.seen) + 1
    return replace(
        memory,
        seen=barred,
        lineage=lineage.extended(memory.lineage, barred, good),
        equal=replica_divergence.rolled_back(memory.equal, good),
    )


# How each action changes the state, apart from the phase.
_EFFECTS: Mapping[type[Any], Callable[[View, Any, Policy], JobState]] = MappingProxyType(
    {
        Warn: _warn,
        Learn: _learn,
        Secure: _secure,
        Start: _start,
        Settle: _settle,
        Save: _save,
        Preserve: _preserve,
        Replace: _replace,
        End: _end,
        Done: _done,
        Look: _unchanged,
        Dismiss: _unchanged,
    }
)


def is_resized(before: JobState, after: JobState) -> bool:
    """True if a decision changes the size of the group.

    Such a decision is carried out only if it was recorded.
    """
    return before.sizes != after.sizes


def taken_over(memory: JobState, now_ns: int) -> JobState:
    """Return the job's state for a supervisor that takes over at `now_ns`.

    Its predecessor may have been stuck since the phase began. During that time, members may have been unable
    to report or to receive orders, so all time limits for them start again now.
    """
    if memory.phase == "looking":  # the predecessor, a version before 0.1.0, was inspecting late ranks
        memory = replace(memory, phase="running", incident=None)
    return replace(memory, since_ns=now_ns)


def with_stop_request(memory: JobState, how: StopRequest) -> JobState:
    """Return the state after a request to stop (`JobState.stop`). Only "now" replaces an earlier request."""
    if memory.stop == "now" or (memory.stop and how != "now"):
        return memory
    return replace(memory, stop=how)
