"""Tell what works of that which a script that ended well has left in the background. Pure but for /proc.

An upload is to end by itself, as it would without Holdfast. A helper that waits for requests never ends. They
differ in that one does something: it uses CPU time, or reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import procstat

WINDOW_S = 2.0  # in which a process that works is seen to work: a slow network lets it wait in between
WORK_CPU = 0.01  # of a core: more than what a server uses that waits for requests
WORK_BYTES = 64 << 10  # in a window: more than a line that somebody logs
MOST_WORDS = 120  # characters of a command line, in a message


@dataclass(frozen=True, slots=True)
class Done:
    """What a process and all below it have used until now, and who they are."""

    cpu_s: float
    io_bytes: int
    below: frozenset[int] = frozenset()
    waits_for_storage: bool = False

    def works(self, before: Done, window_s: float) -> bool:
        """True when a window of `window_s` seconds that began with `before` was not one of waiting."""
        return (
            self.waits_for_storage
            or self.below != before.below
            or self.cpu_s - before.cpu_s >= WORK_CPU * window_s
            or self.io_bytes - before.io_bytes >= WORK_BYTES
        )


def done(pid: int) -> Done:
    """Return what `pid` has done."""
    found = procstat.tree(pid)
    parts = (found.own, *found.below.values())
    return Done(
        cpu_s=sum(each.cpu_s for each in parts),
        io_bytes=sum(each.io_bytes for each in parts),
        below=frozenset(found.below),
        waits_for_storage=any(each.state == "D" for each in parts),
    )


def command_of(pid: int) -> str:
    """Return the command line of `pid`, "" when it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    text = " ".join(word.decode(errors="replace") for word in words if word)
    return text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 3] + "..."


@dataclass(slots=True)
class Background:
    """Looks at each process once in a window."""

    measure: Callable[[int], Done] = done
    _before: dict[int, tuple[float, Done]] = field(default_factory=dict)  # when its window began, with what
    _resting: set[int] = field(default_factory=set)

    def resting(self, pids: Iterable[int], now_s: float) -> set[int]:
        """Return which of `pids` have done nothing to speak of in a whole window. They stay in it."""
        for pid in pids:
            if pid in self._resting:
                continue
            if pid not in self._before:
                self._before[pid] = (now_s, self.measure(pid))
            began_s, before = self._before[pid]
            if now_s - began_s < WINDOW_S:
                continue
            seen = self.measure(pid)
            if not seen.works(before, now_s - began_s):
                self._resting.add(pid)
            self._before[pid] = (now_s, seen)
        return self._resting.intersection(pids)
