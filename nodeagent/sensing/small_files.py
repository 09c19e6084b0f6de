"""Reads small files of /proc and /sys: bounded, and without an exception for malformed content."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

PROCFS, SYSFS = Path("/proc"), Path("/sys")
SMALL_BYTES = 4096  # a sysfs attribute is at most a page
MAX_NAMES = 65536  # per directory: a /proc with more processes is truncated
MAX_FIGURES = 20  # a 64-bit counter


def try_read(path: str, limit: int = SMALL_BYTES) -> bytes | None:
    """Return a file's first `limit` bytes; None if it cannot be read, for example because it was removed."""
    try:
        return read(path, limit)
    except OSError:
        return None


def read(path: str, limit: int = SMALL_BYTES) -> bytes:
    """Return a file's first `limit` bytes. Raises OSError."""
    # Python's file objects would cost three times as much, and there are hundreds of reads.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.read(handle, limit)
        while found and len(found) < limit:
            more = os.read(handle, limit - len(found))
            if not more:
                break
            found += more
        return found
    finally:
        os.close(handle)


def parse_text(raw: bytes | None) -> str | None:
    """Return a sysfs attribute as one line of printable ASCII; None if it is None or empty."""
    if raw is None:
        return None
    found = "".join(c for c in raw.decode("ascii", "replace").strip() if c.isascii() and c.isprintable())
    return found or None


def parse_number(raw: bytes | None) -> int | None:
    """Return an integer; None for anything else, such as `N/A`, an empty file or more than 64 bits."""
    if raw is None:
        return None
    found = raw.strip()
    figures = found.removeprefix(b"-")
    return int(found) if figures.isdigit() and len(figures) <= MAX_FIGURES else None


def list_names(folder: str) -> list[str]:
    """Return the names in a directory, sorted, at most `MAX_NAMES`; none if it does not exist."""
    try:
        with os.scandir(folder) as found:
            return sorted(each.name for each in islice(found, MAX_NAMES))
    except OSError:
        return []


def exists(path: str) -> bool:
    """Return True if a path exists and is accessible.

    Never raises, unlike `Path.exists`, which raises without permission.
    """
    return os.access(path, os.F_OK)


def printable(path: str) -> str:
    """Return a path as text for an entity: valid Unicode, printable characters only."""
    found = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in found)
