"""Who leads a run: the supervisor of the highest epoch, a number that each who takes the run over raises.

Members obey the highest epoch that they have heard of. In the run directory a supervisor writes only under
the lock of the epoch's file, and only while no higher number is in it. One that was stopped, was replaced and
runs again writes nothing over its successor's lines, and ends.
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
MAX_EPOCH = 1 << 62  # a number beyond it is damage: the next one would not fit in a message
PATIENCE_S = 1.0  # for the lock: whoever has it appends a line, or counts one up
_DIGITS = 20
_PAUSE_S = 0.005


class Deposed(Exception):
    """Another supervisor has taken the run over: this one must change nothing any more."""

    def __init__(self, own: int, newer: int) -> None:
        super().__init__(f"a supervisor of epoch {newer} has taken the run over: this one is of epoch {own}")


class Lead:
    """One supervisor's right to act. `epoch` is 0 for one that nobody replaces."""

    def __init__(self, path: Path | None = None, epoch: int = 0) -> None:
        self._path = path
        self.epoch = epoch

    def raise_above(self, known: int) -> None:
        """Take an epoch that is higher than `known`, one that the journal, a member or a checkpoint tells of.

        The file that should have had it was lost, or they are of another directory. Safe to repeat.

        Raises:
            Deposed: Another supervisor has taken the run over.
            Blocked: One is in the middle of a write; the epoch is as it was.
        """
        if known < self.epoch or known > MAX_EPOCH or self.epoch == 0 == known:
            return
        self.epoch = known + 1 if self._path is None else _higher(self._path, known, self.epoch)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Let nobody take the run over until what is done here is done.

        Raises:
            Deposed: Somebody has.
            OSError: The lock cannot be had.
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
    """Take the run over, with an epoch higher than that of all before: they write nothing from now on.

    Raises:
        Blocked: Another supervisor is in the middle of a write.
    """
    return Lead(path, _higher(path, 0, MAX_EPOCH))


class Blocked(OSError):
    """Whoever has the lock of the epoch's file keeps it."""

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, f"another supervisor has had the epoch's lock for {PATIENCE_S:g} s")


def _higher(path: Path, known: int, own: int) -> int:
    """Return an epoch above `known` that nobody has had; `Deposed` where one above `own` is in the file.

    Where the file cannot be written, members and the journal alone know it: no reason not to supervise.
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
        # Not synced: storage that hangs must not keep the next supervisor from starting. Who is to be fenced
        # off sees it all the same, and after a power loss the journal has the epoch with every decision.
        os.pwrite(descriptor, b"%0*d\n" % (_DIGITS, epoch), 0)
    finally:
        os.close(descriptor)
    return epoch


def _newest(path: Path) -> int:
    """Return the number in the file, 0 where it cannot be read."""
    descriptor = _open(path)
    if descriptor < 0:
        return 0
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Return a descriptor; -1 where there is none to be had: then members alone tell who leads."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return -1


def _read(descriptor: int) -> int:
    """Return the number in the file, 0 where there is none that can be one."""
    try:
        word = os.pread(descriptor, 2 * _DIGITS, 0).split(b"\n")[0]
    except OSError:
        return 0
    number = int(word) if word.isdigit() else 0
    return number if number <= MAX_EPOCH else 0


def _lock(descriptor: int, how: int) -> None:
    """Have the lock until the descriptor is closed. A file system without locks leaves the number alone."""
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
