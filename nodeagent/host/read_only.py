"""Whether a file system is read-only that should be writable. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from nodeagent.host.mounts import Mount, unescaped

WRITABLE, READ_ONLY = 0.0, 1.0
MAX_REMEMBERED = 512


def wanted_writable(fstab: bytes) -> frozenset[str]:
    """Return the mount points that fstab mounts at boot, and not read-only."""
    found = set()
    for line in fstab.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[0].startswith(b"#"):
            continue
        options = fields[3].split(b",")
        if b"ro" not in options and b"noauto" not in options:
            found.add(unescaped(fields[1]))
    return frozenset(found)


def key(mount: Mount) -> str:
    """Return what a file system is remembered by: another one at the same place is not it."""
    return f"{mount.device} {mount.source} {mount.entity}"


def state(mount: Mount, writable: Iterable[str], wanted: frozenset[str]) -> float | None:
    """Return the check's state; None for one that was read-only from the start, and may well be.

    Args:
        mount: The file system now.
        writable: Keys of those that were writable in this boot.
        wanted: Mount points that fstab wants writable.
    """
    if not mount.read_only:
        return WRITABLE
    return READ_ONLY if mount.point in wanted or key(mount) in writable else None
