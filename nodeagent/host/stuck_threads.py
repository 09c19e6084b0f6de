"""Checks for threads that are stuck in the kernel, and whether they wait in the NVIDIA driver.

A thread in state D is not necessarily stuck: a thread that is busy with a disk spends most of its time in
this state. A thread counts as stuck after a minute in state D without a context switch.

The walk reads a bounded number of files per call. A stuck thread stays stuck, so the walk need not visit
every thread each time: it picks up where the previous call ended. It reads only files that the kernel serves
without the process's memory lock, because a stuck process may hold this lock: reading `cmdline` would block.

The number of stuck processes is a lower bound. A check reports 0 only if no stuck thread can have been
missed. Otherwise, it reports nothing and is left out.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import islice

from nodeagent.model import NODE
from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import (
    MAX_FIGURES,
    MAX_NAMES,
    list_names,
    parse_text,
    printable,
    read,
    try_read,
)
from nodeagent.sensing.sweep import Reading

STAT_BYTES = 1024
STATUS_BYTES = 16384  # the context switches are its last two lines
PF_KTHREAD = 0x00200000  # linux/sched.h
MAX_NAME = 64

# A read takes about 15 us, so 3000 reads every 15 s take 0.3% of a core.
MAX_PROCESSES = 2000
MAX_THREADS = 1000  # in addition to the first thread of each process
ThreadKey = tuple[int, int]  # process, thread
STACK_BYTES = 16384

# Not nvidia_fs: a thread that hangs there waits for storage.
_DRIVER_MODULE = re.compile(rb"\[nvidia(_uvm|_modeset|_drm|_peermem)?\]")
_DRIVER_SYMBOL = re.compile(r"nvidia(?!_?fs)|^_?nv_|^_nv\d|^uvm_")
STUCK_S = 60.0  # the check's text says "a minute or more"
MAX_SUSPECTS = 1024  # three reads each per call, 0.3% of a core if so many hang
MAX_NAMED = 3  # in the text

# Wait channels of threads frozen on purpose: the threads of a paused cgroup v1 container are in state D.
FROZEN_CHANNELS = ("__refrigerator", "do_freezer_trap", "get_signal")
IN_DRIVER_S = 10.0  # long enough for two observations without a switch; the policy sets the limit
MAX_STACKS = 64  # per call: where a thread waits is read once, because it cannot change during its sleep
# Processes that are usually asleep: the first one and, outside of containers, the parent of the kernel's
# threads. Some hosts protect the first one even from processes with all capabilities.
ALWAYS_ASLEEP: tuple[ThreadKey, ...] = ((1, 1), (2, 2))
UNKNOWN = "the driver that a stuck process waits for is unknown: {}"
UNREAD = "the driver that a stuck process waits for is not read yet; stuck threads to be read: {}"
UNWATCHED = "more than {} threads are in uninterruptible sleep; they are watched in turn"
UNVISITED = "not all threads have been visited yet"
EARLY = "threads that were already in uninterruptible sleep when first seen, less than {:g} s ago: {}"


@dataclass(frozen=True, slots=True)
class ThreadStat:
    """The fields of /proc/PID/stat that the walk needs."""

    name: str
    state: str
    flags: int
    start: int  # clock ticks after boot: distinguishes a thread from a later one with the same id

    @property
    def is_asleep(self) -> bool:
        """True if a user's thread is in uninterruptible sleep.

        Kernel threads do not count, because some drivers keep theirs in this state permanently.
        """
        return self.state == "D" and not self.flags & PF_KTHREAD


def parse_stat(raw: bytes) -> ThreadStat | None:
    """Parse the file; None if it is malformed."""
    before, closing, after = raw.rpartition(b")")  # the name may contain blanks and parentheses
    fields = after.split()
    _, opening, name = before.partition(b"(")
    if not closing or not opening or len(fields) < 20:
        return None
    figures = (fields[6], fields[19])  # fields 9 and 22 of proc(5)
    if not all(each.isdigit() and len(each) <= MAX_FIGURES for each in figures):
        return None
    flags, start = (int(each) for each in figures)
    state = fields[0].decode("ascii", "replace")
    return ThreadStat(printable(name[:MAX_NAME].decode("utf-8", "replace")), state, flags, start)


def has_several_threads(raw: bytes) -> bool:
    """Return True if the process has more than one thread, according to its `stat`; False if malformed."""
    fields = raw[raw.rfind(b")") + 1 :].split(None, 18)  # field 20 of proc(5) is the number of threads
    return len(fields) > 18 and fields[17].isdigit() and fields[17] != b"1"


def may_be_asleep(raw: bytes) -> bool:
    """Return False if the `stat` shows a state other than D.

    Few threads are in state D, and parsing the other fields of all threads would be most of the walk's cost.
    """
    return raw.startswith(b"D", raw.rfind(b")") + 2)


def context_switches(status: bytes) -> int | None:
    """Return the thread's context switches, voluntary and involuntary; None if the file has none.

    A thread that stays asleep does not switch; a thread that is busy with a disk sleeps often, and switches.
    """
    found = 0
    lines = [line for line in status.splitlines() if b"voluntary_ctxt_switches:" in line]
    for line in lines:
        figures = line.rpartition(b":")[2].strip()
        if not figures.isdigit() or len(figures) > MAX_FIGURES:
            return None
        found += int(figures)
    return found if lines else None


class ThreadWalk:
    """Visits the threads of the procfs `proc` in passes, and returns those in state D.

    A pass visits the first thread of each process and then the further threads, as listed during the pass.
    Each call continues where the previous one ended. No thread waits for threads that started later: they
    belong to the next pass. While the further threads take several calls, the first threads are visited
    again.
    """

    def __init__(self, proc: str, processes: int = MAX_PROCESSES, threads: int = MAX_THREADS) -> None:
        self._proc = proc
        self._most_processes = processes
        self._most_threads = threads
        self.calls = 0
        # The newest call for which every thread that existed then has been visited since; 0: none.
        self.covered_from = 0
        self._cut_in = 0  # the last call in which a directory had too many entries
        self._processes: deque[int] = deque()  # still to be visited
        self._processes_from = 0  # the call that listed them
        self._several: list[int] = []  # the processes of this pass that have further threads
        self._threads: Iterator[ThreadKey] | None = None  # further threads still to be visited
        self._threads_from = 0  # the call that listed their processes

    def asleep(self) -> list[tuple[ThreadKey, ThreadStat]]:
        """Return the threads visited in this call that are in uninterruptible sleep."""
        self.calls += 1
        visited = [*self._first_threads(), *self._further_threads()]
        asleep = [(key, seen) for key, raw in visited if may_be_asleep(raw) and (seen := parse_stat(raw))]
        return [(key, seen) for key, seen in asleep if seen.is_asleep]

    def stat(self, key: ThreadKey) -> ThreadStat | None:
        """Return the `stat` of one thread; None if it has ended."""
        return parse_stat(self.raw_stat(key))

    def raw_stat(self, key: ThreadKey) -> bytes:
        """Return the file; empty if the thread has ended."""
        pid, tid = key
        folder = str(pid) if pid == tid else f"{pid}/task/{tid}"
        return try_read(f"{self._proc}/{folder}/stat", STAT_BYTES) or b""

    def _first_threads(self) -> Iterator[tuple[ThreadKey, bytes]]:
        if not self._processes:
            self._processes.extend(self._ids(self._proc))
            self._processes_from, self._several = self.calls, []
        for _ in range(min(len(self._processes), self._most_processes)):
            pid = self._processes.popleft()
            raw = self.raw_stat((pid, pid))
            if has_several_threads(raw):
                self._several.append(pid)
            yield (pid, pid), raw

    def _further_threads(self) -> Iterator[tuple[ThreadKey, bytes]]:
        if self._threads is None and not self._processes:
            self._threads, self._threads_from = self._further(self._several), self._processes_from
        visited = 0
        for key in islice(self._threads or (), self._most_threads):
            visited += 1
            yield key, self.raw_stat(key)
        if self._threads is not None and visited < self._most_threads:
            self._threads = None
            self.covered_from = self._threads_from if self._cut_in < self._threads_from else 0

    def _further(self, pids: Sequence[int]) -> Iterator[ThreadKey]:
        return ((pid, tid) for pid in pids for tid in self._ids(f"{self._proc}/{pid}/task") if tid != pid)

    def _ids(self, folder: str) -> list[int]:
        names = list_names(folder)
        # Every procfs contains processes: without one, it could not be read.
        if len(names) >= MAX_NAMES or (folder == self._proc and not names):
            self._cut_in = self.calls
        return sorted(int(each) for each in names if each.isdecimal())


def in_driver(stack: bytes | None, wait_channel: str) -> bool:
    """Return True if the driver is in the stack or, if the stack is unreadable, in the wait channel.

    A line of the stack is `[<0>] uvm_ioctl+0x1f/0x30 [nvidia_uvm]`: the module identifies the driver.
    """
    if stack:
        return _DRIVER_MODULE.search(stack) is not None
    return _DRIVER_SYMBOL.search(wait_channel) is not None


@dataclass(frozen=True, slots=True)
class SleepingThread:
    """A thread in uninterruptible sleep."""

    name: str
    start: int
    switches: int
    wait_channel: str  # "" if it is unreadable


class WaitPlace(Enum):
    """Where a suspect waits. It keeps its stack while it is asleep."""

    UNREAD = auto()
    DRIVER = auto()
    ELSEWHERE = auto()
    HIDDEN = auto()  # the kernel shows neither its stack nor its wait channel


@dataclass(frozen=True, slots=True)
class Suspect:
    """A thread that has been asleep without a context switch since it was first seen."""

    asleep: SleepingThread
    since_s: float
    place: WaitPlace = WaitPlace.UNREAD

    def comes_first(self, now_s: float) -> bool:
        """Return True for a thread that is kept if there are too many: in the driver, or not examined yet.

        A thread that has run since the last call does not come first.
        """
        return self.place is WaitPlace.DRIVER or (self.place is WaitPlace.UNREAD and self.since_s < now_s)


def suspects(
    before: Mapping[ThreadKey, Suspect], now: Mapping[ThreadKey, SleepingThread], now_s: float
) -> dict[ThreadKey, Suspect]:
    """Return the threads that may be stuck, and since when each has been asleep.

    If a thread has run since the last call, its sleep starts at `now_s`, and where it waits is unread.
    """
    found = {}
    for key, asleep in now.items():
        known = before.get(key)
        same = (
            known is not None
            and known.asleep.start == asleep.start
            and known.asleep.switches == asleep.switches
        )
        if asleep.wait_channel not in FROZEN_CHANNELS:
            found[key] = (
                replace(known, asleep=asleep) if known is not None and same else Suspect(asleep, now_s)
            )
    return found


def process_count(stuck: Iterable[ThreadKey]) -> int:
    """Return the number of processes that the threads belong to."""
    return len({pid for pid, _ in stuck})


def asleep_for(found: Mapping[ThreadKey, Suspect], now_s: float, for_s: float) -> dict[ThreadKey, Suspect]:
    """Return the threads that have been asleep for `for_s` or longer."""
    return {key: each for key, each in found.items() if now_s - each.since_s >= for_s}


def describe(stuck: Mapping[ThreadKey, Suspect], now_s: float) -> str:
    """Return the stuck threads as text: the ones stuck longest by name, then the number of the others."""
    order = sorted(stuck.items(), key=lambda item: (item[1].since_s, item[0]))
    named = [
        f"{each.asleep.name} ({tid}) for {now_s - each.since_s:.0f} s"
        + (f" in {each.asleep.wait_channel}" if each.asleep.wait_channel else "")
        for (_, tid), each in order[:MAX_NAMED]
    ]
    more = [f"and {len(order) - MAX_NAMED} more"] if len(order) > MAX_NAMED else []
    return ", ".join(named + more)


def refusal(path: str) -> str:
    """Return what is wrong with a stack or a wait channel that does not show where a thread waits."""
    try:
        found = read(path, STACK_BYTES).strip()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return (
        f"{path} contains only {printable(found.decode('ascii', 'replace'))}" if found else f"{path} is empty"
    )


class StuckThreads:
    """Checks the processes of one procfs. Seeing the host's processes requires the host's PID namespace."""

    checks = frozenset({"uninterruptible", "gpu_process_stuck"})

    def __init__(self, proc: str, walk: ThreadWalk | None = None) -> None:
        self._proc = proc
        self._walk = walk or ThreadWalk(proc)
        self._suspects: dict[ThreadKey, Suspect] = {}
        self._unwatched_in = 0  # the last call of the walk that found too many suspects
        self._covered_s: float | None = None  # since when no thread can have been missed
        self._why: dict[str, str] = {}  # why a check has no reading

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        self._watch(now_s)
        if "uninterruptible" in due:
            stuck = asleep_for(self._suspects, now_s, STUCK_S)
            yield from self._judged("uninterruptible", stuck, self._missed(now_s, STUCK_S), now_s)
        if "gpu_process_stuck" in due:
            self._examine(asleep_for(self._suspects, now_s, IN_DRIVER_S))
            stuck = {key: each for key, each in self._suspects.items() if each.place is WaitPlace.DRIVER}
            why = "" if stuck else self._unknown(now_s) or self._missed(now_s, IN_DRIVER_S)
            yield from self._judged("gpu_process_stuck", stuck, why, now_s)

    def left_out(self) -> tuple[Omission, ...]:
        refused = UNKNOWN.partition("{")[0]  # only a privilege, and not time, shows it
        return tuple(
            Omission(check, why, is_open=not why.startswith(refused))
            for check, why in self._why.items()
            if why
        )

    def _judged(
        self, check: str, stuck: Mapping[ThreadKey, Suspect], why: str, now_s: float
    ) -> Iterator[Reading]:
        """Yield the reading, unless it would be 0 and `why` says that a stuck thread may have been missed."""
        self._why[check] = "" if stuck else why
        if stuck or not why:
            yield _counted(check, stuck, now_s)

    def _watch(self, now_s: float) -> None:
        """Look at the suspects again and, while there is room, at the other threads that the walk finds."""
        # The suspects are read in each call, because the walk reaches each thread only occasionally.
        again = {key: each for key in self._suspects if (each := self._walk.stat(key)) and each.is_asleep}
        known = suspects(self._suspects, self._described(again), now_s)
        others = {key: each for key, each in self._walk.asleep() if key not in known}
        first = [key for key, each in known.items() if each.comes_first(now_s)]
        last = [key for key, each in known.items() if not each.comes_first(now_s)]
        last.sort(key=lambda key: known[key].since_s == now_s)  # those that have run come after the others
        new, unread = self._new(others, MAX_SUSPECTS - len(first), now_s)
        order = [*first, *new, *last]
        self._suspects = {key: new.get(key) or known[key] for key in order[:MAX_SUSPECTS]}
        if unread or len(order) > MAX_SUSPECTS:
            self._unwatched_in = self._walk.calls
        if self._walk.covered_from <= self._unwatched_in:
            self._covered_s = None
        elif self._covered_s is None:
            self._covered_s = now_s

    def _new(
        self, found: Mapping[ThreadKey, ThreadStat], room: int, now_s: float
    ) -> tuple[dict[ThreadKey, Suspect], bool]:
        """Return at most `room` new suspects, and whether some of the threads have not been read."""
        # If there are too many, each call takes different ones, as if at random.
        order = sorted(found, key=lambda key: hash((key, self._walk.calls))) if len(found) > room else found
        new: dict[ThreadKey, Suspect] = {}
        for key in order:
            if len(new) >= room:
                return new, True
            new |= suspects({}, self._described({key: found[key]}), now_s)
        return new, False

    def _missed(self, now_s: float, for_s: float) -> str:
        """Return why a thread stuck for `for_s` may have been missed; "" if none can have been."""
        if self._unwatched_in == self._walk.calls:
            return UNWATCHED.format(MAX_SUSPECTS)
        covered_s = self._covered_s
        if covered_s is None:
            return UNVISITED
        # It is unknown how long these threads had been asleep before.
        early = [each for each in self._suspects.values() if each.since_s <= covered_s]
        count = sum(now_s - each.since_s < for_s for each in early)
        return EARLY.format(for_s, count) if count else ""

    def _described(self, found: Mapping[ThreadKey, ThreadStat]) -> dict[ThreadKey, SleepingThread]:
        described = {}
        for key, each in found.items():
            switches = context_switches(try_read(self._path(key, "status"), STATUS_BYTES) or b"")
            if switches is not None:
                described[key] = SleepingThread(each.name, each.start, switches, self._wait_channel(key))
        return described

    def _wait_channel(self, key: ThreadKey) -> str:
        """Return the wait channel. The kernel writes 0 for readers without the privilege."""
        found = parse_text(try_read(self._path(key, "wchan"))) or ""
        return "" if found == "0" else found

    def _examine(self, stuck: Mapping[ThreadKey, Suspect]) -> None:
        """Read where stuck threads wait: first those never read, then the hidden ones in turn."""
        unread = [key for key, each in stuck.items() if each.place is WaitPlace.UNREAD]
        hidden = [key for key, each in stuck.items() if each.place is WaitPlace.HIDDEN]
        for key in [*unread, *hidden][:MAX_STACKS]:
            each = self._suspects.pop(key)  # and add it again as the last one
            place = self._place(key, each.asleep.wait_channel)
            if place is not WaitPlace.HIDDEN or self._is_still_asleep(key):
                self._suspects[key] = replace(each, place=place)

    def _place(self, key: ThreadKey, wait_channel: str) -> WaitPlace:
        stack = self._stack(key)
        if in_driver(stack, wait_channel):
            return WaitPlace.DRIVER
        return WaitPlace.ELSEWHERE if stack or wait_channel else WaitPlace.HIDDEN

    def _unknown(self, now_s: float) -> str:
        """Return why it is unknown whether a stuck thread waits in the driver; "" if it is known."""
        stuck = asleep_for(self._suspects, now_s, IN_DRIVER_S)
        refusals = self._refusals([key for key, each in stuck.items() if each.place is WaitPlace.HIDDEN])
        unread = sum(each.place is WaitPlace.UNREAD for each in stuck.values())
        return UNKNOWN.format(refusals) if refusals else UNREAD.format(unread) if unread else ""

    def _is_still_asleep(self, key: ThreadKey) -> bool:
        now = self._walk.stat(key)
        return now is not None and now.is_asleep

    def _stack(self, key: ThreadKey) -> bytes | None:
        return try_read(self._path(key, "stack"), STACK_BYTES)

    def _refusals(self, unknown: Sequence[ThreadKey]) -> str:
        """Return what the kernel does not show about a thread, preferably a stuck one; "" if nothing."""
        tried = unknown[-1:] or ALWAYS_ASLEEP  # the last one was read last
        if not unknown and any(self._stack(each) or self._wait_channel(each) for each in tried):
            return ""
        return "; ".join(refusal(self._path(tried[0], name)) for name in ("stack", "wchan"))

    def _path(self, key: ThreadKey, name: str) -> str:
        pid, tid = key
        return f"{self._proc}/{pid}/task/{tid}/{name}"


def _counted(check: str, stuck: Mapping[ThreadKey, Suspect], now_s: float) -> Reading:
    value = float(process_count(stuck))
    return Reading(check, NODE, value, describe(stuck, now_s))
