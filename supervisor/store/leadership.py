"""Leadership of a run: the supervisor with the highest epoch leads, and each successor takes a higher one.

Members obey the highest epoch that they have received. A supervisor writes to the run directory only under
the lock of the epoch file, and only while that file contains no higher number. A supervisor that was stopped,
replaced and continued therefore overwrites none of its successor's lines, and ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

FILE = "epoch"
MAX_EPOCH = 1 << 62  # a higher number is damage: the next one would not fit into a message
PATIENCE_S = 1.0  # for the lock: its holder appends a line, or raises the number by one
_DIGITS = 20
_PAUSE_S = 0.005


class Deposed(Exception):
    """Another supervisor has taken the run over: this one must not change anything any more."""

    def __init__(self, own: int, newer: int) -> None:
        super().__init__(f"a supervisor of epoch {newer} has taken the run over: this one is of epoch {own}")


class Lead:
    """One supervisor's right to act. `epoch` is 0 for a supervisor that is never replaced."""

    def __init__(self, path: Path | None = None, epoch: int = 0) -> None:
        self._path = path
        self.epoch = epoch

    def raise_above(self, known: int) -> None:
        """Take an epoch above `known`, which is in the journal, in a member's report or in a checkpoint.

        A known epoch may be above that of the file if the file was lost, or if the member or checkpoint
        belongs to another directory. Safe to repeat.

        Raises:
            Deposed: Another supervisor has taken the run over.
            Blocked: Another supervisor is in the middle of a write; the epoch is unchanged.
        """
        if known < self.epoch or known > MAX_EPOCH or self.epoch == 0 == known:
            return
        self.epoch = known + 1 if self._path is None else _higher(self._path, known, self.epoch)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Keep other supervisors from taking the run over while the block runs.

        Raises:
            Deposed: Another supervisor has taken the run over.
            OSError: The lock is not available.
        """
        descriptor = -1 if self._path is None else _open(self._path)
        try:
            if descriptor >= 0:
                _lock(descriptor, fcntl.LOCK_SH)
                newest = _read(descriptor)
                if newest > self.epoch:
                    raise Deposed(self.epoch, newest)
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def take(path: Path) -> Lead:
    """Take the run over with an epoch above all earlier ones: earlier supervisors cannot write from now on.

    Raises:
        Blocked: Another supervisor is in the middle of a write.
    """
    return Lead(path, _higher(path, 0, MAX_EPOCH))


class Blocked(OSError):
    """Another process keeps the lock of the epoch file."""

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, f"another supervisor has had the epoch's lock for {PATIENCE_S:g} s")


def _higher(path: Path, known: int, own: int) -> int:
    """Return an epoch above `known` that was never used. Raises `Deposed` if the file has one above `own`.

    If the file cannot be written, only members and the journal know the epoch: supervision continues.
    """
    try:
        return _count_up(path, known, own)
    except Blocked:
        raise
    except OSError as error:
        log.error("epoch not written", extra={"error": str(error)})
        return max(_newest(path), known) + 1


def _count_up(path: Path, known: int, own: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        found = _read(descriptor)
        if found > own:
            raise Deposed(own, found)
        epoch = max(found, known) + 1
        # Not synced: storage that hangs must not keep the next supervisor from starting. The deposed
        # supervisor sees the number even so, and after a power loss the journal has the epoch with every
        # decision.
        os.pwrite(descriptor, b"%0*d\n" % (_DIGITS, epoch), 0)
    finally:
        os.close(descriptor)
    return epoch


def _newest(path: Path) -> int:
    """Return the number in the file; 0 if it cannot be read."""
    descriptor = _open(path)
    if descriptor < 0:
        return 0
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Return a descriptor; -1 if the file cannot be opened: then only members know which supervisor leads."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return -1


def _read(descriptor: int) -> int:
    """Return the number in the file; 0 if there is no valid one."""
    try:
        word = os.pread(descriptor, 2 * _DIGITS, 0).split(b"\n")[0]
    except OSError:
        return 0
    number = int(word) if word.isdigit() else 0
    return number if number <= MAX_EPOCH else 0


def _lock(descriptor: int, how: int) -> None:
    """Hold the lock until the descriptor is closed; without locks in the file system the number counts."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Blocked from None
        except OSError:
            return
        time.sleep(_PAUSE_S)
