"""How much memory this member takes, and how much there is."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from holdfast.messages import Room
from holdfast.slot import BLOCK_BYTES
from sidecar import cgroup

_MEMINFO = Path("/proc/meminfo")


def measure(directory: Path, state_bytes: int) -> Room:
    """Return what the snapshots and private states below `directory` take, and what their volume can give.

    What cannot be read counts as nothing taken and as room without end: nobody is refused for that.
    """
    slots = private = 0
    with suppress(OSError):
        for path in (*directory.glob("arena/*"), *directory.glob("restore/*")):
            with suppress(OSError):
                taken = path.stat().st_blocks * BLOCK_BYTES
                if path.name.startswith("slot-"):
                    slots += taken
                else:
                    private += taken
    volume, free = "", 2**63 - 1
    with suppress(OSError):
        found = os.statvfs(directory)
        volume, free = f"{socket.gethostname()}:{directory.stat().st_dev}", found.f_bavail * found.f_frsize
    available, limit = _meminfo("MemAvailable", 2**63 - 1), 0
    allowed = cgroup.allowance()
    if allowed is not None:
        left = allowed.left_bytes + _meminfo(
            "SwapFree", 0
        )  # a group may have all of that: refuse nobody for it
        if left < available:
            available, limit = left, allowed.limit_bytes
    return Room(volume, state_bytes, slots, private, free, available, limit)


def _meminfo(name: str, unknown: int) -> int:
    """Return the bytes that the kernel gives under `name`."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) << 10
    return unknown
