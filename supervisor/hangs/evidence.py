"""What an inspection shows: a wait for other ranks, a wait that nothing can end, or possible work. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.inspection import thread_waits
from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import hung_rank

# Roles
STOPPED = "stopped"  # by a signal: it does nothing until it gets SIGCONT
TRACED = "traced"  # a debugger is attached
GONE = "gone"  # its process has ended
WAITS = "waits"  # in a collective, for other ranks
LOCKED = "locked"  # all its threads wait for locks that no other process can release
WORKS = "works"  # it, or one of its child processes, makes progress
BUSY = "busy"  # it computes, in one function: a long call, or an endless loop
RESTS = "idle"  # it waits for something that may still come: a file, a peer, a time

# Kinds of work, in words: people read them, and the durations of stalls are learned by them
COMPUTES, CHILDREN, BYTES = "computing", "work of its child processes", "reading or writing"
FILE, NETWORK, SLEEP, CHILD = "a file system", "a network or a pipe", "sleep", "a child process"
LOCK, COLLECTIVE, UNKNOWN = "a lock", "a collective", "unknown"

_BUSY_SHARE = 0.05  # of a core; less is a thread that wakes up occasionally
_LINE = re.compile(r":\d+\)$")
_LOCKS = re.compile(r"\((threading|queue|concurrent/futures/\w+)\.py:\d+\)$")
_ALL_LOCKS = (
    thread_waits.LOCK,
    thread_waits.TIMED_LOCK,
    thread_waits.SIGNALLED_LOCK,
    thread_waits.SHARED_LOCK,
)
_OF_CALLS = (
    (thread_waits.FILE, FILE),
    (thread_waits.NETWORK, NETWORK),
    (thread_waits.POLL, NETWORK),
    (thread_waits.SLEEP, SLEEP),
    (thread_waits.CHILD, CHILD),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """What an inspection shows: the role of the rank, and the kind of its work."""

    role: str
    work: str = ""
    evidence: bool = False  # something moved during the inspection


def findings(inspection: RankInspection) -> Findings:
    """Return the role of the rank in `inspection`, and the kind of its work."""
    state = inspection.process_state[:1]
    if inspection.traced or state == "t":
        return Findings(TRACED)
    if state == "T":
        return Findings(STOPPED)
    if state in ("Z", "X"):
        return Findings(GONE)
    evidence = inspection.moved or inspection.children > 0 or inspection.io_bytes > 0
    busy = inspection.window_s > 0 and inspection.cpu_s > _BUSY_SHARE * inspection.window_s
    waiting = hung_rank.classify_wait(inspection.stack)
    if waiting == hung_rank.COLLECTIVE or (waiting == hung_rank.BACKWARD and not busy):
        return Findings(WAITS, COLLECTIVE, evidence or busy)
    if evidence:
        return Findings(WORKS, _kind(inspection), True)
    if busy:
        return Findings(BUSY, COMPUTES)
    return Findings(LOCKED, LOCK) if _is_locked(inspection) else Findings(RESTS, _awaited(inspection))


def shows_work(inspection: RankInspection) -> bool:
    """Return True for any sign of work, such as a long call. Even a busy wait for other ranks is not one."""
    found = findings(inspection)
    return inspection.moved or inspection.children > 0 or inspection.io_bytes > 0 or found.role == BUSY


def waits_for_no_rank(inspection: RankInspection) -> bool:
    """Return True when the inspection shows that the rank waits for no other one.

    The main thread shows that: it runs, sleeps for a time, or reads and writes files that answer, outside of
    every function in which ranks meet. A wait for a lock, a pipe, a connection or a child process may be a
    wait for another rank. So may one of which nothing is known, or where a device or a library
    (`RankInspection.meets_unseen`) may hide such a wait.
    """
    if inspection.meets_unseen or findings(inspection).role not in (WORKS, BUSY, RESTS):
        return False
    if hung_rank.classify_wait(inspection.stack) != hung_rank.NOT_WAITING:
        return False
    main = inspection.calls[0] if inspection.calls else ""
    # A thread that runs may be off its core at this moment.
    runs = main == thread_waits.RUNS or (main == thread_waits.OTHER and inspection.process_state[:1] == "R")
    return runs or main == thread_waits.SLEEP or (main == thread_waits.FILE and inspection.io_bytes > 0)


def _kind(inspection: RankInspection) -> str:
    if inspection.children > 0:
        return CHILDREN
    return COMPUTES if inspection.moved else BYTES


def _is_locked(inspection: RankInspection) -> bool:
    """Return True when the main thread and every other thread wait for a lock, without a time limit.

    A wait with a time limit does not count: its thread runs again, and may release the others. Nor does a
    wait that a signal handler of the script may end (`thread_waits.SIGNALLED_LOCK`), nor a wait inside of an
    extension: threads that Python does not know may end it.
    """
    return (
        inspection.process_state[:1] == "S"
        and set(inspection.calls) == {thread_waits.LOCK}
        and _LOCKS.search(inspection.at) is not None
    )


def _awaited(inspection: RankInspection) -> str:
    if inspection.process_state.startswith("D"):
        return FILE
    main = inspection.calls[:1]
    for calls in (main, inspection.calls):
        for call, kind in _OF_CALLS:
            if call in calls:
                return kind
    return LOCK if main and main[0] in _ALL_LOCKS else UNKNOWN


def describe(inspection: RankInspection) -> str:
    """Return the evidence of an inspection in one line."""
    window = f" in {inspection.window_s:.2f} s" if inspection.window_s else ""
    parts = [
        f"step {inspection.step}",
        f"state {inspection.process_state}",
        f"{inspection.cpu_s:.2f} s of CPU{window}",
    ]
    parts += [f"{inspection.io_bytes} bytes read and written"] * (inspection.io_bytes > 0)
    parts += [f"{inspection.children} child processes at work"] * (inspection.children > 0)
    parts += ["a debugger is attached"] * inspection.traced
    parts += [f"its main thread waits in: {call}" for call in inspection.calls[:1]]
    parts += [f"in {inspection.where}"] * bool(inspection.where)
    if inspection.rests_s > 0:
        parts.append("at rest until its peers send something")
    elif findings(inspection).role == WAITS and inspection.stirs:
        parts.append(f"not known to be at rest: {inspection.stirs}")
    return f"rank {inspection.rank}: " + ", ".join(parts)


def without_line(position: str) -> str:
    """Return a position in a script ("evaluate (train.py:42)") without its line number."""
    return _LINE.sub(")", position)
