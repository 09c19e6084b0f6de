"""Inspect one member's ranks from outside: what their processes do in a short window, and where in the code.

The launcher runs the inspection, because it is in the same PID namespace as its ranks. An inspection takes a
fifth of a second, or longer if a process is unresponsive, so it runs on a separate thread. py-spy reads the
stacks without stopping the process. If py-spy is not installed, an inspection reports only states and times.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.inspection import blocked_ranks, process_stats, python_stacks, thread_waits
from holdfast.inspection.process_stats import ProcessTree, Sample
from holdfast.inspection.python_stacks import Thread
from holdfast.protocol import environment, foreign_text, progress
from holdfast.protocol.launcher_messages import MAX_CALLS, RankInspection

# Long enough to distinguish a process that works, and so uses a core or reads and writes, from one that
# waits.
WINDOW_S = 0.15
DUMP_S = 3.0  # py-spy needs about 20 ms, but may never finish if the process is in uninterruptible sleep
INSPECTION_S = 4 * DUMP_S
RECENT_S = 30.0  # longer than the time between two inspections of one stall
MAX_KEPT = 64  # the ranks whose descendants are remembered, several times as many as a member has
AT_ONCE = 8  # how many processes are inspected in parallel
_WORKS = 0.03  # a process that uses this share of a core counts as working; periodic wake-ups use less
# Name prefixes of threads that run libraries' loops. No matter what the script does, these threads wait
# forever or repeatedly for a short time, so their waits say nothing about the script. Threads that run the
# script's callbacks for a collective (torch's pt_nccl_runhook) are not among them.
_LOOPS = ("gloo_tcp_loop", "pt_tcpstore", "pt_nccl_watchdg", "pt_nccl_heartbt", "NCCL ", "nccl", "cuda")
# The waits of a descendant that is at work or may be. A wait in poll() or accept() is not among them: an idle
# worker of a data loader polls its queue, and a thread of it accepts connections to share file descriptors.
_WILL_RUN = frozenset(
    {
        thread_waits.RUNS,
        thread_waits.SLEEP,
        thread_waits.NETWORK,
        thread_waits.FILE,
        thread_waits.CHILD,
        thread_waits.UNKNOWN,
    }
)


@dataclass(frozen=True, slots=True)
class InspectedRank:
    """A rank to inspect: its process, and its progress page."""

    rank: int
    pid: int
    page: Path


class LastInspection:
    """The descendants of each rank at its last inspection, by the pid of the rank."""

    def __init__(self) -> None:
        self._trees: dict[int, tuple[float, ProcessTree]] = {}

    def exchange(self, pid: int, now: ProcessTree, now_s: float) -> ProcessTree | None:
        """Keep `now`, and return the last tree of `pid`; None if there is none, or only an old one."""
        then_s, then = self._trees.get(pid, (0.0, None))
        if pid not in self._trees and len(self._trees) >= MAX_KEPT:
            self._trees.clear()  # of generations that have ended
        self._trees[pid] = now_s, now
        return then if now_s - then_s <= RECENT_S else None


class RankInspector:
    """Runs one inspection at a time, on a separate thread.

    That thread calls `done` with the inspection's generation, number and results.
    """

    def __init__(self, done: Callable[[int, int, tuple[RankInspection, ...]], None]) -> None:
        self._done = done
        self._busy = threading.Lock()
        self._last = LastInspection()

    def begin(
        self, number: int, targets: tuple[InspectedRank, ...], generation: int, inspection_id: int = 0
    ) -> None:
        """Begin inspection `number`, unless one is in progress."""
        if self._busy.acquire(blocking=False):
            given = (number, targets, generation, inspection_id)
            threading.Thread(target=self._inspect, args=given, name="holdfast-inspect", daemon=True).start()

    def _inspect(
        self, number: int, targets: tuple[InspectedRank, ...], generation: int, inspection_id: int
    ) -> None:
        try:
            found = inspect_ranks(number, targets, inspection_id, self._last)
        finally:
            self._busy.release()
        self._done(generation, number, found)


def inspect_ranks(
    number: int,
    targets: tuple[InspectedRank, ...],
    inspection_id: int = 0,
    last: LastInspection | None = None,
) -> tuple[RankInspection, ...]:
    """Inspect all targets, and return the inspections that finish within `INSPECTION_S`. Never raises."""
    found: dict[int, RankInspection] = {}
    known = last or LastInspection()

    def inspect_some(some: tuple[InspectedRank, ...]) -> None:
        for target in some:
            found[target.rank] = _inspect_rank(number, target, inspection_id, known)

    # These are daemon threads, because a thread may wait for a process in uninterruptible sleep and must not
    # keep the launcher alive.
    threads = [
        threading.Thread(
            target=inspect_some, args=(targets[start::AT_ONCE],), name="holdfast-inspect", daemon=True
        )
        for start in range(min(AT_ONCE, len(targets)))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + INSPECTION_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return bounded(tuple(found[target.rank] for target in targets if target.rank in found))


def bounded(inspections: tuple[RankInspection, ...]) -> tuple[RankInspection, ...]:
    """Return the inspections with each stack cut to an equal share of the message, outer frames first."""
    most = foreign_text.share(foreign_text.INSPECTIONS_BYTES, len(inspections))
    stacks = (foreign_text.shortened(each.stack, most // 2, head=0.9) for each in inspections)
    words = most // 8
    return tuple(
        replace(
            foreign_text.each(replace(each, stack=""), words, head=0.9),
            stack=stack,
            calls=tuple(foreign_text.shortened(call, words) for call in each.calls),
        )
        for each, stack in zip(inspections, stacks, strict=True)
    )


def _inspect_rank(
    number: int, target: InspectedRank, inspection_id: int, last: LastInspection
) -> RankInspection:
    command = _py_spy()
    before, began_s = process_stats.tree(target.pid), time.monotonic()
    first, ours, _ = dump(command, target.pid)
    time.sleep(max(0.0, WINDOW_S - (time.monotonic() - began_s)))
    second, ours_too, missing = dump(command, target.pid)
    calls = _calls(target.pid, second, ours | ours_too) if second else ()
    rest = blocked_ranks.of(target.pid, second, ours | ours_too)
    after, window_s = process_stats.tree(target.pid), time.monotonic() - began_s
    page = _page(target.page)
    earlier = last.exchange(target.pid, after, time.monotonic())
    children, sleeping, children_cpu_s = _below(before, after, earlier)
    same = python_stacks.functions(first) == python_stacks.functions(second)
    shown = second
    if same and calls == (thread_waits.LOCK,) and _is_python_lock(command, target.pid, second, ours_too):
        shown = python_stacks.with_call(second, python_stacks.ACQUIRE)
    return RankInspection(
        rank=target.rank,
        step=page.step if page else -1,
        phase=int(page.phase) if page else 0,
        phase_seq=page.phase_seq if page else 0,
        process_state=_state(before.own, after.own),
        cpu_s=round(max(0.0, after.own.cpu_s - before.own.cpu_s), 4),
        stack=python_stacks.text(shown) or missing,
        number=number,
        window_s=round(window_s, 3),
        traced=before.own.traced or after.own.traced,
        moved=bool(first and second) and not same,
        io_bytes=_bytes(before, after),
        calls=calls,
        children=children,
        children_cpu_s=round(children_cpu_s, 4),
        at=python_stacks.innermost(shown),
        where=python_stacks.where(second),
        asked=inspection_id,
        rests_s=rest.seconds,
        stirs=rest.stirs,
        mark=rest.mark,
        ends=rest.ends,
        meets_unseen=process_stats.may_wait_unseen(target.pid),
        sleeping=sleeping,
    )


def _calls(pid: int, found: tuple[Thread, ...], ours: frozenset[int]) -> tuple[str, ...]:
    """Return the waits of the rank's Python threads, followed by the waits of its native threads."""
    known = {each.tid for each in found} | ours
    calls = [process_stats.wait_of(pid, each.tid) if each.tid else thread_waits.UNKNOWN for each in found]
    # Python runs signal handlers in the main thread, so a handler can end only the main thread's wait.
    if calls[:1] == [thread_waits.LOCK] and process_stats.signal_may_end(pid):
        calls[0] = thread_waits.SIGNALLED_LOCK
    names = process_stats.threads(pid)
    native = {
        process_stats.wait_of(pid, tid)
        for tid, name in names.items()
        if tid not in known and not name.startswith(_LOOPS)
    }
    more = {thread_waits.UNKNOWN} if len(names) >= process_stats.MAX_THREADS else set()
    return listed((*calls, *sorted(native | more)))


def listed(calls: tuple[str, ...]) -> tuple[str, ...]:
    """Return the waits without duplicates. If a report cannot list them all, return the first ones and
    "unknown"."""
    found = tuple(dict.fromkeys(calls))
    return found if len(found) <= MAX_CALLS else (*found[: MAX_CALLS - 1], thread_waits.UNKNOWN)


def dump(command: str, pid: int) -> tuple[tuple[Thread, ...], frozenset[int], str]:
    """Return the rank's Python threads, the ids of Holdfast's own threads, and "".

    If the threads cannot be read, return no threads, and the reason as the last item.
    """
    if not command:
        return (), frozenset(), "no stack: py-spy is not installed"
    found, missing = _read(command, pid, "--nonblocking")
    if missing:
        return (), frozenset(), missing
    return python_stacks.of_the_rank(found), frozenset(each.tid for each in found if each.ours), ""


def _read(command: str, pid: int, how: str) -> tuple[tuple[Thread, ...], str]:
    """Return all Python threads and "", or no threads and the reason."""
    argv = [command, "dump", "--json", how, "--pid", str(pid)]
    try:
        ended = subprocess.run(argv, capture_output=True, timeout=DUMP_S, check=False)
    except OSError as error:
        return (), f"no stack: cannot start py-spy: {error}"
    except subprocess.TimeoutExpired:
        return (), f"no stack: py-spy did not finish within {DUMP_S:g} s"
    if ended.returncode != 0:
        return (), f"no stack: {ended.stderr.decode(errors='replace').strip()[:500]}"
    try:
        return python_stacks.parse(ended.stdout[: python_stacks.MAX_DUMP_BYTES]), ""
    except ValueError as error:
        return (), f"no stack: cannot parse py-spy's output: {error}"


def _is_python_lock(command: str, pid: int, found: tuple[Thread, ...], ours: frozenset[int]) -> bool:
    """True if all threads of a rank that wait for locks wait for locks of Python, as in a bare acquire().

    A wait of an extension (`work.wait()`) looks the same to the kernel and has no Python frame either, but a
    native thread may end it. Native frames tell them apart. To read them, py-spy stops the process for some
    tenths of a second, so this asks only about a rank whose threads all wait for locks anyway.
    """
    at = python_stacks.innermost(found)
    known = blocked_ranks.in_collective(at) or python_stacks.LOCK_POSITION.search(at)
    if not at or known or found[0].frames[0].ours:
        return False
    # A device's driver may call the script's functions in threads of its own, and these may release the lock.
    if process_stats.may_wait_unseen(pid):
        return False
    # A thread of Holdfast that writes may hold a lock of Python's output.
    if not all(process_stats.wait_of(pid, tid) in blocked_ranks.OURS_WAIT for tid in ours):
        return False
    native, missing = _read(command, pid, "--native")
    if missing.endswith(f"{DUMP_S:g} s"):
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)  # py-spy was killed, and may have left the process stopped
    return python_stacks.all_wait_for_python_locks(tuple(each for each in native if not each.ours))


def _py_spy() -> str:
    given = os.environ.get(environment.PY_SPY, "")
    return given if given and Path(given).exists() else shutil.which("py-spy") or ""


def _state(before: Sample, after: Sample) -> str:
    """Return the state after the window, or the state before it if the process was stopped (T) in between."""
    return before.state if after.state == "T" else after.state


def _below(before: ProcessTree, after: ProcessTree, earlier: ProcessTree | None) -> tuple[int, int, float]:
    """Return how many descendants were active in the window or may be, how many of them only sleep, and the
    CPU time of all.

    A descendant only sleeps if it has neither read nor written since the `earlier` inspection either: it may
    retry something from time to time.
    """
    works, sleeping, cpu_s = 0, 0, 0.0
    for pid, now in after.below.items():
        then = before.below.get(pid)
        if now.state in ("Z", "X"):
            continue
        used_s = now.cpu_s - (then.cpu_s if then else 0.0)
        cpu_s += max(0.0, used_s)
        moved = then is None or _has_moved(then, now)
        busy = moved or used_s > _WORKS * WINDOW_S or now.state in ("R", "D", "T", "t")
        waits = _WILL_RUN.intersection(process_stats.waits_of(pid))
        works += busy or bool(waits)
        known = earlier.below.get(pid) if earlier is not None else None
        is_still = known is not None and not _has_moved(known, now)
        sleeping += not busy and waits == {thread_waits.SLEEP} and is_still
    return works, sleeping, cpu_s


def _has_moved(then: Sample, now: Sample) -> bool:
    return now.io_bytes != then.io_bytes or now.io_calls != then.io_calls


def _bytes(before: ProcessTree, after: ProcessTree) -> int:
    pairs = [(before.own, after.own)]
    pairs += [(before.below[pid], now) for pid, now in after.below.items() if pid in before.below]
    return sum(max(0, now.io_bytes - then.io_bytes) for then, now in pairs)


def _page(path: Path) -> progress.Progress | None:
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    try:
        return progress.read(memory) or progress.read_torn_ok(memory)
    finally:
        memory.close()
