"""How much memory this member takes, and how much there is."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from holdfast.messages import Room
from holdfast.slot import BLOCK_BYTES

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
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
    return Room(volume, state_bytes, slots, private, free, _available())


def _available() -> int:
    """Return the bytes of memory that this host can still give."""
    with suppress(OSError):
        found = _AVAILABLE.search(_MEMINFO.read_text())
        if found is not None:
            return int(found[1]) << 10
    return 2**63 - 1
