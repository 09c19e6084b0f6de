"""Work on files in a thread of its own: storage that does not answer holds up nobody else.

A file system may take seconds for a call, or never return from it (NFS whose server is away). Work is done in
the order in which it was handed over; whoever waits for it waits for a bounded time. The thread is a daemon:
one that hangs does not keep its process alive.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class Unresponsive(OSError):
    """The storage has not answered in time. What was asked of it may still be done."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(errno.ETIMEDOUT, f"the storage has not answered for {limit_s:g} s")


class Superseded(OSError):
    """Newer work of the same kind has taken the place of this, which was never begun."""

    def __init__(self) -> None:
        super().__init__(errno.ECANCELED, "newer work has taken its place")


@dataclass(slots=True)
class _Work:
    future: Future[Any]
    call: Callable[[], Any]
    kind: str


class StorageThread:
    """One thread, started when there is something to do. A forked child has one of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._began_s = 0.0  # the work under way, on CLOCK_MONOTONIC; 0: there is none
        self._pid = 0  # of the process that has the thread

    @property
    def busy_s(self) -> float:
        """For how long the work under way has been so: storage that hangs makes it grow."""
        began_s = self._began_s
        return time.monotonic() - began_s if began_s else 0.0

    @property
    def backlog(self) -> int:
        """How much work waits to be begun."""
        return len(self._waiting)

    def submit(self, call: Callable[[], T], kind: str = "") -> Future[T]:
        """Have `call` done after all that was handed over before.

        Work of the same `kind` that has not begun is dropped, with `Superseded`: the newest counts. Raises
        `OSError` when this process may have no more threads.
        """
        future: Future[T] = Future()
        with self._here():
            if kind:
                dropped = [each for each in self._waiting if each.kind == kind]
                self._waiting = deque(each for each in self._waiting if each.kind != kind)
                for each in dropped:
                    each.future.set_exception(Superseded())
            self._waiting.append(_Work(future, call, kind))
            self._changed.notify_all()
        return future

    def do(self, call: Callable[[], T], limit_s: float) -> T:
        """Return what `call` returns, or raise what it raises.

        Raises:
            Unresponsive: It took longer than `limit_s`; at once if what was asked before already does.
        """
        if self.busy_s > limit_s:
            raise Unresponsive(limit_s)
        future = self.submit(call)
        if not wait([future], limit_s).done:
            raise Unresponsive(limit_s)
        return future.result()

    def _here(self) -> threading.Condition:
        """Return the lock, with a thread that works in this process."""
        if self._pid != os.getpid():
            self._pid, self._began_s = os.getpid(), 0.0
            self._changed, self._waiting = threading.Condition(), deque()
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError as error:  # the limit of processes
                self._pid = 0
                raise OSError(errno.EAGAIN, str(error)) from None
        return self._changed

    def _work(self) -> None:
        while True:
            with self._changed:
                self._began_s = 0.0
                while not self._waiting:
                    self._changed.wait()
                work = self._waiting.popleft()
                self._began_s = time.monotonic()
            if not work.future.set_running_or_notify_cancel():
                continue
            try:
                work.future.set_result(work.call())
            except BaseException as error:  # it belongs to whoever asked
                work.future.set_exception(error)
