"""Finds threads in uninterruptible sleep in /proc, with a bounded number of reads for each look.

One that is stuck stays so, hence not all threads need be seen in each look: the walk goes on where the one
before ended. Reads only what the kernel gives without the lock of the process's memory, which one that is
stuck may hold: `cmdline` would block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from nodeagent.host.threads import STAT_BYTES, Stat, stat
from nodeagent.reading import content, names

# A read takes about 15 us: 3000 of them every 15 s are a third of a percent of a core.
MAX_PROCESSES = 2000
MAX_THREADS = 1000  # besides the first of each process

Key = tuple[int, int]  # process, thread


class Walk:
    """Remembers how far it has come. `proc` is the root of a procfs."""

    def __init__(self, proc: str, processes: int = MAX_PROCESSES, threads: int = MAX_THREADS) -> None:
        self._proc = proc
        self._most_processes = processes
        self._most_threads = threads
        self._last_process = 0
        self._last_thread: Key = (0, 0)

    def asleep(self) -> list[tuple[Key, Stat]]:
        """Return those of the threads seen this time that are in uninterruptible sleep."""
        pids = [int(each) for each in names(self._proc) if each.isdecimal()]
        found, several = [], []
        for pid in _from(self._last_process, sorted(pids))[: self._most_processes]:
            self._last_process = pid
            seen = self.stat((pid, pid))
            if seen is None:
                continue
            if seen.is_asleep:
                found.append(((pid, pid), seen))
            if seen.threads > 1:
                several.append(pid)
        return found + list(self._others(sorted(several)))

    def stat(self, key: Key) -> Stat | None:
        """Return what is said of one thread; None if it is gone."""
        pid, tid = key
        folder = str(pid) if pid == tid else f"{pid}/task/{tid}"
        raw = content(f"{self._proc}/{folder}/stat", STAT_BYTES)
        return stat(raw) if raw else None

    def _others(self, pids: Sequence[int]) -> Iterator[tuple[Key, Stat]]:
        left = self._most_threads
        for pid in _from(self._last_thread[0] - 1, pids):  # the one it ended in comes first
            tids = sorted(int(each) for each in names(f"{self._proc}/{pid}/task") if each.isdecimal())
            after = self._last_thread[1] if pid == self._last_thread[0] else 0
            for tid in tids[bisect_right(tids, after) :]:
                if left == 0:
                    return
                if tid != pid:
                    left -= 1
                    self._last_thread = (pid, tid)
                    seen = self.stat((pid, tid))
                    if seen is not None and seen.is_asleep:
                        yield (pid, tid), seen
        self._last_thread = (0, 0)  # all have been seen: the next look begins anew


def _from(last: int, ids: Sequence[int]) -> list[int]:
    """Return `ids`, sorted as they are, from the first after `last` on, around to it."""
    at = bisect_right(ids, last)
    return [*ids[at:], *ids[:at]]
