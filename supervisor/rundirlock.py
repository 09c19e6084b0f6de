"""The lock of a run directory: one process at a time, given up by the kernel when it dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

# A reader that asks whether the lock is held has it for an instant itself.
PATIENCE_S = 0.25
_PAUSE_S = 0.01


def take(path: Path) -> int:
    """Return a descriptor that holds the lock until it is closed; -1 when another process has it.

    Our pid is in the file from then on. Raises `OSError`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_mode & 0o077:  # an earlier version's: whoever can read it could hold it
            os.fchmod(descriptor, 0o600)
        if not _try_for(descriptor, PATIENCE_S):
            os.close(descriptor)
            return -1
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """True while some process holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def holder(path: Path) -> int | None:
    """Return the pid of the process that took the lock last; None when that cannot be read."""
    try:
        with open(path, "rb") as file:
            word = file.read(32).strip()
    except OSError:
        return None
    return int(word) if word.isdigit() else None


def _try_for(descriptor: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not _try(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
