"""Detect that the kernel killed a process at its cgroup's memory limit, which SIGKILL alone does not show.

The kernel counts such kills in each memory cgroup: in `memory.events` (version 2, including the cgroup's
descendants) or `memory.oom_control` (version 1).
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from holdfast.process import cgroup
from holdfast.protocol.launcher_messages import OUT_OF_MEMORY, Ending

# For each cgroup version: the file with the number of kills, and the file with the memory limit.
_NAMES = {
    1: ("memory.oom_control", "memory.limit_in_bytes"),
    2: ("memory.events", "memory.max"),
}


class OutOfMemoryKills:
    """Watches the memory cgroup of this process. If its files cannot be read, no kill is ever detected."""

    def __init__(self, membership: Path = cgroup.MEMBERSHIP, mount: Path = cgroup.MOUNT) -> None:
        self._counter, self._limit = _files(membership, mount)
        self._kills = self._count()

    def take_reason(self, ended: Ending) -> Ending:
        """Return `ended`, with the reason added if the kernel has counted a new kill.

        Each kill explains only one ending.
        """
        before, self._kills = self._kills, self._count()
        if ended.signal != signal.SIGKILL or ended.ours or self._kills <= before:
            return ended
        limit_bytes = (cgroup.read_number(self._limit) if self._limit is not None else None) or 0
        of = f" of {_size(limit_bytes)}" if 0 < limit_bytes < cgroup.UNLIMITED_BYTES else ""
        why = f"{OUT_OF_MEMORY}: the kernel killed it at the memory limit{of} of its cgroup"
        return replace(ended, message=f"{why}\n{ended.message}", out_of_memory=True)

    def _count(self) -> int:
        if self._counter is None:
            return 0
        try:
            lines = self._counter.read_text().splitlines()
        except OSError:
            return 0
        words = (line.split() for line in lines)
        return next((int(w[1]) for w in words if len(w) == 2 and w[0] == "oom_kill" and w[1].isdigit()), 0)


def _size(limit_bytes: int) -> str:
    if limit_bytes < 1 << 30:
        return f"{limit_bytes / (1 << 20):.0f} MiB"
    return f"{limit_bytes / (1 << 30):.1f} GiB"


def _files(membership: Path, mount: Path) -> tuple[Path | None, Path | None]:
    """Return the files that contain the number of kills and the memory limit."""
    for found in cgroup.memory_cgroups(membership, mount):
        counter, limit = _NAMES[found.version]
        for group in (*(root / found.below for root in found.roots), found.roots[0]):
            if (group / counter).is_file():
                return group / counter, group / limit
    return None, None
