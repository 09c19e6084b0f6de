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
from types import FrameType
from typing import TypeVar

_T = TypeVar("_T")
_COLLECTS_WITHIN = sys.version_info < (3, 12)
_one_at_a_time = threading.Lock()  # else the first to be done would switch the collector on for the others
_switched_off: list[bool] = []  # not empty while we, and not the script, have switched the collector off


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identity."""
    return _uncollected(sys._current_frames)


def exceptions() -> dict[int, object]:
    """Return what each thread handles, by its identity, as `sys._current_exceptions` does; {} before 3.10."""
    asked: Callable[[], dict[int, object]] | None = getattr(sys, "_current_exceptions", None)
    return _uncollected(asked) if asked is not None else {}


def _uncollected(ask: Callable[[], dict[int, _T]]) -> dict[int, _T]:
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
