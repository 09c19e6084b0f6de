"""What other threads of this process are at: their frames, and the exceptions that they handle.

Before Python 3.12 the interpreter holds the lock of its list of threads while it collects these, and whatever
it allocates may start the garbage collector. A finalizer that needs the same lock then waits for ever, with
the interpreter's lock held: the whole process stands still (CPython issue 106883). So no collection runs
meanwhile.
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
_one_at_a_time = threading.Lock()  # else the first to be done would switch the collector on for the others
_switched_off: list[bool] = []  # not empty while we, and not the script, have switched the collector off


def thread_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identity."""
    return _without_collection(sys._current_frames)


def exceptions() -> dict[int, object]:
    """Return what each thread handles, by its identity, as `sys._current_exceptions` does; {} before 3.10."""
    asked: Callable[[], dict[int, object]] | None = getattr(sys, "_current_exceptions", None)
    return _without_collection(asked) if asked is not None else {}


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
    """A child has none of the threads that held the lock, and the collector as it was within it."""
    global _one_at_a_time
    if _switched_off:
        gc.enable()
        _switched_off.clear()
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_forked)


# Where a rank's main thread is: at work, or waiting for its peers, as another thread sees it.


WORK = "work"
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")


def whereabouts() -> str:
    """Return "collective" when the main thread is inside one of torch's collectives, else "work".

    What calls a collective inside torch counts as well, and waiting for the result of one (`work.wait()`)
    does not: that shows no frame of torch. What a script waits for by other means is work.
    """
    ident = threading.main_thread().ident
    frame = thread_frames().get(ident) if ident is not None else None
    while frame is not None:
        file = frame.f_code.co_filename
        if any(sign in file for sign in _WAITS):
            return COLLECTIVE
        if "/torch/" not in file:
            return WORK
        frame = frame.f_back
    return WORK


# Threads of the script that work beside its steps, as an asynchronous save does.


# Where a thread waits for something to do.
_WAITING = frozenset({"queue", "concurrent.futures.thread", "concurrent.futures._base", "selectors"})
_AROUND = _WAITING | {"threading"}  # a thread's own function


class BackgroundThreads:
    """Those of one rank: a restart or a stop cuts off what they do, and nothing does it again.

    Those that were there at the first commit load data or the like; daemons are cut off by any end. One that
    only waits for something to do loses nothing.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._first: frozenset[int] | None = None  # the threads at the first commit
        self._count = -1
        self._new = False  # there are others since then
        self._told = False

    def look(self) -> None:
        """Warn, once, of a thread that is at work while a step is committed. Cheap while none is added."""
        count = threading.active_count()
        if self._told or (count == self._count and not self._new):
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
                self._told = True
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
    """Return the warning of a thread at work. Without its name, which has numbers that differ."""
    frame: FrameType | None = innermost
    outermost = innermost
    while frame is not None:
        if _module(frame) not in _AROUND:
            outermost = frame
        frame = frame.f_back
    code = outermost.f_code
    where = f"{code.co_name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    return (
        f"{where} runs in a thread beside the steps: what it has not finished when its rank is restarted or "
        "stopped is cut off and not done again. If it saves something, wait for it within "
        'state.pause("save")'
    )
