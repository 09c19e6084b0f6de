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
GONE = "gone"
WAITS = "waits"  # in a collective, for other ranks
LOCKED = "locked"  # all its threads wait for locks that no other process can release
WORKS = "works"  # it, or a process below it, makes progress
BUSY = "busy"  # it computes, in one function: a long call, or an endless loop
IDLE = "idle"  # it waits for something that may still come: a file, a peer, a time

# Kinds of work, in words: people read them, and the durations of stalls are learned by them
COMPUTES, CHILDREN, BYTES = "computing", "work of its child processes", "reading or writing"
FILE, NETWORK, SLEEP, CHILD = "a file system", "a network or a pipe", "sleep", "a child process"
LOCK, COLLECTIVE, UNKNOWN = "a lock", "a collective", "unknown"

_BUSY_SHARE = 0.05  # of a core; less is a thread that wakes now and then
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
    """What an inspection shows of a rank: one of the roles, and the kind of work."""

    role: str
    work: str = ""
    evidence: bool = False  # something moved during the inspection


def findings(look: RankInspection) -> Findings:
    """Return the role of the rank in `look`, and the kind of its work."""
    state = look.process_state[:1]
    if look.traced or state == "t":
        return Findings(TRACED)
    if state == "T":
        return Findings(STOPPED)
    if state in ("Z", "X"):
        return Findings(GONE)
    evidence = look.moved or look.children > 0 or look.io_bytes > 0
    busy = look.window_s > 0 and look.cpu_s > _BUSY_SHARE * look.window_s
    waiting = hung_rank.classify_wait(look.stack)
    if waiting == hung_rank.COLLECTIVE or (waiting == hung_rank.BACKWARD and not busy):
        return Findings(WAITS, COLLECTIVE, evidence or busy)
    if evidence:
        return Findings(WORKS, _kind(look), True)
    if busy:
        return Findings(BUSY, COMPUTES)
    return Findings(LOCKED, LOCK) if _locked(look) else Findings(IDLE, _wait(look))


def shows_work(look: RankInspection) -> bool:
    """True for any sign of work, a long call included. A wait for other ranks is none, even a busy one."""
    found = findings(look)
    return look.moved or look.children > 0 or look.io_bytes > 0 or found.role == BUSY


def waits_for_no_rank(look: RankInspection) -> bool:
    """True when the rank was seen not to wait for another one.

    The main thread shows that: it runs, sleeps for a time, or reads and writes files that answer, outside of
    every function in which ranks meet. A wait for a lock, a pipe, a connection or a child process may be
    one for another rank. The same is true where nothing is known, or where a device or a library
    (`RankInspection.meets_unseen`) may hide such a wait.
    """
    if look.meets_unseen or findings(look).role not in (WORKS, BUSY, IDLE):
        return False
    if hung_rank.classify_wait(look.stack) != hung_rank.NOT_WAITING:
        return False
    main = look.calls[0] if look.calls else ""
    runs = main == thread_waits.RUNS or (
        main == thread_waits.OTHER and look.process_state[:1] == "R"
    )  # off its core just now
    return runs or main == thread_waits.SLEEP or (main == thread_waits.FILE and look.io_bytes > 0)


def _kind(look: RankInspection) -> str:
    if look.children > 0:
        return CHILDREN
    return COMPUTES if look.moved else BYTES


def _locked(look: RankInspection) -> bool:
    """True when the main thread and every other thread wait for a lock, none of them with a time limit.

    A wait with a time limit does not count: its thread runs again, and may release the others. Nor does one
    that a signal handler of the script may end (`thread_waits.SIGNALLED_LOCK`), nor one inside of an
    extension: threads that Python does not know may end it.
    """
    return (
        look.process_state[:1] == "S"
        and set(look.calls) == {thread_waits.LOCK}
        and _LOCKS.search(look.at) is not None
    )


def _wait(look: RankInspection) -> str:
    if look.process_state.startswith("D"):
        return FILE
    main = look.calls[:1]
    for calls in (main, look.calls):
        for call, kind in _OF_CALLS:
            if call in calls:
                return kind
    return LOCK if main and main[0] in _ALL_LOCKS else UNKNOWN


def describe(look: RankInspection) -> str:
    """Return the evidence of an inspection in one line."""
    window = f" in {look.window_s:.2f} s" if look.window_s else ""
    parts = [f"step {look.step}", f"state {look.process_state}", f"{look.cpu_s:.2f} s of CPU{window}"]
    parts += [f"{look.io_bytes} bytes read and written"] * (look.io_bytes > 0)
    parts += [f"{look.children} child processes at work"] * (look.children > 0)
    parts += ["a debugger is attached"] * look.traced
    parts += [f"its main thread waits in: {call}" for call in look.calls[:1]]
    parts += [f"in {look.where}"] * bool(look.where)
    if look.rests_s > 0:
        parts.append("at rest until its peers send something")
    elif findings(look).role == WAITS and look.stirs:
        parts.append(f"not known to be at rest: {look.stirs}")
    return f"rank {look.rank}: " + ", ".join(parts)
