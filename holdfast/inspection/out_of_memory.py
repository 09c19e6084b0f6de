"""Detect that the kernel killed a process at its cgroup's memory limit, which SIGKILL alone does not show.

The kernel counts such kills in each memory cgroup: in `memory.events` (version 2, which includes its
descendants) or `memory.oom_control` (version 1). A container sees its own group at the root of the mount.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from holdfast.protocol.launcher_messages import OUT_OF_MEMORY, Ending

_MOUNT = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60  # cgroup version 1 expresses "no limit" as a number near 2^63


class MemoryGroup:
    """Watches the memory cgroup of this process; finds no kills if that cannot be read."""

    def __init__(self, membership: Path = Path("/proc/self/cgroup"), mount: Path = _MOUNT) -> None:
        self._counter, self._limit = _files(membership, mount)
        self._kills = self._count()

    def explain(self, ended: Ending) -> Ending:
        """Return `ended`, with the reason added if the kernel counted such a kill since the last call."""
        before, self._kills = self._kills, self._count()
        if ended.signal != signal.SIGKILL or ended.ours or self._kills <= before:
            return ended
        limit_bytes = _number(self._limit)
        of = f" of {limit_bytes / (1 << 30):.1f} GiB" if 0 < limit_bytes < _UNLIMITED_BYTES else ""
        why = f"{OUT_OF_MEMORY}: the kernel killed it at the memory limit{of} of its cgroup"
        return replace(ended, message=f"{why}\n{ended.message}")

    def _count(self) -> int:
        if self._counter is None:
            return 0
        try:
            lines = self._counter.read_text().splitlines()
        except OSError:
            return 0
        words = (line.split() for line in lines)
        return next((int(w[1]) for w in words if len(w) == 2 and w[0] == "oom_kill" and w[1].isdigit()), 0)


def _files(membership: Path, mount: Path) -> tuple[Path | None, Path | None]:
    """Return the files that contain the number of kills and the memory limit."""
    try:
        entries = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None, None
    for entry in entries:
        if len(entry) != 3:
            continue
        _, controllers, path = entry
        below = path.strip("/")
        for root in (mount / "memory" / below, mount / "memory") if controllers == "memory" else ():
            if (root / "memory.oom_control").is_file():
                return root / "memory.oom_control", root / "memory.limit_in_bytes"
        for root in (mount / below, mount / "unified" / below, mount) if controllers == "" else ():
            if (root / "memory.events").is_file():
                return root / "memory.events", root / "memory.max"
    return None, None


def _number(path: Path | None) -> int:
    """Return the number in a file; 0 for "max" and for anything else."""
    try:
        text = path.read_text().strip() if path is not None else ""
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
