"""Lets one agent at a time own a state folder, even if its predecessor cannot be ended.

The owner holds a lock on the file `lock`. A process with a thread in an uninterruptible call keeps its lock
after SIGKILL, for as long as the call lasts: with a hung driver, until the next reboot. A successor that
finds the lock held therefore asks the owner for an answer. If it gets none, it takes over by creating
`lock.1`, the lock of the next generation. Each generation has its own files (`saved_state`), so a former
owner that is still writing does not damage them. An owner that finds a later generation's lock stops. When
all former owners have ended, the next agent returns to the first generation. An owner removes the temporary
files of former owners.

To ask, the successor sets the modification time of the lock file to 1970; to answer, the owner sets any other
time. This works on a full disk, and between containers that cannot see each other's processes.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.fileio import durable
from nodeagent.agent import saved_state

LOCK = "lock"
# A live owner answers at the next tick of its writer, within 2.5 s. The rest of this limit allows
# for a busy node.
ANSWER_S = 10.0
_POLL_S = 0.1
_ASKED_NS = 0
_NAME = re.compile(rf"{LOCK}(?:\.(\d{{1,9}}))?")


class FolderInUse(Exception):
    """Another agent owns the folder and answers; the message names its process."""


@dataclass(slots=True)
class Claim:
    """The ownership of a folder, until `release` or the end of the process."""

    folder: Path
    generation: int
    _descriptor: int
    took_over: str = ""  # the process that owned the folder but did not answer; "" if there was none

    def answer(self) -> None:
        """Answer a successor that asks whether this process is alive. Raises OSError."""
        if os.fstat(self._descriptor).st_mtime_ns == _ASKED_NS:
            os.utime(self._descriptor)

    def is_superseded(self) -> bool:
        """Return True if a successor has taken over the folder. Raises OSError."""
        return newest_generation(self.folder) > self.generation

    def release(self) -> None:
        """Give up the folder. Call this only when nothing is being written to it."""
        os.close(self._descriptor)


def take(folder: Path, answer_s: float = ANSWER_S, wait: Callable[[float], object] = time.sleep) -> Claim:
    """Claim an existing folder, if necessary from an owner that does not answer within `answer_s`.

    Raises:
        FolderInUse: the owner has answered, or another successor was faster.
        OSError: a lock cannot be created or read.
    """
    while True:
        took_over = ""
        generation = newest_generation(folder)
        descriptor = _lock(folder, generation)
        if descriptor is None:
            owner = _owner(folder, generation)
            descriptor = _lock_unless_answered(folder, generation, answer_s, wait)
        if descriptor is None:
            took_over, generation = owner, generation + 1
            descriptor = _lock(folder, generation)
            if descriptor is None:
                raise _in_use(folder, generation)
        if newest_generation(folder) == generation:
            break
        os.close(descriptor)  # another successor has changed the generation in the meantime
    if generation and (first := _after_all_have_ended(folder, generation)) is not None:
        os.close(descriptor)
        generation, descriptor = 0, first
    with suppress(OSError):  # record the owner for human readers; this fails on a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    os.utime(descriptor)
    # Files left on a failing disk do no harm. If the claim failed at startup because of the disk, this may
    # remove the temporary file of a policy copy that is being written now; the copy is then written again.
    with suppress(OSError):
        durable.remove_debris(folder, owned=True)
    return Claim(folder, generation, descriptor, took_over)


def is_owned(folder: Path) -> bool:
    """Return True if a process owns the folder, whether it answers or not. Raises OSError."""
    try:
        descriptor = os.open(_path(folder, newest_generation(folder)), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def newest_generation(folder: Path) -> int:
    """Return the newest generation that has a lock; 0 if there is none. Raises OSError."""
    with os.scandir(folder) as found:
        names = [_NAME.fullmatch(each.name) for each in found]
    return max((int(each[1] or 0) for each in names if each), default=0)


def _path(folder: Path, generation: int) -> Path:
    return folder / (f"{LOCK}.{generation}" if generation else LOCK)


def _lock(folder: Path, generation: int) -> int | None:
    """Return the descriptor of the locked file; None if another process holds the lock. Raises OSError."""
    path = _path(folder, generation)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _lock_unless_answered(
    folder: Path, generation: int, answer_s: float, wait: Callable[[float], object]
) -> int | None:
    """Ask the owner; return the lock if the owner ends, and None if it has not answered within `answer_s`.

    Raises:
        FolderInUse: the owner has answered.
        OSError: the lock cannot be read.
    """
    path = _path(folder, generation)
    os.utime(path, ns=(_ASKED_NS, _ASKED_NS))
    until = time.monotonic() + answer_s
    while path.stat().st_mtime_ns == _ASKED_NS:
        if (descriptor := _lock(folder, generation)) is not None:
            return descriptor
        if time.monotonic() >= until:
            return None
        wait(_POLL_S)
    raise _in_use(folder, generation)


def _owner(folder: Path, generation: int) -> str:
    try:
        return _path(folder, generation).read_text(errors="replace")[:20].strip() or "unknown"
    except OSError:
        return "unknown"


def _in_use(folder: Path, generation: int) -> FolderInUse:
    return FolderInUse(f"in use by another agent, process {_owner(folder, generation)}")


def _after_all_have_ended(folder: Path, generation: int) -> int | None:
    """Return to the first generation, and return its lock; None while a former owner has not ended.

    The caller holds the lock of `generation`, so no other process does this at the same time.
    """
    held: list[int] = []
    for each in range(generation):
        descriptor = _lock(folder, each)
        if descriptor is None:
            break
        held.append(descriptor)
    if len(held) < generation:
        for descriptor in held:
            os.close(descriptor)
        return None
    saved_state.return_to_first_generation(folder)
    for each in range(generation, 0, -1):
        _path(folder, each).unlink(missing_ok=True)
    for descriptor in held[1:]:
        os.close(descriptor)
    return held[0]
