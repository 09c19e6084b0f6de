"""Choose the sources of the state that one member needs. Pure.

The job's state lists a source for every rank and every holder of its state: about 50,000 for 2,000 members
with 8 ranks. To start its ranks, a member needs only their sources. Only members that write checkpoints need
all sources. To keep their orders small, they get one entry for consecutive ranks of one holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.protocol.member_messages import StateSource
from supervisor.identity_cache import by_identity
from supervisor.view.model import JobState

# A member that lacks the snapshot fetches parts of it from all holders that it knows. More holders than this
# would not make the transfer faster, because the member's own network is the limit.
SNAPSHOT_HOLDERS = 8


def holders(memory: JobState, position: int) -> tuple[StateSource, ...]:
    """Return the holders from which the member at `position` in the placement fetches the snapshot.

    If there are many, members get different ones, to keep one holder from serving all of them.
    """
    found = _sorted_by_rank(memory.sources).get(-1, ())
    if len(found) <= SNAPSHOT_HOLDERS:
        return found
    first = position % len(found)
    return (*found[first : first + SNAPSHOT_HOLDERS], *found)[:SNAPSHOT_HOLDERS]


def for_ranks(memory: JobState, position: int) -> tuple[StateSource, ...]:
    """Return the sources of the private states of the ranks at `position` in the placement."""
    found = _sorted_by_rank(memory.sources)
    return grouped(source for rank in ranks_of(memory, position) for source in found.get(rank, ()))


def ranks_of(memory: JobState, position: int) -> range:
    """Return the ranks whose private states the ranks at `position` in the placement start from.

    The ranks had other numbers if the group that saved the state had another size. A new member starts from
    another member's states.
    """
    launch = memory.launch
    if launch is not None and launch.states_of and launch.restore is not None:
        saved = max(1, (launch.restore.world_size or launch.world_size) // memory.nproc)
        position = launch.states_of[position] if launch.states_of[position] >= 0 else position % saved
    return range(position * memory.nproc, (position + 1) * memory.nproc)


def is_shared(memory: JobState, position: int) -> bool:
    """True if the ranks at `position` start from private states that other ranks also start from."""
    states_of = memory.launch.states_of if memory.launch is not None else ()
    return bool(states_of) and states_of[position] < 0


def for_checkpoint(memory: JobState) -> tuple[StateSource, ...]:
    """Return the sources of all private states: those for the secured state, then each rank's own member."""
    return (*_private_grouped(memory.sources), *_private_grouped(memory.peers))


def grouped(sources: Iterable[StateSource]) -> tuple[StateSource, ...]:
    """Return equivalent sources, merged into one where a member holds the states of consecutive ranks."""
    last: dict[tuple[str, int, int], int] = {}  # the position of the holder's last entry
    found: list[tuple[str, int, int, int, int]] = []
    for each in sources:
        holder = (each.url, each.generation, each.step)
        position = last.get(holder, -1)
        if position >= 0 and each.rank >= 0:
            url, rank, generation, step, count = found[position]
            if rank >= 0 and each.rank == rank + count:
                found[position] = (url, rank, generation, step, count + each.count)
                continue
        last[holder] = len(found)
        found.append((each.url, each.rank, each.generation, each.step, each.count))
    return tuple(StateSource(*each) for each in found)


def of_each_rank(sources: Iterable[StateSource]) -> tuple[StateSource, ...]:
    """Return equivalent sources, one for each rank and sorted by rank. This reverses `grouped`."""
    found = [
        StateSource(each.url, each.rank + offset, each.generation, each.step)
        for each in sources
        for offset in range(each.count)
    ]
    return tuple(sorted(found, key=lambda each: each.rank))


@by_identity(4)
def _private_grouped(sources: tuple[StateSource, ...]) -> tuple[StateSource, ...]:
    return grouped(each for each in sources if each.rank >= 0)


@by_identity(4)
def _sorted_by_rank(sources: tuple[StateSource, ...]) -> Mapping[int, tuple[StateSource, ...]]:
    found: dict[int, list[StateSource]] = {}
    for each in sources:
        found.setdefault(each.rank, []).append(each)
    return {rank: tuple(those) for rank, those in found.items()}
