"""What `ps` shows for a process that was forked from another one: "holdfast: rank 0 train.py".

A fork has the command line of the process that it was forked from, which does not say what it is. So a title
is written over it, in the memory that the kernel reads the command line from. It goes there through
/proc/self/mem: where that is not possible, the call fails, and nothing else happens.

A process that was started with a command line of its own keeps that. So does one whose script has written a
title of its own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PREFIX = "holdfast: "

# Titles of the processes that others are forked from, by what those are.
MEMBERS_FORK_SERVER = "fork server (members)"
PARTS_FORK_SERVER = "fork server (parts)"
RANKS_FORK_SERVER = "fork server (ranks)"

_ARGUMENTS_BEGIN, _ARGUMENTS_END = (
    45,
    46,
)  # of the fields of /proc/PID/stat, the state being the first: proc(5)

_original = b""  # what was in that memory before the first title
_shown = b""  # the title that is there; "" for none; a fork inherits both


def take(title: str) -> None:
    """Have `ps` show "holdfast: TITLE" for this process, as far as its command line was as long as that.

    Only for a process whose own command line is of no use to anybody. Never raises.
    """
    global _original, _shown
    with suppress(OSError, ValueError, IndexError):
        present = _shown or Path("/proc/self/cmdline").read_bytes()
        room = (
            len(present) - 1
        )  # the last byte stays NUL: else the kernel would read on, into the environment
        text = f"{PREFIX}{title}".encode(errors="replace").replace(b"\0", b"?")[:room]
        shown = text.ljust(len(present), b"\0")
        if _replace(present, shown):
            _original, _shown = _original or present, shown


def change(title: str) -> None:
    """Do what `take` does in a process that has a title, and nothing in any other."""
    if _shown:
        take(title)


def give_back() -> None:
    """Have `ps` show the command line that was there before the first title. Never raises.

    For a script with setproctitle, which does nothing where it does not find the words that the interpreter
    was started with.
    """
    global _shown
    with suppress(OSError, ValueError, IndexError):
        if _shown and _replace(_shown, _original):
            _shown = b""


def _replace(present: bytes, wanted: bytes) -> bool:
    """Write `wanted` over `present`, which is as long. False when something else is there, or no room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    if not begin or end - begin != len(present) or len(wanted) != len(present):
        return False
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        # What the kernel shows must be what is there, and no other code may have written since.
        return os.pread(memory, len(present), begin) == present and bool(os.pwrite(memory, wanted, begin))
    finally:
        os.close(memory)
