"""Set the title that `ps` shows for a process that was forked from another: "holdfast: rank 0 train.py".

A fork has the command line of the process from which it was forked, which does not describe the fork. The
title is therefore written over the command line, in the memory from which the kernel reads it. The write goes
through /proc/self/mem, so that it fails without side effects if it is not possible.

A process that was not forked keeps its command line, and a process whose script has set a title keeps that
title.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PREFIX = "holdfast: "

# Titles of the fork servers, named after their forks.
MEMBERS_FORK_SERVER = "fork server (members)"
PARTS_FORK_SERVER = "fork server (parts)"
RANKS_FORK_SERVER = "fork server (ranks)"

# indices among the fields of /proc/PID/stat, counted from the state: proc(5)
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46

_original = b""  # content of that memory before the first title
_shown = b""  # the current title; "" if there is none; a fork inherits both variables


def set_title(title: str) -> None:
    """Make `ps` show "holdfast: TITLE" for this process, cut to the length of its command line.

    Call this only in a process whose own command line does not describe it. Never raises.
    """
    global _original, _shown
    with suppress(OSError, ValueError, IndexError):
        present = _shown or Path("/proc/self/cmdline").read_bytes()
        # the last byte stays NUL, because the kernel would otherwise continue reading into the environment
        room = len(present) - 1
        text = f"{PREFIX}{title}".encode(errors="replace").replace(b"\0", b"?")[:room]
        shown = text.ljust(len(present), b"\0")
        if _replace(present, shown):
            _original, _shown = _original or present, shown


def change(title: str) -> None:
    """Do what `set_title` does if the process has a title; otherwise do nothing."""
    if _shown:
        set_title(title)


def give_back() -> None:
    """Make `ps` show the original command line again. Never raises.

    This is for scripts that use setproctitle, which does nothing unless it finds the interpreter's original
    arguments.
    """
    global _shown
    with suppress(OSError, ValueError, IndexError):
        if _shown and _replace(_shown, _original):
            _shown = b""


def _replace(present: bytes, wanted: bytes) -> bool:
    """Write `wanted` over `present`, which has the same length.

    Returns False if the memory has other content or another size.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    if not begin or end - begin != len(present) or len(wanted) != len(present):
        return False
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        # The memory must hold what the kernel shows, and no other code may have written to it in the
        # meantime.
        return os.pread(memory, len(present), begin) == present and bool(os.pwrite(memory, wanted, begin))
    finally:
        os.close(memory)
