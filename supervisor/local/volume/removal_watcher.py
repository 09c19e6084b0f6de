"""Report removals from a folder, and changes of permissions, immediately through inotify.

Periodic checks find removals too, but a fault may occur before the next check. If inotify is
unavailable or its limits are reached, removals are not reported, and no error is raised.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# IN_DELETE, IN_DELETE_SELF and IN_ATTRIB: include/uapi/linux/inotify.h
_REMOVED = 0x0000_0200 | 0x0000_0400 | 0x0000_0004
_OFFOLDERS = 0x0100_0000 | 0x0200_0000  # IN_ONLYDIR, IN_DONT_FOLLOW
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class RemovalWatcher:
    """Watches folders for removals and changed permissions.

    `descriptor` is readable after one of these. It is -1 without inotify.
    """

    descriptor: int = -1
    _libc: ctypes.CDLL | None = field(default=None)

    def open(self) -> None:
        try:
            self._libc = ctypes.CDLL(None)
            self.descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, AttributeError):
            self.descriptor = -1

    def watch(self, folders: Iterable[Path]) -> None:
        """Watch `folders` for removals. They may include folders that are already watched."""
        if self._libc is None or self.descriptor < 0:
            return
        for folder in folders:
            self._libc.inotify_add_watch(self.descriptor, os.fsencode(folder), _REMOVED | _OFFOLDERS)

    def drain(self) -> None:
        """Discard the events.

        The events only show when to check; `VolumeRepair` finds out what was removed.
        """
        try:
            while os.read(self.descriptor, _READ_BYTES):
                pass
        except OSError:  # no more events
            return

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
