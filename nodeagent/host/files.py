"""File descriptors used of the kernel's limit, from /proc/sys/fs/file-nr. Pure."""

from __future__ import annotations


def used(file_nr: bytes) -> float | None:
    """Return percent; None if it is not said. The file has: allocated, free, most."""
    fields = file_nr.split()
    if len(fields) < 3 or not all(each.isdigit() and len(each) <= 20 for each in fields[:3]):
        return None
    allocated, free, most = (int(each) for each in fields[:3])
    return 100.0 * max(0, allocated - free) / most if most else None
