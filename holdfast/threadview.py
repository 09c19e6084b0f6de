"""What other threads of this process are at: their frames, and the exceptions that they handle.

Before Python 3.12 the interpreter holds the lock of its list of threads while it collects these, and whatever
it allocates may start the garbage collector. A finalizer that needs the same lock then waits for ever, with
the interpreter's lock held: the whole process stands still (CPython issue 106883). So no collection runs
meanwhile.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

_T = TypeVar("_T")
_COLLECTS_WITHIN = sys.version_info < (3, 12)


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identity."""
    return _uncollected(sys._current_frames)


def exceptions() -> dict[int, object]:
    """Return what each thread handles, by its identity, as `sys._current_exceptions` does; {} before 3.10."""
    asked: Callable[[], dict[int, object]] | None = getattr(sys, "_current_exceptions", None)
    return _uncollected(asked) if asked is not None else {}


def _uncollected(ask: Callable[[], dict[int, _T]]) -> dict[int, _T]:
    if not (_COLLECTS_WITHIN and gc.isenabled()):
        return ask()
    gc.disable()
    try:
        return ask()
    finally:
        gc.enable()
