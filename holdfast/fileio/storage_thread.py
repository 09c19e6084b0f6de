"""Access files in a separate thread, to keep unresponsive storage from blocking others.

A call to a file system may take seconds or never return, for example on NFS with an unreachable server. The
thread makes the calls in the order of submission, and callers wait only for a limited time. As a daemon
thread, it does not keep the process alive when it hangs.
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

IDLE_S = 60.0  # the thread ends after this long without work

T = TypeVar("T")


class Unresponsive(OSError):
    """The storage has not responded in time. The work may still complete later."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(errno.ETIMEDOUT, f"the storage has not responded for {limit_s:g} s")


class Superseded(OSError):
    """Newer work of the same kind has replaced this work before it began."""

    def __init__(self) -> None:
        super().__init__(errno.ECANCELED, "newer work has replaced it")


@dataclass(slots=True)
class _Work:
    future: Future[Any]
    call: Callable[[], Any]
    kind: str


class StorageThread:
    """A thread that starts when there is work and ends after `IDLE_S` without work.

    A forked child starts its own thread. The thread does not run all the time, because a supervisor of many
    jobs has one of these objects per job, most of them idle.
    """

    def __init__(self, name: str, idle_s: float = IDLE_S) -> None:
        self._name, self._idle_s = name, idle_s
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._began_s = 0.0  # when the current work began, on CLOCK_MONOTONIC; 0 if there is none
        self._pid = os.getpid()  # the process that uses this object
        self._runs = False  # whether the thread is running

    @property
    def busy_s(self) -> float:
        """The time since the current work began, which keeps growing while storage hangs."""
        began_s = self._began_s
        return time.monotonic() - began_s if began_s else 0.0

    @property
    def backlog(self) -> int:
        """The number of submitted calls that have not begun."""
        return len(self._waiting)

    def submit(self, call: Callable[[], T], kind: str = "") -> Future[T]:
        """Run `call` in the thread after all work submitted earlier.

        Earlier work of the same `kind` that has not begun is dropped and fails with `Superseded`, because
        only the newest is needed. Raises `OSError` if this process cannot start another thread.
        """
        future: Future[T] = Future()
        with self._here():
            if not self._runs:
                self._start()
            if kind:
                dropped = [each for each in self._waiting if each.kind == kind]
                self._waiting = deque(each for each in self._waiting if each.kind != kind)
                for each in dropped:
                    each.future.set_exception(Superseded())
            self._waiting.append(_Work(future, call, kind))
            self._changed.notify_all()
        return future

    def do(self, call: Callable[[], T], limit_s: float) -> T:
        """Return the result of `call`, or raise its exception.

        Raises:
            Unresponsive: The call took longer than `limit_s`. This is raised immediately if earlier work has
            already taken longer.
        """
        if self.busy_s > limit_s:
            raise Unresponsive(limit_s)
        future = self.submit(call)
        if not wait([future], limit_s).done:
            raise Unresponsive(limit_s)
        return future.result()

    def _here(self) -> threading.Condition:
        """Return this process's own lock, because the parent may have held its own during the fork."""
        if self._pid != os.getpid():
            self._pid, self._began_s, self._runs = os.getpid(), 0.0, False
            self._changed, self._waiting = threading.Condition(), deque()
        return self._changed

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError as error:  # the limit on processes was reached
            raise OSError(errno.EAGAIN, str(error)) from None
        self._runs = True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._began_s = 0.0
                while not self._waiting:
                    if not self._changed.wait(self._idle_s) and not self._waiting:
                        self._runs = False
                        return
                work = self._waiting.popleft()
                self._began_s = time.monotonic()
            if not work.future.set_running_or_notify_cancel():
                continue
            try:
                work.future.set_result(work.call())
            except BaseException as error:  # re-raised in the caller
                work.future.set_exception(error)
