"""Find the memory cgroups of this process, in cgroup versions 1 and 2.

A container sees its own cgroup at the root of the mount. The path that the kernel reports may therefore not
exist below the mount.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60  # version 1 expresses "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A memory cgroup. Its files are at the path `below` under one of the `roots`."""

    version: int
    roots: tuple[Path, ...]
    below: str


def memory_cgroups(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> Iterator[MemoryCgroup]:
    """Yield the memory cgroups of this process, at most one per version; none if they cannot be read."""
    try:
        entries = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except (OSError, ValueError):
        return
    for entry in entries:
        if len(entry) != 3:
            continue
        _, controllers, path = entry
        if "memory" in controllers.split(","):
            yield MemoryCgroup(1, (mount / "memory",), path.strip("/"))
        elif controllers == "":
            yield MemoryCgroup(2, (mount, mount / "unified"), path.strip("/"))


def read_number(path: Path) -> int | None:
    """Return the number in a file that contains only a number; None for "max" or anything else."""
    try:
        text = path.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None
