"""What `ps` shows for a process that was forked from another one: "holdfast: rank 0 train.py".

A fork has the command line of the process that it was forked from, which does not say what it is. So a title is
written over it, in the memory that the kernel reads the command line from. It goes there through /proc/self/mem:
where that is not possible, the call fails, and nothing else happens.

A process that was started with a command line of its own keeps it. So does one whose script has written a title
of its own choice.
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

_shown = b""  # what is in that memory since the last call that has written there; inherited by a fork


def take(title: str) -> None:
    """Have `ps` show "holdfast: TITLE" for this process, as far as its command line was as long as that.

    Only for a process whose own command line is of no use to anybody. Never raises.
    """
    with suppress(OSError, ValueError, IndexError):
        _write(f"{PREFIX}{title}")


def change(title: str) -> None:
    """Do what `take` does in a process that has a title, and nothing in any other."""
    if _shown:
        take(title)


def _write(text: str) -> None:
    global _shown
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        # The kernel's own view must agree, and nobody else may have written there since.
        expected = _shown or Path("/proc/self/cmdline").read_bytes()
        if not begin or end - begin < 2 or os.pread(memory, end - begin, begin) != expected:
            return
        room = end - begin - 1  # the last byte stays NUL: else the kernel would read on, into the environment
        shown = text.encode(errors="replace").replace(b"\0", b"?")[:room].ljust(end - begin, b"\0")
        if os.pwrite(memory, shown, begin) == len(shown):
            _shown = shown
    finally:
        os.close(memory)
