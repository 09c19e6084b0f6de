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
# The interval while the ranks train undisturbed, when nothing depends on the measurement. It is a little less
# than 2 s, because the reports are made at ticks.
CALM_S = 1.9
SEARCH_S = 5.0  # a cgroup may receive a limit, and a process may be moved to another cgroup
_MEMINFO = "/proc/meminfo"
_READ_BYTES = 1 << 14  # /proc/meminfo and memory.stat are shorter


class MemoryGauge:
    """Measures the member's memory at most once in `INTERVAL_S`, because a measurement takes 0.1 ms.

    In a recovery, the sidecar sends a dozen reports within a few milliseconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._last: MemoryUse | None = None
        self._measured_s = 0.0
        self._limits: CgroupLimits | None = None
        self._searched_s = 0.0

    def read(self, state_bytes: int, *, calm: bool = False) -> MemoryUse:
        """Return the result of `measure`, which is at most `INTERVAL_S` old, or `CALM_S` if `calm` is true.

        It includes the limits of the cgroups that had one at most `SEARCH_S` ago.
        """
        now_s, last = self._clock(), self._last
        most_s = CALM_S if calm else INTERVAL_S
        if last is None or last.state_bytes != state_bytes or now_s - self._measured_s >= most_s:
            if self._limits is None or now_s - self._searched_s >= SEARCH_S:
                self._limits, self._searched_s = CgroupLimits(), now_s
            last, self._measured_s = measure(self._directory, state_bytes, self._limits), now_s
            self._last = last
        return last


def measure(directory: Path, state_bytes: int, limits: CgroupLimits | None = None) -> MemoryUse:
    """Return how much memory the snapshots and private states in `directory` use, and how much is available.

    If the usage cannot be read, it is reported as zero; if the available memory cannot be read, it is
    reported as unlimited. Otherwise the supervisor might refuse a start because of the missing value.
    `limits` may be an earlier result of `CgroupLimits()`.
    """
    slots, private = _used(directory)
    volume, free = "", 2**63 - 1
    with suppress(OSError):
        found = os.statvfs(directory)
        device = os.stat(directory).st_dev  # noqa: PTH116
        volume, free = f"{socket.gethostname()}:{device}", found.f_bavail * found.f_frsize
    text = _contents(_MEMINFO)
    available, limit = _meminfo(text, b"MemAvailable", 2**63 - 1), 0
    allowed = (limits or CgroupLimits()).tightest()
    if allowed is not None:
        # How much swap the cgroup may use is unknown. Assume all of it, because the alternative is to refuse
        # a start that might succeed.
        left = allowed.left_bytes + _meminfo(text, b"SwapFree", 0)
        if left < available:
            available, limit = left, allowed.limit_bytes
    return MemoryUse(volume, state_bytes, slots, private, free, available, limit)


def _used(directory: Path) -> tuple[int, int]:
    """Return the bytes that snapshots and private states take in `directory`."""
    slots = private = 0
    for folder in (ARENA, RESTORED):
        with suppress(OSError), os.scandir(directory / folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    taken = entry.stat().st_blocks * BLOCK_BYTES
                    if member_directory.is_slot(entry.name):
                        slots += taken
                    else:
                        private += taken
    return slots, private


def _contents(path: str) -> bytes:
    """Return the content of a small file of the kernel; b"" if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _READ_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return b""


def _meminfo(text: bytes, name: bytes, unknown: int) -> int:
    """Return a field of /proc/meminfo in bytes; `unknown` if `text` lacks it."""
    found = re.search(rb"^" + name + rb":\s+(\d+) kB$", text, re.MULTILINE)
    return unknown if found is None else int(found[1]) << 10


_RECLAIMED = (b"inactive_file", b"active_file", b"slab_reclaimable")  # in cgroup version 2
_RECLAIMED_1 = (b"total_inactive_file", b"total_active_file")


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The remaining memory and the limit of the cgroup that has the least memory left."""

    left_bytes: int
    limit_bytes: int


class CgroupLimits:
    """The memory limits of this process's cgroups, which are searched for when the object is created."""

    def __init__(self, membership: Path = cgroup.MEMBERSHIP, mount: Path = cgroup.MOUNT) -> None:
        self._groups = [
            files
            for group in _groups(membership, mount)
            for files in _files(group)
            if _limit_of(files) is not None
        ]

    def tightest(self) -> CgroupLimit | None:
        """Return the tightest limit now; None if no limit was set or readable at the search."""
        found = [each for files in self._groups if (each := _limit_of(files)) is not None]
        return min(found, key=lambda each: each.left_bytes, default=None)


@dataclass(frozen=True, slots=True)
class _Files:
    """The paths of a cgroup's limit, usage and statistics, and which statistics count as free."""

    limit: str
    usage: str
    stat: str
    reclaimed: tuple[bytes, ...]


def _groups(membership: Path, mount: Path) -> Iterator[Path]:
    """Yield the directory of each memory cgroup of this process that the mount contains."""
    for found in cgroup.memory_cgroups(membership, mount):
        names = found.below.split("/")
        if ".." in names:  # this process cannot see the cgroup
            continue
        for root in found.roots:
            yield root
            yield from (root.joinpath(*names[:depth]) for depth in range(1, len(names) + 1))


def _files(group: Path) -> Iterator[_Files]:
    """Yield the files of a cgroup in version 2, and then in version 1."""
    for limit, usage, reclaimed in (
        ("memory.max", "memory.current", _RECLAIMED),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", _RECLAIMED_1),
    ):
        yield _Files(str(group / limit), str(group / usage), str(group / "memory.stat"), reclaimed)


def _limit_of(files: _Files) -> CgroupLimit | None:
    limit_bytes = _number(_contents(files.limit))
    if limit_bytes is None or limit_bytes >= cgroup.UNLIMITED_BYTES:
        return None
    used_bytes = _number(_contents(files.usage))
    if used_bytes is None:
        return None
    left_bytes = limit_bytes - used_bytes + _sum(_contents(files.stat), files.reclaimed)
    return CgroupLimit(max(0, min(left_bytes, limit_bytes)), limit_bytes)


def _number(text: bytes) -> int | None:
    """Return the number in a file that contains only a number; None for "max" or anything else."""
    return int(text) if text.strip().isdigit() else None


def _sum(text: bytes, names: tuple[bytes, ...]) -> int:
    words = [line.split() for line in text.splitlines()]
    return sum(int(each[1]) for each in words if len(each) == 2 and each[0] in names and each[1].isdigit())
