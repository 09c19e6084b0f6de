"""Set the title that `ps` shows for a forked process, such as "holdfast: rank 0 train.py".

A fork shares its parent's command line, which does not describe it. The title therefore overwrites the
command line in the memory from which the kernel reads it. The write goes through /proc/self/mem, where an
impossible write fails without side effects.

A process that was not forked keeps its command line. A process whose script has set a title keeps that title.
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

# Indices of fields of /proc/PID/stat, where the state is field 0: proc(5).
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46

# A fork inherits both variables.
_original = b""  # the content of that memory before the first title was set
_shown = b""  # the current title; "" if there is none


def set_title(title: str) -> None:
    """Make `ps` show "holdfast: TITLE" for this process, cut to the length of its command line.

    Call this only in a process whose own command line does not describe it. Never raises.
    """
    global _original, _shown
    with suppress(OSError, ValueError, IndexError):
        present = _shown or Path("/proc/self/cmdline").read_bytes()
        # Keep the NUL at the end. Without it, the kernel would continue to read into the environment.
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

    Scripts that use setproctitle need this, because setproctitle does nothing unless it finds the
    interpreter's original arguments.
    """
    global _shown
    with suppress(OSError, ValueError, IndexError):
        if _shown and _replace(_shown, _original):
            _shown = b""


def _replace(present: bytes, wanted: bytes) -> bool:
    """Write `wanted` over `present`, which has the same length.

    Returns False, and writes nothing, if the memory has other content or another size.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    if not begin or end - begin != len(present) or len(wanted) != len(present):
        return False
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        # Check that the memory still holds what the kernel shows, because other code may have written to it.
        return os.pread(memory, len(present), begin) == present and bool(os.pwrite(memory, wanted, begin))
    finally:
        os.close(memory)
