"""Inspect the other threads of this process: their frames, and the exceptions that they are handling.

`whereabouts` reports whether the main thread is waiting in a collective or working. Another thread calls it.
`BackgroundThreads` warns about threads that the script runs concurrently with its steps, for example for an
asynchronous save.

Before Python 3.12, the interpreter holds the lock of its thread list while it collects frames or exceptions,
and its allocations may start the garbage collector. A finalizer that needs the same lock then blocks forever
while it holds the GIL, and the whole process hangs (CPython issue 106883). So this module disables garbage
collection during these calls.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from holdfast.protocol.launcher_messages import COLLECTIVE

if TYPE_CHECKING:
    from types import FrameType


_T = TypeVar("_T")
_COLLECTS_WITHIN = sys.version_info < (3, 12)
# Without this lock, the first thread to finish would enable the collector while others still need it
# disabled.
_one_at_a_time = threading.Lock()
# Not empty while this module, rather than the script, has disabled the collector.
_switched_off: list[bool] = []


def thread_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by thread identifier."""
    return _without_collection(sys._current_frames)


def exceptions() -> dict[int, object]:
    """Return the exception that each thread is handling, by thread identifier; {} before Python 3.10."""
    current: Callable[[], dict[int, object]] | None = getattr(sys, "_current_exceptions", None)
    return _without_collection(current) if current is not None else {}


def _without_collection(ask: Callable[[], dict[int, _T]]) -> dict[int, _T]:
    if not _COLLECTS_WITHIN:
        return ask()
    with _one_at_a_time:
        if not gc.isenabled():
            return ask()
        _switched_off.append(True)
        gc.disable()
        try:
            return ask()
        finally:
            gc.enable()
            _switched_off.clear()


def _forked() -> None:
    """Reset the lock and the collector in a forked child.

    A thread of the parent, which does not exist in the child, may have held the lock or disabled the
    collector.
    """
    global _one_at_a_time
    if _switched_off:
        gc.enable()
        _switched_off.clear()
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_forked)


WORK = "work"
_COLLECTIVE_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")


def whereabouts() -> str:
    """Return "collective" if the main thread is inside one of torch's collectives, otherwise "work".

    A torch function that calls a collective is also reported as "collective". A wait for the result of a
    collective (`work.wait()`) is reported as "work", because no frame of torch is on the stack then. The same
    applies to any other wait.
    """
    ident = threading.main_thread().ident
    frame = thread_frames().get(ident) if ident is not None else None
    while frame is not None:
        file = frame.f_code.co_filename
        if any(sign in file for sign in _COLLECTIVE_FILES):
            return COLLECTIVE
        if "/torch/" not in file:
            return WORK
        frame = frame.f_back
    return WORK


# Modules where a thread waits for its next task.
_WAITING = frozenset({"queue", "concurrent.futures.thread", "concurrent.futures._base", "selectors"})
_AROUND = _WAITING | {"threading"}  # modules whose frames surround a thread's own function


class BackgroundThreads:
    """Warns about a rank's working background threads, whose work a restart or stop would interrupt for good.

    Threads that existed at the first commit are ignored, because they load data or do similar work. So are
    daemon threads, which end whenever a process exits, and threads that only wait for their next
    task.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._first: frozenset[int] | None = None  # the threads at the first commit
        self._count = -1
        self._new = False  # whether threads have been added since then
        self._has_warned = False

    def check(self) -> None:
        """Warn, once, about a thread that is working during a commit.

        This is cheap unless a thread was added.
        """
        count = threading.active_count()
        if self._has_warned or (count == self._count and not self._new):
            return
        self._count = count
        idents = {each.ident for each in threading.enumerate() if not each.daemon and each.ident is not None}
        if self._first is None:
            self._first = frozenset(idents)
        new = idents - self._first
        self._new = bool(new)
        if not new:
            return
        frames = thread_frames()
        for ident in sorted(new & frames.keys()):
            if _is_at_work(frames[ident]):
                self._has_warned = True
                self._say(_warning(frames[ident]))
                return


def _is_at_work(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None and _module(frame) == "threading":
        frame = frame.f_back
    return frame is not None and _module(frame) not in _WAITING


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _warning(innermost: FrameType) -> str:
    """Return the warning about a working thread. It omits the thread's name, which differs between runs."""
    frame: FrameType | None = innermost
    outermost = innermost
    while frame is not None:
        if _module(frame) not in _AROUND:
            outermost = frame
        frame = frame.f_back
    code = outermost.f_code
    where = f"{code.co_name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    return (
        f"{where} runs in a thread during the steps: if its rank is restarted or stopped, unfinished work is "
        "interrupted and not repeated. If it saves something, wait for it within "
        'state.pause("save")'
    )
