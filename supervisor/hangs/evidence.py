"""Classify the result of an inspection: a wait for other ranks, an endless wait, or possible work. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.inspection import python_stacks, thread_waits
from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import hung_rank

# Roles
STOPPED = "stopped"  # a signal has stopped the rank, which does nothing until it receives SIGCONT
TRACED = "traced"  # a debugger is attached
GONE = "gone"  # the process of the rank has exited
WAITS = "waits"  # the rank waits for other ranks in a collective
LOCKED = "locked"  # all threads wait for locks that no other process can release
WORKS = "works"  # the rank or one of its child processes makes progress
BUSY = "busy"  # the rank computes in one function: a long call or an endless loop
IDLE = "idle"  # the rank waits for an event that may still come, from a file, a peer or a timer

# Kinds of work. Messages show them, and Holdfast learns the durations of stalls for each kind.
COMPUTES, CHILDREN, BYTES = "computing", "work of its child processes", "reading or writing"
FILE, NETWORK, SLEEP, CHILD = "a file system", "a network or a pipe", "sleep", "a child process"
LOCK, COLLECTIVE, UNKNOWN = "a lock", "a collective", "unknown"

_BUSY_SHARE = 0.05  # as a share of a core; a thread that only wakes up now and then uses less
_LINE = re.compile(r":\d+\)$")
_ALL_LOCKS = (
    thread_waits.LOCK,
    thread_waits.TIMED_LOCK,
    thread_waits.SIGNALLED_LOCK,
    thread_waits.SHARED_LOCK,
)
_OF_CALLS = (
    (thread_waits.FILE, FILE),
    (thread_waits.NETWORK, NETWORK),
    (thread_waits.ACCEPT, NETWORK),
    (thread_waits.POLL, NETWORK),
    (thread_waits.SLEEP, SLEEP),
    (thread_waits.CHILD, CHILD),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """The conclusions from an inspection: the role of the rank, and the kind of its work."""

    role: str
    work: str = ""
    shows_progress: bool = False  # the rank or one of its child processes made progress during the inspection


def findings(inspection: RankInspection) -> Findings:
    """Return the role of the rank in `inspection`, and the kind of its work."""
    state = inspection.process_state[:1]
    if inspection.traced or state == "t":
        return Findings(TRACED)
    if state == "T":
        return Findings(STOPPED)
    if state in ("Z", "X"):
        return Findings(GONE)
    progress = inspection.moved or inspection.children > inspection.sleeping or inspection.io_bytes > 0
    busy = inspection.window_s > 0 and inspection.cpu_s > _BUSY_SHARE * inspection.window_s
    waiting = hung_rank.classify_wait(inspection.stack)
    if waiting == hung_rank.COLLECTIVE or (waiting == hung_rank.BACKWARD and not busy):
        return Findings(WAITS, COLLECTIVE, progress or busy or inspection.children > 0)
    if progress:
        return Findings(WORKS, _kind(inspection), True)
    if busy:
        return Findings(BUSY, COMPUTES)
    if inspection.children:  # as uncertain as a long call: they may be about to work
        return Findings(BUSY, CHILDREN)
    return Findings(LOCKED, LOCK) if _is_locked(inspection) else Findings(IDLE, _awaited(inspection))


def shows_work(inspection: RankInspection) -> bool:
    """True if there is any sign of work, such as a long call. A busy wait for other ranks does not count."""
    found = findings(inspection)
    return inspection.moved or inspection.children > 0 or inspection.io_bytes > 0 or found.role == BUSY


def waits_for_no_rank(inspection: RankInspection) -> bool:
    """True if the inspection shows that the rank does not wait for another rank.

    This is certain if the main thread is running, is in a timed sleep, or does I/O on files that respond, and
    is not in a function where ranks meet. Any other wait, for example for a lock, a pipe, a connection or a
    child process, can be a wait for another rank. The same applies to the use of a device or
    library that hides its waits (`RankInspection.meets_unseen`).
    """
    if inspection.meets_unseen or findings(inspection).role not in (WORKS, BUSY, IDLE):
        return False
    if hung_rank.classify_wait(inspection.stack) != hung_rank.NOT_WAITING:
        return False
    main = inspection.calls[0] if inspection.calls else ""
    # A runnable thread without a core is not reported as `thread_waits.RUNS`.
    runs = main == thread_waits.RUNS or (main == thread_waits.OTHER and inspection.process_state[:1] == "R")
    return runs or main == thread_waits.SLEEP or (main == thread_waits.FILE and inspection.io_bytes > 0)


def _kind(inspection: RankInspection) -> str:
    if inspection.children > 0:
        return CHILDREN
    return COMPUTES if inspection.moved else BYTES


def _is_locked(inspection: RankInspection) -> bool:
    """True if all threads wait for locks without a time limit.

    Three kinds of waits are excluded:

    - a wait with a time limit, because its thread will run again and may release the others;
    - a wait that a signal handler of the script may end (`thread_waits.SIGNALLED_LOCK`);
    - a wait inside an extension, because a thread that Python does not know about may end it. The launcher
      reports the wait of a bare acquire(), which has no frame in Python, as a call in `_thread`.
    """
    return (
        inspection.process_state[:1] == "S"
        and set(inspection.calls) == {thread_waits.LOCK}
        and python_stacks.LOCK_POSITION.search(inspection.at) is not None
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
    """Describe an inspection in one line, as evidence for an incident."""
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
    """Return a position in a script, such as "evaluate (train.py:42)", without its line number."""
    return _LINE.sub(")", position)
