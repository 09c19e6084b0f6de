"""Records that the newest state could not be saved, so that the next start knows that it has an earlier one.

On a full disk, nothing new can be written. A small file is therefore created while there is room, and
overwritten in place when a save fails, which needs no new block on most file systems (not on btrfs and ZFS).
The mark is the first line of the saved file that is out of date. The next successful save replaces that file,
which makes the mark void, so no order of writes and no kill leaves a wrong mark. Each generation of owners
(`claim`) has its own file. A successor that finds the disk full cannot create its own, so it uses the file of
the newest generation that has one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from holdfast.fileio import durable

NAME = "unsaved"
SIZE = 512  # bytes: one sector, which a disk writes as a whole
NO_FILE = b"no file"  # the mark if no state has been saved yet


def reserve(folder: Path, generation: int) -> None:
    """Create the file if it does not exist. Raises OSError."""
    path = _path(folder, generation)
    with suppress(FileNotFoundError):
        if path.stat().st_size == SIZE:
            return
    durable.replace_file(path, _padded(b""), 0o600)


def mark(folder: Path, generation: int, head: bytes) -> None:
    """Record that the saved file with this first line is out of date. Raises OSError."""
    paths = [_path(folder, each) for each in range(generation, -1, -1)]
    path = next((each for each in paths if each.exists()), paths[0])
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, _padded(head), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def marks(folder: Path) -> frozenset[bytes]:
    """Return the first lines of the saved files that are out of date. Never raises."""
    found: set[bytes] = set()
    with suppress(OSError):
        for path in folder.glob(f"{NAME}*"):
            with path.open("rb") as file:
                found.add(file.read(SIZE).rstrip())
    return frozenset(found - {b""})


def _path(folder: Path, generation: int) -> Path:
    return folder / (f"{NAME}.{generation}" if generation else NAME)


def _padded(head: bytes) -> bytes:
    return head[: SIZE - 1].ljust(SIZE - 1) + b"\n"
