"""Tell orphans of dead ranks from orphans of live ranks, and find orphans that are still working.

Pure except for reading /proc.

The launcher inherits two kinds of orphans: processes that dead ranks left behind, and background processes of
live ranks. A rank leads a session, which includes the processes that it starts, such as data loader workers,
compile workers or a background server. A process that created its own session still has the rank's
environment, which contains the generation. If a process shares neither the session nor the environment of a
rank, it may belong to any live rank that started before it.

A successful script may leave an upload running, which must be able to finish as it would without Holdfast. It
may also leave a helper that waits for requests and never ends. Holdfast can tell the two apart, because only
the upload uses CPU time, reads or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.inspection import process_stats
from holdfast.protocol import environment

# Long enough for a working process to show activity, even if a slow network makes it pause.
WINDOW_S = 2.0
WORK_CPU = 0.01  # a share of a core; a server that waits for requests uses less
WORK_BYTES = 64 << 10  # the I/O within a window that counts as work: more than an occasional log line
MOST_WORDS = 120  # the maximum number of characters of a command line in a message
_MARK = f"{environment.GENERATION}=".encode()


@dataclass(frozen=True, slots=True)
class Origin:
    """The session, start time and generation of a process.

    `began` is in clock ticks since boot. `generation` is -1 if unknown.
    """

    session: int
    began: int
    generation: int = -1


def origin(pid: int) -> Origin | None:
    """Return the origin of `pid`; None if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        return Origin(int(fields[3]), int(fields[19]), _generation(pid))
    except (OSError, IndexError, ValueError):
        return None


def _generation(pid: int) -> int:
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process runs as another user
        return -1
    marks = [word.removeprefix(_MARK) for word in found if word.startswith(_MARK)]
    return int(marks[-1]) if marks and marks[-1].isdigit() else -1


def is_left(orphan: Origin, present: Mapping[int, int], past: Mapping[int, int], generation: int) -> bool:
    """Return True only if it is certain that ranks of earlier generations left this process behind.

    Args:
        orphan: A process whose parent has exited.
        present: The start times, by pid, of processes that are, or may become, ranks of `generation`.
        past: The start times, by pid, of processes that have exited or are about to exit.
        generation: The running generation.
    """
    if orphan.session in present:
        return False
    if orphan.session in past:
        return True
    if orphan.generation >= 0:
        return orphan.generation < generation
    older = all(orphan.began < began for began in present.values())
    return older and any(began <= orphan.began for began in past.values())


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The resources that a process and its descendants have used so far, and the descendants' pids."""

    cpu_s: float
    io_bytes: int
    below: frozenset[int] = frozenset()
    waits_for_storage: bool = False

    def works(self, before: WorkDone, window_s: float) -> bool:
        """Return whether the process worked in the `window_s` seconds since the measurement `before`."""
        return (
            self.waits_for_storage
            or self.below != before.below
            or self.cpu_s - before.cpu_s >= WORK_CPU * window_s
            or self.io_bytes - before.io_bytes >= WORK_BYTES
        )


def done(pid: int) -> WorkDone:
    """Return the work that `pid` and its descendants have done so far."""
    found = process_stats.tree(pid)
    parts = (found.own, *found.below.values())
    return WorkDone(
        cpu_s=sum(each.cpu_s for each in parts),
        io_bytes=sum(each.io_bytes for each in parts),
        below=frozenset(found.below),
        waits_for_storage=any(each.state == "D" for each in parts),
    )


def command_of(pid: int) -> str:
    """Return the command line of `pid`; "" if it does not exist."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    text = " ".join(word.decode(errors="replace") for word in words if word)
    return text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 3] + "..."


@dataclass(slots=True)
class BackgroundProcesses:
    """Measures each process once per window, and remembers which processes were idle."""

    measure: Callable[[int], WorkDone] = done
    # For each process: when its current window began, and the work that it had done by then.
    _before: dict[int, tuple[float, WorkDone]] = field(default_factory=dict)
    _resting: set[int] = field(default_factory=set)

    def resting(self, pids: Iterable[int], now_s: float) -> set[int]:
        """Return the `pids` that were nearly idle for a whole window, in this call or an earlier one."""
        for pid in pids:
            if pid in self._resting:
                continue
            if pid not in self._before:
                self._before[pid] = (now_s, self.measure(pid))
            began_s, before = self._before[pid]
            if now_s - began_s < WINDOW_S:
                continue
            now = self.measure(pid)
            if not now.works(before, now_s - began_s):
                self._resting.add(pid)
            self._before[pid] = (now_s, now)
        return self._resting.intersection(pids)
