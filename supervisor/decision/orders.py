"""What each member should be doing, from the memory alone. Pure, so that sending it again is harmless."""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol import lineage
from holdfast.protocol.launcher_messages import RankStart
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import DrillOrder, MemberOrder
from supervisor import exit_codes
from supervisor.fault_kinds import kind_of
from supervisor.view import cut_off_work
from supervisor.view.model import JobState, Policy

BUSY_S = 10.0  # a generation that has done no step by then no longer keeps new members from being made


def order_for(
    memory: JobState, member: str, policy: Policy, drill: DrillOrder | None, look: int = 0
) -> MemberOrder:
    """Return the order for `member`, which holds until the job's state or `look` changes.

    `look` is `deadlock.inspection_request`. Each order says what may be deleted from storage, because a
    checkpoint may still be under way.
    """
    order = _order_for(memory, member, policy, drill)
    looks = look if order.do == "run" else 0
    return replace(
        order,
        keep=policy.keep,
        lineage=_lineage(memory),
        proven=_proven(memory),
        look=looks,
        void=cut_off_work.recorded_void_steps(memory),
    )


def _proven(memory: JobState) -> int:
    """Return the last step at which the replicas were equal; 0 for none yet, -1 where there is only one."""
    if memory.equal:
        return memory.equal[-1]
    return 0 if memory.world_size > memory.nproc else -1


def _lineage(memory: JobState) -> tuple[Lineage, ...]:
    """Return what is void once the present work is done.

    The last save of a run may go back behind work that it cuts off: else a newer checkpoint, which does not
    count then, could push it off storage.
    """
    if memory.phase != "saving" or not any(memory.save_step <= each.at_most for each in memory.cut):
        return memory.lineage
    return lineage.extended(memory.lineage, max(memory.generation, memory.seen) + 1, memory.save_step)


def _order_for(memory: JobState, member: str, policy: Policy, drill: DrillOrder | None) -> MemberOrder:
    if memory.phase in ("stopping", "ended"):
        grace_s = policy.grace_s if memory.stop != "now" else 0.0
        in_peace = memory.exit_code in (
            0,
            exit_codes.INTERRUPTED,
        )  # else who is not ending by itself may never end
        return MemberOrder(
            "stop", memory.generation, grace_s=grace_s, ending_only=not in_peace, first=memory.first
        )
    if member not in memory.placement or memory.phase == "forming":
        # `secure` makes standbys list what they hold too: they may have had ranks before
        do = "secure" if memory.phase in ("securing", "saving") else "idle"
        return MemberOrder(do, memory.generation, just_in_time=False, drill=drill)
    if memory.phase in ("securing", "saving"):
        mine = memory.phase == "saving" and member == memory.save_member
        return MemberOrder(
            "secure",
            memory.generation,
            just_in_time=not memory.finished,
            copy=_survivors_are_good(memory),
            suspects=_suspects(memory),
            sources=(*memory.sources, *memory.peers) if mine else (),
            save=memory.save if mine else 0,
            save_step=memory.save_step,
            save_generation=memory.save_generation,
        )
    return _run(memory, member, policy, drill)


def _run(memory: JobState, member: str, policy: Policy, drill: DrillOrder | None) -> MemberOrder:
    block = memory.placement.index(member)
    first = block * memory.nproc
    ranks = tuple(RankStart(first + local, local) for local in range(memory.nproc))
    return MemberOrder(
        "run",
        memory.generation,
        launch=memory.launch,
        ranks=ranks,
        sources=(*memory.sources, *memory.peers),
        settled=memory.settled,
        checkpoint_every_s=policy.checkpoint_every_s,
        save=memory.save if memory.settled and member == memory.save_member else 0,
        save_step=memory.save_step,
        save_generation=memory.save_generation,
        drill=drill,
    )


def _suspects(memory: JobState) -> tuple[int, ...]:
    """Return the ranks that hang, as far as that is known; nobody where there is no other."""
    known = memory.incident
    if known is None or known.generation != memory.generation:
        return ()
    found = {fault.rank for fault in known.faults if fault.kind == "hang"}
    return tuple(sorted(found)) if len(found) < memory.world_size else ()


def _survivors_are_good(memory: JobState) -> bool:
    """False when the survivors' state is as bad as the one that was found bad."""
    known = memory.incident.faults if memory.incident else ()
    return not any(kind_of(fault.kind).spoils_state for fault in known)


def may_create_members(memory: JobState, now_ns: int) -> bool:
    """True when members may be made: it costs seconds of CPU, which a recovery has better use for.

    A script that does no steps never settles, and is not to stay without a standby for that.
    """
    if memory.phase == "running":
        return memory.settled or now_ns >= memory.since_ns + int(BUSY_S * 1e9)
    return memory.phase == "forming" or any(name in memory.lost for name in memory.placement)
