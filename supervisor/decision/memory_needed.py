"""Check whether the memory volumes have room for the snapshots of a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast import exit_codes
from holdfast.protocol.defaults import SNAPSHOT_SLOTS
from holdfast.protocol.member_messages import MemoryUse
from supervisor.view import reports
from supervisor.view.model import End, View

STANDBY_SLOTS = 1  # a standby fetches one snapshot when it takes over ranks
EARLY_STEPS = 64  # a run can be refused only during its first steps, while little work would be lost


@dataclass(frozen=True, slots=True)
class Volume:
    """One memory volume, with the total needs of its members and the memory available to them."""

    name: str
    members: tuple[str, ...]
    needed_bytes: int
    used_bytes: int
    available_bytes: int
    state_bytes: int
    limit_bytes: int = 0  # the cgroup limit that determines `available_bytes`; 0 if none does

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


def volumes(view: View) -> tuple[Volume, ...]:
    """Return the memory volumes of the run; () until the size of the state is known."""
    state_bytes = max((room.state_bytes for _, room in _rooms(view)), default=0)
    if not state_bytes:
        return ()
    names = sorted({room.volume for _, room in _rooms(view)})
    return tuple(_volume(view, name, state_bytes) for name in names)


def _volume(view: View, volume: str, state_bytes: int) -> Volume:
    members = [(name, room) for name, room in _rooms(view) if room.volume == volume]
    needed = used = 0
    for name, room in members:
        slots = SNAPSHOT_SLOTS if name in view.memory.positions else STANDBY_SLOTS
        used += room.slots_bytes + room.private_bytes
        needed += max(slots * state_bytes, room.slots_bytes) + room.private_bytes
    free = min(room.free_bytes for _, room in members)
    tightest = min((room for _, room in members), key=lambda room: room.available_bytes)
    unused = min(free, tightest.available_bytes)
    limit = tightest.limit_bytes if tightest.available_bytes < free else 0
    return Volume(volume, tuple(name for name, _ in members), needed, used, used + unused, state_bytes, limit)


def _rooms(view: View) -> list[tuple[str, MemoryUse]]:
    found = [
        (m.name, m.report.room) for m in view.members if m.exists and m.connected and m.report is not None
    ]
    return [(name, room) for name, room in found if room.volume]


def reason_to_refuse(view: View) -> End | None:
    """Return an `End` if the run is in its first steps and its snapshots do not fit; None otherwise.

    The message tells the user what to change.
    """
    memory = view.memory
    launch = memory.launch
    began = launch.restore.step if launch is not None and launch.restore is not None else 0
    if memory.history or memory.joined or reports.furthest_step(view) > began + EARLY_STEPS:
        return None
    for volume in volumes(view):
        if not volume.fits:
            return End(exit_codes.BAD_INPUT, _advice(volume, volume.members, view))
    return None


def _advice(volume: Volume, members: tuple[str, ...], view: View) -> str:
    active = sum(name in view.memory.positions for name in members)
    standbys = len(members) - active
    who = f"{SNAPSHOT_SLOTS} snapshots for each of {active} members"
    who += f" and {STANDBY_SLOTS} for each of {standbys} standbys" if standbys else ""
    by = f" under the memory limit of {_size(volume.limit_bytes)} of its cgroup" if volume.limit_bytes else ""
    more = "a higher memory limit" if by else "more room in /dev/shm (docker run --shm-size) and memory"
    return (
        f"not enough memory: a state of {_size(volume.state_bytes)} takes {_size(volume.needed_bytes)} in"
        f" shared memory ({who}), but only {_size(volume.available_bytes)} is available{by};"
        f" use fewer members or standbys on this host, or give it {more}"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def as_status(view: View) -> dict[str, Any] | None:
    """Return the status field `memory`, which describes the volume with the least room left.

    Returns None until the size of the state is known.
    """
    found = volumes(view)
    if not found:
        return None
    tightest = min(found, key=lambda volume: volume.available_bytes - volume.needed_bytes)
    return {
        "state_bytes": tightest.state_bytes,
        "needed_bytes": tightest.needed_bytes,
        "available_bytes": tightest.available_bytes,
        "used_bytes": tightest.used_bytes,
        "members": list(tightest.members),
    }
