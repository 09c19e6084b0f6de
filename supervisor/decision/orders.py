"""Derive the order for each member from the job's state alone. Pure.

An order describes the state that the member must reach, so repeating an order is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from holdfast import exit_codes
from holdfast.protocol import lineage
from holdfast.protocol.launcher_messages import RankStart
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import DrillOrder, MemberAction, MemberOrder, StateSource
from supervisor.decision import state_sources, unreachable_members
from supervisor.fault_kinds import kind_of
from supervisor.identity_cache import by_identity
from supervisor.view import interrupted_work
from supervisor.view.model import JobState, Policy

# Creates an order that already contains the values common to all orders. Copying an order to add these values
# would take as long as creating it.
_Make: TypeAlias = Callable[..., MemberOrder]

BUSY_S = 10.0  # a start delays the creation of members for at most this long, even without a step


def order_for(
    memory: JobState,
    member: str,
    policy: Policy,
    drill: DrillOrder | None,
    inspection_id: int = 0,
    epoch: int = 0,
) -> MemberOrder:
    """Return the order for `member`. The order stays valid until the job's state or `inspection_id` changes.

    `inspection_id` is the result of `deadlock.inspection_id`, and `epoch` is the sender's epoch. Every order
    specifies which checkpoints may be deleted, because the member may still be writing one.
    """
    # The newest state may be the cause of the fault that ends a run. Its checkpoint displaces no older one.
    spared = 1 if memory.end is not None else 0
    make = partial(
        MemberOrder,
        keep=policy.keep + spared,
        lineage=_lineage(memory),
        proven=_proven(memory),
        void=interrupted_work.recorded_void_steps(memory),
        epoch=epoch,
    )
    return _order_for(make, memory, member, policy, drill, inspection_id)


def _proven(memory: JobState) -> int:
    """Return the last step at which replicas were equal: 0 for none yet, -1 if one member hosts all ranks."""
    if memory.equal:
        return memory.equal[-1]
    return 0 if memory.world_size > memory.nproc else -1


def _lineage(memory: JobState) -> tuple[Lineage, ...]:
    """Return the lineage, already extended if the last checkpoint will make newer states void.

    The last checkpoint of a run can precede work that the stop interrupts. In that case, it makes newer
    checkpoints void. If the lineage did not show this, a sidecar could keep a newer checkpoint and delete the
    last one.
    """
    if memory.phase != "saving" or not any(memory.save_step <= each.at_most for each in memory.cut):
        return memory.lineage
    return lineage.extended(memory.lineage, max(memory.generation, memory.seen) + 1, memory.save_step)


def _order_for(
    make: _Make, memory: JobState, member: str, policy: Policy, drill: DrillOrder | None, inspection_id: int
) -> MemberOrder:
    if memory.phase in ("stopping", "ended"):
        grace_s = policy.grace_s if memory.stop != "now" else 0.0
        # After a failure, a rank that is not already ending could wait forever for the failed rank.
        ending_only = memory.exit_code not in (0, exit_codes.INTERRUPTED)
        return make(
            "stop",
            memory.generation,
            grace_s=grace_s,
            ending_only=ending_only,
            first=memory.first,
            exit_code=memory.exit_code or 0,
        )
    if member not in memory.positions or memory.phase == "forming":
        # `secure` makes standbys report their states too, because they may have hosted ranks before.
        do: MemberAction = "secure" if memory.phase in ("securing", "saving") else "idle"
        return _with_request(make(do, memory.generation, just_in_time=False, drill=drill), memory, member)
    if memory.phase in ("securing", "saving"):
        order = make(
            "secure",
            memory.generation,
            just_in_time=not memory.finished,
            copy=_survivors_are_good(memory),
            suspects=_suspects(memory),
            save_step=memory.save_step,
            save_generation=memory.save_generation,
        )
        return _with_request(order, memory, member)
    return _run(make, memory, member, policy, drill, inspection_id)


def _with_request(order: MemberOrder, memory: JobState, member: str) -> MemberOrder:
    """Return the order to a group that has stopped, with the request to save if `member` must save its state.

    A member can hold the state without having ranks, if its ranks have moved to a standby.
    """
    if member != memory.save_member:
        return order
    if memory.phase != "saving" and not (memory.phase == "securing" and _preserves(memory)):
        return order
    return replace(
        order,
        sources=state_sources.for_checkpoint(memory),
        save=memory.save,
        save_step=memory.save_step,
        save_generation=memory.save_generation,
    )


def _preserves(memory: JobState) -> bool:
    """True if the last request to save came from a `Preserve`, while the group lacked a member."""
    return memory.incident is not None and memory.incident.preserved == memory.save > 0


def _run(
    make: _Make, memory: JobState, member: str, policy: Policy, drill: DrillOrder | None, inspection_id: int
) -> MemberOrder:
    position = memory.positions[member]
    first = position * memory.nproc
    sources = state_sources.ranks_of(memory, position)
    shared = state_sources.is_shared(memory, position)
    ranks = tuple(
        RankStart(
            first + local,
            local,
            state_of=-1 if source == first + local else source,
            is_shared=shared,
        )
        for local, source in enumerate(sources)
    )
    neighbours = _neighbours(memory, position, policy)
    must_reach = _untried_neighbours(memory, member, position, neighbours)
    must_confirm = _must_confirm(memory, member, position, neighbours)
    return make(
        "run",
        memory.generation,
        launch=memory.launch,
        ranks=ranks,
        sources=_sources(memory, member, position),
        settled=memory.settled,
        checkpoint_every_s=policy.checkpoint_every_s,
        save=memory.save if memory.settled and member == memory.save_member else 0,
        save_step=memory.save_step,
        save_generation=memory.save_generation,
        drill=drill,
        look=inspection_id,
        neighbours=neighbours,
        must_reach=tuple(each for each in neighbours if each in must_reach or each in must_confirm),
        must_confirm=must_confirm,
    )


def _neighbours(memory: JobState, position: int, policy: Policy) -> tuple[str, ...]:
    """Return the addresses of the members that a member should reach; () unless it has peers on a cluster.

    These are the members whose ranks directly precede and follow its own, so two members probe each member.
    Two probes are enough to find a member that is cut off from all others (`membership.cut_off_members`).
    """
    count = len(memory.placement)
    if not policy.members_created_externally or count < 2:
        return ()
    beside = {(position - 1) % count, (position + 1) % count}
    urls = _urls(memory.peers, memory.nproc)
    return tuple(urls[each] for each in sorted(beside) if each in urls)


def _untried_neighbours(
    memory: JobState, member: str, position: int, neighbours: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the neighbours that are considered out of reach even if the member has never reached them.

    The result is usually (), because a NetworkPolicy may allow only the ranks' own connections. There are two
    exceptions. Until the group has completed a step, a member that has reached others should also reach a
    member that is new in the group. The same holds for the member that stayed when its only unreached peer
    was replaced (`unreachable_members.suspect`).
    """
    suspect = unreachable_members.suspect(memory, memory.started_ns) if not memory.settled else ""
    names = _untried(memory.untried) | {suspect} if suspect else _untried(memory.untried)
    if memory.settled or not names:
        return ()
    if member in names:
        return neighbours
    urls, count = _urls(memory.peers, memory.nproc), len(memory.placement)
    beside = {(position + step) % count for step in (-1, 1)}
    wanted = {urls.get(each) for each in beside if memory.placement[each] in names}
    return tuple(each for each in neighbours if each in wanted)


def _must_confirm(
    memory: JobState, member: str, position: int, neighbours: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the neighbours that have reported the member as out of reach without its confirmation.

    The member must reach them even if its sidecar is new and has therefore not reached any neighbour yet.
    """
    if not memory.asked or not neighbours:
        return ()
    urls, count = _urls(memory.peers, memory.nproc), len(memory.placement)
    wanted = {
        urls.get(each)
        for each in {(position + step) % count for step in (-1, 1)}
        if unreachable_members.is_asked_to_confirm(memory, member, memory.placement[each])
    }
    return tuple(each for each in neighbours if each in wanted)


@by_identity(4)  # many members of a large group may be new
def _untried(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


@by_identity(4)  # `peers` names every rank, maybe thousands, and every member gets an order
def _urls(peers: tuple[StateSource, ...], nproc: int) -> dict[int, str]:
    """Return the members' addresses, in the order of their positions."""
    return {each.rank // nproc: each.url for each in peers if each.url}


def _sources(memory: JobState, member: str, position: int) -> tuple[StateSource, ...]:
    """Return the sources of the state that a member needs to start, and to write the group's checkpoints.

    The member of rank 0 writes the periodic checkpoints.
    """
    if position and member != memory.save_member:
        return (*state_sources.holders(memory, position), *state_sources.for_ranks(memory, position))
    return (*state_sources.holders(memory, position), *state_sources.for_checkpoint(memory))


def _suspects(memory: JobState) -> tuple[int, ...]:
    """Return the ranks that are known to hang, or () if all ranks hang."""
    known = memory.incident
    if known is None or known.generation != memory.generation:
        return ()
    found = {fault.rank for fault in known.faults if fault.kind == "hang"}
    return tuple(sorted(found)) if len(found) < memory.world_size else ()


def _survivors_are_good(memory: JobState) -> bool:
    """True unless a fault, such as a bad number, has spoiled the survivors' state too."""
    known = memory.incident.faults if memory.incident else ()
    return not any(kind_of(fault.kind).spoils_state for fault in known)


def may_create_members(memory: JobState, now_ns: int) -> bool:
    """True if no recovery needs the CPU time that creating a member takes, which is several seconds.

    If the script completes no steps, the group never settles, so its standby is created after `BUSY_S`.
    """
    if memory.phase == "running":
        return memory.settled or now_ns >= memory.since_ns + int(BUSY_S * 1e9)
    return memory.phase == "forming" or any(name in memory.lost for name in memory.placement)
