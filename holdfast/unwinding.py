"""An exception that a script is going to end with, seen while its `finally` blocks still run.

Python tells of an exception only when nothing caught it, which is after every `finally` and `__exit__` on
its way out: a tracker that uploads, a group that is torn down. Meanwhile the peers wait. So a thread looks
now and then at the exception that the main thread is handling, if any. Whether anything is going to catch
it, the source says: it is on its way out if where it is now is a `finally` block or the end of a `with`,
and no frame is in the body of a `try` that has an `except`.
"""

from __future__ import annotations

import ast
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType

from holdfast import threadview

TICK_S = 0.25  # an exception that is out sooner needs no word before
_END = "_run_main"  # of holdfast.ending: what is further out is ours


@dataclass(frozen=True, slots=True)
class Unwinding:
    """An exception on its way out. `text` is the traceback as it will be printed."""

    error: BaseException
    text: str


def unwinding(ident: int | None = None) -> Unwinding | None:
    """Return the exception that ends the script of thread `ident` (the main one), None if it is not sure."""
    ident = threading.main_thread().ident if ident is None else ident
    if ident is None:
        return None
    error = _handled(ident)
    frame = threadview.frames().get(ident)
    trace = error.__traceback__ if error is not None else None
    if error is None or trace is None:
        return None
    while frame is not None and frame is not trace.tb_frame:
        frame = frame.f_back
    if frame is None or not _is_passing(frame.f_code.co_filename, trace.tb_lineno, frame.f_lineno):
        return None
    outer = list(_outer(frame))
    if any(_may_catch(each.f_code.co_filename, each.f_lineno) for each in (frame, *outer)):
        return None
    return Unwinding(error, _text(error, trace, outer))


def _handled(ident: int) -> BaseException | None:
    """Return the exception that a thread handles: in an `except` or `finally`, or within an `__exit__`."""
    found = threadview.exceptions().get(ident)
    if isinstance(found, tuple):  # before Python 3.12
        found = found[1]
    return found if isinstance(found, BaseException) else None


def _outer(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames further out than `frame`, of the script."""
    at = frame.f_back
    while at is not None and at.f_code.co_name != _END:
        yield at
        at = at.f_back


def _text(error: BaseException, trace: TracebackType, outer: list[FrameType]) -> str:
    before = [traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in outer]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(before[::-1])]
    lines += traceback.format_tb(trace)
    return "".join(lines + traceback.format_exception_only(type(error), error))


# -- what the source says


def _is_passing(file: str, raised: int, now: int) -> bool:
    """True when an exception of line `raised` passes through line `now`: a `finally`, or a `with`'s end."""
    for node in _blocks(file):
        if isinstance(node, ast.Try):
            begun: list[ast.stmt | ast.ExceptHandler] = [*node.body, *node.handlers, *node.orelse]
            if _holds(node.finalbody, now) and _holds(begun, raised):
                return True
        elif _holds(node.body, raised) and node.lineno <= now < node.body[0].lineno:
            return not _suppresses(node)
    return False


def _may_catch(file: str, line: int) -> bool:
    """True when line `line` is in the body of a `try` with an `except`, or of a `with` that suppresses."""
    for node in _blocks(file):
        if _holds(node.body, line) and (
            (isinstance(node, ast.Try) and node.handlers)
            or (not isinstance(node, ast.Try) and _suppresses(node))
        ):
            return True
    return False


def _holds(body: Sequence[ast.stmt | ast.ExceptHandler], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or body[-1].lineno)


def _suppresses(node: ast.With | ast.AsyncWith) -> bool:
    return any("suppress" in ast.unparse(item.context_expr) for item in node.items)


@lru_cache(maxsize=64)
def _blocks(file: str) -> tuple[ast.Try | ast.With | ast.AsyncWith, ...]:
    """Return all `try` and `with` of a file, inner ones last; none where there is no source."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.Try, ast.With, ast.AsyncWith))]
    return tuple(found)


class Lookout:
    """Looks at the main thread every `TICK_S`, and tells once of an exception that is on its way out."""

    def __init__(self, tell: Callable[[Unwinding, int], None], tick_s: float = TICK_S) -> None:
        """`tell` gets what was found, and when it was first seen (CLOCK_MONOTONIC)."""
        self._tell = tell
        self._tick_s = tick_s
        self._seen: BaseException | None = None
        self._since_ns = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="holdfast-lookout", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while not self.look(time.monotonic_ns()):
            pause.wait(self._tick_s)

    def look(self, now_ns: int) -> bool:
        """Look once. Return True when it was told: seen twice, for most are over before."""
        try:
            found = unwinding()
        except Exception:  # whatever a frame or a source is: not to be seen is no harm
            found = None
        if found is None:
            self._seen = None
            return False
        if found.error is not self._seen:
            self._seen, self._since_ns = found.error, now_ns
            return False
        self._tell(found, self._since_ns)
        return True
