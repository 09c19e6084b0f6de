"""What /proc says of a thread. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nodeagent.reading import shown

STAT_BYTES = 1024
STATUS_BYTES = 16384  # the context switches are its last two lines
PF_KTHREAD = 0x00200000  # linux/sched.h
MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Stat:
    """What is needed of /proc/PID/stat."""

    name: str
    state: str
    flags: int
    threads: int  # of the process
    start: int  # clock ticks after boot: tells a thread from a later one with its id

    @property
    def is_asleep(self) -> bool:
        """True in uninterruptible sleep of a user's thread.

        The kernel's own threads are not counted: some drivers let theirs rest so, for good.
        """
        return self.state == "D" and not self.flags & PF_KTHREAD


def stat(raw: bytes) -> Stat | None:
    """Return what the file says; None for anything else."""
    before, closing, after = raw.rpartition(b")")  # the name may have blanks and brackets
    fields = after.split()
    _, opening, name = before.partition(b"(")
    if not closing or not opening or len(fields) < 20:
        return None
    figures = (fields[6], fields[17], fields[19])  # fields 9, 20 and 22 of proc(5)
    if not all(each.isdigit() and len(each) <= 20 for each in figures):
        return None
    flags, threads, start = (int(each) for each in figures)
    state = fields[0].decode("ascii", "replace")
    return Stat(shown(name[:MAX_NAME].decode("utf-8", "replace")), state, flags, threads, start)


def switches(status: bytes) -> int | None:
    """Return how often the thread has given up a core, by will or not; None if it is not said.

    A thread that sleeps on does not switch; one that is busy with a disk sleeps often, and switches.
    """
    found = 0
    lines = [line for line in status.splitlines() if b"voluntary_ctxt_switches:" in line]
    for line in lines:
        figures = line.rpartition(b":")[2].strip()
        if not figures.isdigit() or len(figures) > 20:
            return None
        found += int(figures)
    return found if lines else None
