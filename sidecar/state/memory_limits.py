"""How much memory this member uses, and how much is left for it.

A container can have less than its machine: the limits of all cgroups count, from the process's own up to the
root of the mount, in version 1 and 2. What files have in the page cache counts as free, because the kernel
gives it back before it refuses anything. tmpfs is not among it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.protocol.member_messages import MemoryUse
from holdfast.snapshot import member_directory
from holdfast.snapshot.member_directory import ARENA, RESTORED
from holdfast.snapshot.slot_file import BLOCK_BYTES

_MEMINFO = Path("/proc/meminfo")


def measure(directory: Path, state_bytes: int) -> MemoryUse:
    """Return what the snapshots and private states below `directory` take, and what their volume can give.

    What cannot be read counts as nothing taken and as unlimited room: no start is refused for that.
    """
    slots = private = 0
    with suppress(OSError):
        for path in (*(directory / ARENA).glob("*"), *(directory / RESTORED).glob("*")):
            with suppress(OSError):
                taken = path.stat().st_blocks * BLOCK_BYTES
                if member_directory.is_slot(path.name):
                    slots += taken
                else:
                    private += taken
    volume, free = "", 2**63 - 1
    with suppress(OSError):
        found = os.statvfs(directory)
        volume, free = f"{socket.gethostname()}:{directory.stat().st_dev}", found.f_bavail * found.f_frsize
    available, limit = _meminfo("MemAvailable", 2**63 - 1), 0
    allowed = cgroup_limit()
    if allowed is not None:
        left = allowed.left_bytes + _meminfo(
            "SwapFree", 0
        )  # a group may have all of that: refuse nobody for it
        if left < available:
            available, limit = left, allowed.limit_bytes
    return MemoryUse(volume, state_bytes, slots, private, free, available, limit)


def _meminfo(name: str, unknown: int) -> int:
    """Return the bytes that the kernel gives under `name`."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) << 10
    return unknown


UNLIMITED_BYTES = 1 << 60  # version 1 says "no limit" as a number near 2^63
_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_RECLAIMED = ("inactive_file", "active_file", "slab_reclaimable")  # of version 2
_RECLAIMED_1 = ("total_inactive_file", "total_active_file")


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """What the tightest group can still give, and its limit."""

    left_bytes: int
    limit_bytes: int


def cgroup_limit(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> CgroupLimit | None:
    """Return what the memory cgroups of this process leave it; None where no limit can be read."""
    found = [each for group in _groups(membership, mount) if (each := _of(group)) is not None]
    return min(found, key=lambda each: each.left_bytes, default=None)


def _groups(membership: Path, mount: Path) -> Iterator[Path]:
    """Yield the directory of each group of this process, as far as the mount shows it."""
    try:
        entries = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except (OSError, ValueError):
        return
    for entry in entries:
        if len(entry) != 3 or ".." in entry[2].split("/"):
            continue
        below = entry[2].strip("/")
        if "memory" in entry[1].split(","):
            roots = [mount / "memory"]
        else:
            roots = [mount, mount / "unified"] if entry[1] == "" else []
        for root in roots:
            yield root
            yield from (root.joinpath(*below.split("/")[:depth]) for depth in range(1, below.count("/") + 2))


def _of(group: Path) -> CgroupLimit | None:
    for names in (
        ("memory.max", "memory.current", _RECLAIMED),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", _RECLAIMED_1),
    ):
        limit_bytes, used_bytes = _number(group / names[0]), _number(group / names[1])
        if limit_bytes is None or used_bytes is None or limit_bytes >= UNLIMITED_BYTES:
            continue
        left_bytes = limit_bytes - used_bytes + _sum(group / "memory.stat", names[2])
        return CgroupLimit(max(0, min(left_bytes, limit_bytes)), limit_bytes)
    return None


def _number(path: Path) -> int | None:
    """Return what a file of one number says; None for "max" and for anything else."""
    try:
        text = path.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def _sum(path: Path, names: tuple[str, ...]) -> int:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return 0
    return sum(int(each[1]) for each in words if len(each) == 2 and each[0] in names and each[1].isdecimal())
