"""Bounds the calls to file systems, so that one that does not answer delays only its own readings.

Nothing can end a call to a file system whose disk or server does not answer. Such a call therefore keeps its
thread until it returns, and its file system is not called again before that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
# A file system answers from memory, within microseconds. A read takes at most twice this time, so the
# watchdog, which reports a sensor's calls of 5 s, does not report it.
ANSWER_S = 1.0
MAX_HUNG = 128  # threads in calls that do not return


class _Caller(Generic[T]):
    """A thread that makes calls one after the other."""

    def __init__(self, calls: Mapping[str, Callable[[], T]]) -> None:
        """Start the thread. Raises RuntimeError if the kernel allows no further thread."""
        self.ended = threading.Event()
        self.results: dict[str, T] = {}
        self.current: tuple[str, float] = ("", time.monotonic())  # the call, and when it began
        self._left = dict(calls)
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="file-systems", daemon=True).start()

    def _run(self) -> None:
        try:
            while (call := self._next()) is not None:
                self.results[self.current[0]] = call()
        finally:
            self.ended.set()

    def _next(self) -> Callable[[], T] | None:
        with self._lock:
            if not self._left:
                return None
            key = next(iter(self._left))
            self.current = key, time.monotonic()
            return self._left.pop(key)

    def take_rest(self) -> dict[str, Callable[[], T]]:
        """Return the calls that have not begun; the thread ends after its current call."""
        with self._lock:
            rest, self._left = self._left, {}
            return rest


class BoundedCalls(Generic[T]):
    """Makes calls that may never return. Not for use by several threads."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._hung: dict[str, _Caller[T]] = {}

    def run(self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Return the results of the calls that return in time, which takes at most twice `answer_s`.

        A call that has not returned since an earlier `run` is not made again. The calls must not raise.
        """
        self._hung = {key: each for key, each in self._hung.items() if not each.ended.is_set()}
        asked = {key: call for key, call in calls.items() if key not in self._hung}
        if not asked or len(self._hung) >= MAX_HUNG:
            return {}
        try:
            first = _Caller(asked)
        except RuntimeError:  # there may be too many processes, which the same sensor has to report
            return {key: call() for key, call in asked.items()}
        callers = [first]
        if not first.ended.wait(self._answer_s):
            callers += self._each_alone(first.take_rest())
            until = time.monotonic() + self._answer_s
            for each in callers:
                each.ended.wait(max(0.0, until - time.monotonic()))
        self._hung |= {each.current[0]: each for each in callers if not each.ended.is_set()}
        return {key: result for each in callers for key, result in tuple(each.results.items())}

    def _each_alone(self, calls: Mapping[str, Callable[[], T]]) -> list[_Caller[T]]:
        """Make each call in its own thread, because one call before them may never return."""
        started: list[_Caller[T]] = []
        for key, call in calls.items():
            if len(self._hung) + len(started) >= MAX_HUNG:
                break
            try:
                started.append(_Caller({key: call}))
            except RuntimeError:  # the next `run` makes the other calls
                break
        return started

    def hung_s(self, key: str) -> float | None:
        """Return for how long a call has not returned; None if that is not so."""
        caller = self._hung.get(key)
        return None if caller is None or caller.ended.is_set() else time.monotonic() - caller.current[1]
