"""Detect an exception that will end the script while the script's `finally` blocks are still running.

Python reports an uncaught exception only after running every `finally` and `__exit__` on the way, such as a
tracker's upload or the destruction of a process group. Until then, the peers would wait. A thread therefore
checks periodically which exception, if any, the main thread is handling.

The source shows whether the exception may be caught. The exception is assumed to end the script if the main
thread is in a `finally` block or in the exit of a `with` statement, and no frame is in the body of a block
that may catch the exception. Without the source, the exception is assumed to be caught. A report is only a
hint, and is withdrawn if the main thread continues.
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

from holdfast.inspection import tracebacks
from holdfast.worker import script_source, thread_frames

# The time between two checks, and the time until a new exception is checked again. An exception that ends the
# script within their sum needs no hint. Each check wakes a thread, so there are few of them. The second check
# comes sooner, because most exceptions are handled within microseconds.
TICK_S, AGAIN_S = 0.4, 0.1
LIMIT_S = 30.0  # the time limit for the `finally` blocks of a script that an exception ends
_RUNS_SCRIPT = "_run_main"  # the function in holdfast.worker.script whose callers are Holdfast's frames
_START_DIRECTORY = script_source.working_directory()  # what the script's relative file names are relative to
# Exceptions that are always caught by code that closes or runs generators.
_FLOW = (GeneratorExit, StopIteration, StopAsyncIteration)
_HARMLESS = frozenset({"open", "torch.no_grad", "torch.enable_grad", "torch.inference_mode"})
_HARMLESS_METHODS = frozenset({"pause", "no_sync"})
_TRIES: tuple[type[ast.AST], ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))
_LEAVES = (ast.Return, ast.Break, ast.Continue)


@dataclass(frozen=True, slots=True)
class UnwindingException:
    """An exception that is leaving the script. `text` is the traceback that will be printed."""

    error: BaseException
    text: str


def find_unwinding(ident: int | None = None) -> UnwindingException | None:
    """Return the exception that is ending the script in the thread `ident` (default: the main thread).

    Returns None if the thread handles no exception, or if the exception may be caught.
    """
    ident = threading.main_thread().ident if ident is None else ident
    if ident is None:
        return None
    error = _handled(ident)
    if error is None:  # nearly always, so the frames are not collected
        return None
    frame, trace = thread_frames.thread_frames().get(ident), error.__traceback__
    if trace is None or isinstance(error, _FLOW):
        return None
    while frame is not None and frame is not trace.tb_frame:
        frame = frame.f_back
    if frame is None or not _is_passing(frame.f_code.co_filename, trace.tb_lineno, frame.f_lineno):
        return None
    outer = list(_outer(frame))
    if any(_may_catch(each.f_code.co_filename, each.f_lineno) for each in (frame, *outer)):
        return None
    return UnwindingException(error, _text(error, trace, outer))


def _handled(ident: int) -> BaseException | None:
    """Return the exception that a thread is handling in an `except`, a `finally` or an `__exit__`."""
    found = thread_frames.exceptions().get(ident)
    if isinstance(found, tuple):  # before Python 3.12
        found = found[1]
    return found if isinstance(found, BaseException) else None


def _outer(frame: FrameType) -> Iterator[FrameType]:
    """Yield the callers of `frame` within the script, innermost first."""
    at = frame.f_back
    while at is not None and at.f_code.co_name != _RUNS_SCRIPT:
        yield at
        at = at.f_back


def _text(error: BaseException, trace: TracebackType, outer: list[FrameType]) -> str:
    before = [traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in outer]
    lines = [f"{tracebacks.HEADER}\n", *traceback.format_list(before[::-1])]
    lines += traceback.format_tb(trace)
    return "".join(lines + traceback.format_exception_only(type(error), error))


def _is_passing(file: str, raised: int, now: int) -> bool:
    """Return True if line `now` belongs to the cleanup that an exception from line `raised` triggers.

    The cleanup consists of `finally` blocks and the exits of `with` statements.
    """
    for node in _blocks(file) or ():
        if isinstance(node, ast.Try):
            begun: list[ast.stmt | ast.ExceptHandler] = [*node.body, *node.handlers, *node.orelse]
            if _holds(node.finalbody, now) and _holds(begun, raised):
                return not _leaves(node)
        elif _holds(node.body, raised) and node.lineno <= now < node.body[0].lineno:
            return not _suppresses(node)
    return False


def _may_catch(file: str, line: int) -> bool:
    """Return True if a block around line `line` may catch exceptions, or if the source is not available."""
    if file == "<frozen runpy>":
        return False
    blocks = _blocks(file)
    if blocks is None:
        return True
    for node in blocks:
        if isinstance(node, ast.Try):
            begun: list[ast.stmt | ast.ExceptHandler] = [*node.body, *node.handlers, *node.orelse]
            if (node.handlers and _holds(node.body, line)) or (_leaves(node) and _holds(begun, line)):
                return True
        elif _holds(node.body, line) and _suppresses(node):
            return True
    return False


def _holds(body: Sequence[ast.stmt | ast.ExceptHandler], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or body[-1].lineno)


def _leaves(node: ast.Try) -> bool:
    """Return True if the `finally` may discard the exception through a return, a break or a continue."""
    return any(isinstance(each, _LEAVES) for part in node.finalbody for each in ast.walk(part))


def _suppresses(node: ast.With | ast.AsyncWith) -> bool:
    """Return False only if all context managers of a `with` are known not to suppress exceptions."""
    return not all(_is_harmless(item.context_expr) for item in node.items)


def _is_harmless(made: ast.expr) -> bool:
    if not isinstance(made, ast.Call):
        return False
    called = made.func
    return ast.unparse(called) in _HARMLESS or (
        isinstance(called, ast.Attribute) and called.attr in _HARMLESS_METHODS
    )


def _blocks(file: str) -> tuple[ast.Try | ast.With | ast.AsyncWith, ...] | None:
    """Return the `try` and `with` statements of a file, inner ones last; None if its source is missing."""
    if not Path(file).is_absolute() and (
        not _START_DIRECTORY or script_source.working_directory() != _START_DIRECTORY
    ):
        return None
    return _parsed(file)


@lru_cache(maxsize=64)
def _parsed(file: str) -> tuple[ast.Try | ast.With | ast.AsyncWith, ...] | None:
    try:
        tree = ast.parse(script_source.text_of(file))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    found: list[ast.Try | ast.With | ast.AsyncWith] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            found.append(node)
        elif isinstance(node, _TRIES):
            found.append(_as_try(node))
    return tuple(found)


def _as_try(node: ast.AST) -> ast.Try:
    """Convert a `try` with `except*` to an `ast.Try`, which has the same fields."""
    if isinstance(node, ast.Try):
        return node
    return ast.Try(**dict(ast.iter_fields(node)))


class ExceptionWatcher:
    """Checks the main thread every `tick_s`, and reports an exception that is ending the script.

    An exception is reported when a second check finds it `AGAIN_S` later, because most exceptions are handled
    by then. It is reported again if it is still being handled after `LIMIT_S`. The report is withdrawn if the
    main thread no longer handles the exception or has made progress.
    """

    def __init__(
        self,
        report: Callable[[UnwindingException, int, bool], None],
        withdraw: Callable[[], None],
        progress: Callable[[], object] = lambda: None,
        tick_s: float = TICK_S,
    ) -> None:
        """Set up the watcher; `start` starts it.

        Args:
            report: Called with the exception, the time when it was first seen (CLOCK_MONOTONIC, in ns), and
                whether `LIMIT_S` has passed.
            withdraw: Called when a reported exception no longer ends the script.
            progress: Returns a value that changes whenever the script has made progress.
            tick_s: Seconds between two checks.
        """
        self._report, self._withdraw, self._progress = report, withdraw, progress
        self._tick_s = tick_s
        self._seen: BaseException | None = None
        self._at: object = None
        self._since_ns = 0
        self._is_reported = self._is_over = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="holdfast-lookout", daemon=True).start()

    def _run(self) -> None:
        # The search for deadlocks knows the wait for a lock. After `time.sleep`, it would count the thread as
        # running. An `Event` waits for such a lock too, but takes as long again to create it.
        never_released = threading.Lock()
        never_released.acquire()
        while True:
            self.sample(time.monotonic_ns())
            is_new = self._seen is not None and not self._is_reported
            never_released.acquire(timeout=min(AGAIN_S, self._tick_s) if is_new else self._tick_s)

    def sample(self, now_ns: int) -> None:
        """Check the main thread once, and report or withdraw an exception."""
        try:
            found = find_unwinding()
        except Exception:  # frames and sources may contain anything, and missing an exception does no harm
            found = None
        at = self._progress() if found is not None else None
        if found is None or found.error is not self._seen or at != self._at:
            if self._is_reported:
                self._withdraw()
            self._seen = found.error if found is not None else None
            self._at, self._since_ns = at, now_ns
            self._is_reported = self._is_over = False
        elif not self._is_reported:
            self._is_reported = True
            self._report(found, self._since_ns, False)
        elif not self._is_over and now_ns - self._since_ns >= LIMIT_S * 1e9:
            self._is_over = True
            self._report(found, self._since_ns, True)
