"""Hear at once when something is removed from a folder, by Linux' inotify.

Whoever looks now and then finds out as well, but a fault may come before that. Where there is no inotify,
or no more of it is to be had, nothing is heard and nothing is raised.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_REMOVED = 0x0000_0200 | 0x0000_0400  # IN_DELETE, IN_DELETE_SELF: include/uapi/linux/inotify.h
_OF_FOLDERS = 0x0100_0000 | 0x0200_0000  # IN_ONLYDIR, IN_DONT_FOLLOW
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class Removals:
    """`descriptor` is ready to be read when something was removed; -1 where that cannot be had."""

    descriptor: int = -1
    _libc: ctypes.CDLL | None = field(default=None)

    def open(self) -> None:
        try:
            self._libc = ctypes.CDLL(None)
            self.descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, AttributeError):
            self.descriptor = -1

    def watch(self, folders: Iterable[Path]) -> None:
        """Hear of what is removed from `folders`, those that are watched already included."""
        if self._libc is None or self.descriptor < 0:
            return
        for folder in folders:
            self._libc.inotify_add_watch(self.descriptor, os.fsencode(folder), _REMOVED | _OF_FOLDERS)

    def hear(self) -> None:
        """Take what there is to be heard: it says when to look, and not what is gone."""
        try:
            while os.read(self.descriptor, _READ_BYTES):
                pass
        except OSError:  # no more of it
            return

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
