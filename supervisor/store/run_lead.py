"""Manage the leadership of a run.

The supervisor with the highest epoch leads, and each successor takes a higher one.

Members obey the highest epoch that they have received. A supervisor writes to the run directory only while it
holds the lock of the epoch file and that file contains no higher number. If a supervisor is suspended,
replaced and later resumed, it therefore ends without overwriting its successor's lines.
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
MAX_EPOCH = 1 << 62  # higher numbers are invalid: the next one might not fit into a message
LOCK_S = 1.0  # how long to wait for the lock; it is held only to append a line or raise the number
_DIGITS = 20
_PAUSE_S = 0.005


class Deposed(Exception):
    """Another supervisor has taken over the run. This one must not change anything."""

    def __init__(self, own: int, newer: int) -> None:
        super().__init__(f"a supervisor of epoch {newer} has taken over the run; this one has epoch {own}")


class Lead:
    """One supervisor's right to act. `epoch` is 0 if the supervisor is never replaced."""

    def __init__(self, path: Path | None = None, epoch: int = 0) -> None:
        self._path = path
        self.epoch = epoch

    def raise_above(self, known: int) -> None:
        """Take an epoch above `known`, which was found in the journal, a member's report or a checkpoint.

        `known` can be above the epoch in the file if the file was lost, or if the member or checkpoint comes
        from another directory. Repeating this is safe.

        Raises:
            Deposed: Another supervisor has taken over the run.
            Blocked: Another supervisor is in the middle of a write. The epoch is unchanged.
        """
        if known < self.epoch or known > MAX_EPOCH or self.epoch == 0 == known:
            return
        self.epoch = known + 1 if self._path is None else _higher(self._path, known, self.epoch)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Prevent other supervisors from taking over the run during the `with` block.

        Raises:
            Deposed: Another supervisor has taken over the run.
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


def take_over(path: Path) -> Lead:
    """Take over the run with a new highest epoch. Earlier supervisors can no longer write after that.

    Raises:
        Blocked: Another supervisor is in the middle of a write.
    """
    return Lead(path, _higher(path, 0, MAX_EPOCH))


class Blocked(OSError):
    """Another process holds the lock of the epoch file."""

    def __init__(self) -> None:
        text = f"another supervisor has held the lock of the epoch file for {LOCK_S:g} s"
        super().__init__(errno.EAGAIN, text)


def _higher(path: Path, known: int, own: int) -> int:
    """Return an unused epoch above `known`. Raises `Deposed` if the file contains an epoch above `own`.

    If the file cannot be written, supervision continues, and only the members and the journal know the epoch.
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
        # The file is not synced, because hung storage must not prevent the next supervisor from starting. The
        # deposed supervisor sees the number anyway, and after a power loss, the journal has the epoch of each
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
    """Return a descriptor, or -1 if the file cannot be opened.

    In that case, only the members know the leader.
    """
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
    """Take the lock until the descriptor is closed. Without file locks, the number alone decides.

    Raises `Blocked` if another process holds the lock for `LOCK_S`.
    """
    deadline = time.monotonic() + LOCK_S
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
