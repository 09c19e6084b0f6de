"""Threads of the script that work beside its steps, as an asynchronous save does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import threadview

if TYPE_CHECKING:
    from types import FrameType

# Where a thread waits for something to do.
_WAITING = frozenset({"queue", "concurrent.futures.thread", "concurrent.futures._base", "selectors"})
_AROUND = _WAITING | {"threading"}  # a thread's own function


class Threads:
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
        frames = threadview.frames()
        for ident in sorted(new & frames.keys()):
            if _is_at_work(frames[ident]):
                self._told = True
                self._say(_named(frames[ident]))
                return


def _is_at_work(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None and _module(frame) == "threading":
        frame = frame.f_back
    return frame is not None and _module(frame) not in _WAITING


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _named(innermost: FrameType) -> str:
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
