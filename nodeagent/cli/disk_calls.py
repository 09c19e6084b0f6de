"""Bounds the wait for a disk that may hang. The call runs in its own thread, because nothing can end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswer(Exception):
    """Raised if the disk has not answered in time; the call continues in its thread."""


class DiskCall(Generic[T]):
    """A call that has been started; `ended` is set when the call has returned or failed."""

    def __init__(self, run: Callable[[], T]) -> None:
        self.ended = threading.Event()
        self._run = run
        self._result: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._end, name="disk-call", daemon=True).start()

    def _end(self) -> None:
        try:
            self._result.append(self._run())
        except Exception as error:  # `result` raises it in the caller's thread
            self._error = error
        finally:
            self.ended.set()

    def result(self, within_s: float) -> T:
        """Return the call's result or raise its error; raise NoAnswer if it takes longer than `within_s`."""
        if not self.ended.wait(within_s):
            raise NoAnswer
        if self._error is not None:
            raise self._error
        return self._result[0]
