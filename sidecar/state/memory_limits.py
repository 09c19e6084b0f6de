"""Measure how much memory this member uses, and how much more it can get.

A container can have less memory than its machine. This module therefore checks the limits of all cgroups from
this process's own up to the root of the mount, in cgroup versions 1 and 2. The page cache of files counts as
free, because the kernel reclaims it before it refuses an allocation. Files in a tmpfs do not count as free.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.process import cgroup
from holdfast.protocol.member_messages import MemoryUse
from holdfast.snapshot import member_directory
from holdfast.snapshot.member_directory import ARENA, RESTORED
from holdfast.snapshot.slot_file import BLOCK_BYTES

INTERVAL_S = 0.25
_MEMINFO = Path("/proc/meminfo")


class MemoryGauge:
    """Measures the member's memory at most once in `INTERVAL_S`, because a measurement takes 0.3 ms.

    In a recovery, the sidecar sends a dozen reports within a few milliseconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._last: MemoryUse | None = None
        self._measured_s = 0.0

    def read(self, state_bytes: int) -> MemoryUse:
        """Return the result of `measure`, which is at most `INTERVAL_S` old."""
        now_s, last = self._clock(), self._last
        if last is None or last.state_bytes != state_bytes or now_s - self._measured_s >= INTERVAL_S:
            last, self._measured_s = measure(self._directory, state_bytes), now_s
            self._last = last
        return last


def measure(directory: Path, state_bytes: int) -> MemoryUse:
    """Return how much memory the snapshots and private states in `directory` use, and how much is available.

    If the usage cannot be read, it is reported as zero; if the available memory cannot be read, it is
    reported as unlimited. Otherwise the supervisor might refuse a start because of the missing value.
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
        # How much swap the cgroup may use is unknown. Assume all of it, because the alternative is to refuse
        # a start that might succeed.
        left = allowed.left_bytes + _meminfo("SwapFree", 0)
        if left < available:
            available, limit = left, allowed.limit_bytes
    return MemoryUse(volume, state_bytes, slots, private, free, available, limit)


def _meminfo(name: str, unknown: int) -> int:
    """Return the field `name` of /proc/meminfo in bytes; `unknown` if it cannot be read."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) << 10
    return unknown


_RECLAIMED = ("inactive_file", "active_file", "slab_reclaimable")  # in cgroup version 2
_RECLAIMED_1 = ("total_inactive_file", "total_active_file")


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The remaining memory and the limit of the cgroup that has the least memory left."""

    left_bytes: int
    limit_bytes: int


def cgroup_limit(membership: Path = cgroup.MEMBERSHIP, mount: Path = cgroup.MOUNT) -> CgroupLimit | None:
    """Return the tightest limit among this process's memory cgroups; None if no limit is set or readable."""
    found = [each for group in _groups(membership, mount) if (each := _limit_of(group)) is not None]
    return min(found, key=lambda each: each.left_bytes, default=None)


def _groups(membership: Path, mount: Path) -> Iterator[Path]:
    """Yield the directory of each memory cgroup of this process that the mount contains."""
    for found in cgroup.memory_cgroups(membership, mount):
        names = found.below.split("/")
        if ".." in names:  # this process cannot see the cgroup
            continue
        for root in found.roots:
            yield root
            yield from (root.joinpath(*names[:depth]) for depth in range(1, len(names) + 1))


def _limit_of(group: Path) -> CgroupLimit | None:
    for names in (
        ("memory.max", "memory.current", _RECLAIMED),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", _RECLAIMED_1),
    ):
        limit_bytes, used_bytes = cgroup.read_number(group / names[0]), cgroup.read_number(group / names[1])
        if limit_bytes is None or used_bytes is None or limit_bytes >= cgroup.UNLIMITED_BYTES:
            continue
        left_bytes = limit_bytes - used_bytes + _sum(group / "memory.stat", names[2])
        return CgroupLimit(max(0, min(left_bytes, limit_bytes)), limit_bytes)
    return None


def _sum(path: Path, names: tuple[str, ...]) -> int:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return 0
    return sum(int(each[1]) for each in words if len(each) == 2 and each[0] in names and each[1].isdecimal())
