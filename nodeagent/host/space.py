"""Space and inodes used of a file system, as df counts them. Pure."""

from __future__ import annotations


def disk_used(blocks: int, free: int, available: int) -> float | None:
    """Return percent used of what users can have; None if the file system has no size.

    What is kept for root counts as neither used nor free: at 100% others can write no more.
    """
    used = blocks - free
    usable = used + available
    return _percent(used, usable) if used >= 0 and usable > 0 else None


def inodes_used(inodes: int, free: int) -> float | None:
    """Return percent used; None where inodes are made as they are needed (btrfs, vfat: both are 0)."""
    return _percent(inodes - free, inodes) if 0 <= free <= inodes and inodes > 0 else None


def _percent(part: int, whole: int) -> float:
    return min(100.0, 100.0 * part / whole)  # of very large numbers rounding makes a little more
