"""Run asyncio's event loops: measure their lag, end their tasks reliably, and wait for work in threads.

A loop's lag is the time between two polls for events. Measuring it in the selector needs no timer
and catches delays of any length.
"""

from __future__ import annotations

import asyncio
import selectors
import signal
import time
from asyncio import sslproto
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from holdfast.fileio.storage_thread import Unresponsive

RETRY_S = 0.1  # the time between cancellations of a task that ignored the previous one
WINDOW_S = 60  # the period that the reported lag covers
TLS_BUFFER_BYTES = 16 << 10  # the size of a TLS record
PAUSE_S = 0.5
_BINS = 24  # powers of two of a microsecond; the last bin holds everything above 8 s

_R = TypeVar("_R")


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` in order, and wait until they are done. Their exceptions are not raised here.

    Each task is cancelled repeatedly because, before Python 3.12, `asyncio.wait_for` loses a cancellation
    that arrives in the same iteration of the loop as the awaited result. The caller may be cancelled
    repeatedly for the same reason, so its own cancellation is raised only when all tasks are done.
    """
    left = list(tasks)
    cancelled: asyncio.CancelledError | None = None
    while left:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=RETRY_S)
        except asyncio.CancelledError as error:
            cancelled = error
        left = [task for task in left if not task.done()]
    if cancelled is not None:
        raise cancelled


async def until_one_ends(*services: Coroutine[Any, Any, Any]) -> None:
    """Run `services` until one of them returns or raises; then cancel the others in reverse order.

    If a service raised, its exception is raised.
    """
    tasks = [asyncio.create_task(each) for each in services]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(reversed(tasks))
    for task in done:
        task.result()


async def result_of(work: Future[_R], limit_s: float) -> _R:
    """Return the result of `work` in a storage thread, or raise its exception; the event loop keeps running.

    Raises:
        Unresponsive: The storage did not respond within `limit_s`. The work may still complete later.
    """
    loop = asyncio.get_running_loop()
    is_done: asyncio.Future[None] = loop.create_future()  # never fails, so no error is lost

    def note(_: Future[_R]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(is_done.set_result, None)

    work.add_done_callback(note)
    await asyncio.wait({is_done}, timeout=limit_s)
    if not work.done():
        raise Unresponsive(limit_s)
    return work.result()


async def set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until `event` is set, and set it after `timeout_s`. Other tasks run in any case.

    Unlike `asyncio.wait_for(event.wait(), timeout_s)`, this creates no task. That would take longer than most
    of what a periodic loop does at a tick.
    """
    if event.is_set():
        await asyncio.sleep(0)
        return
    timer = asyncio.get_running_loop().call_later(timeout_s, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


def limit_tls_buffers() -> None:
    """Give each TLS connection of this process a buffer of `TLS_BUFFER_BYTES` instead of 256 KiB.

    asyncio allocates the whole buffer for each connection, and again for each read. For 2,000 members,
    buffers of 256 KiB would take 500 MB.
    """
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES  # type: ignore[attr-defined]


class Lag(selectors.DefaultSelector):
    """An event loop's selector that measures the loop's lag."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since_s = 0.0  # when the last poll ended; 0 before the first poll
        self._paused_s = 0.0  # the total of the long times between two polls
        self._seconds: deque[_Second] = deque()
        self._counts = [0] * _BINS  # the sums over `_seconds`

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._since_s:
            self._note(self._clock())
        found = super().select(timeout)
        self._since_s = self._clock()
        return found

    def over_last_minute(self) -> tuple[float, float]:
        """Return the maximum and the 99th percentile of the time between two polls, in seconds."""
        self._forget_before(int(self._clock()) - WINDOW_S + 1)
        counts = self._counts
        left = sum(counts) // 100
        p99_s = 0.0
        for n in reversed(range(_BINS)):
            if counts[n] > left:
                p99_s = 2**n / 1e6
                break
            left -= counts[n]
        most_s = max((each.most_s for each in self._seconds), default=0.0)
        return most_s, min(p99_s, most_s)

    def paused_s(self) -> float:
        """Return for how long the loop has read no events, in all pauses of more than `PAUSE_S` so far.

        In a pause, this process was stopped or busy, so it has not read what others sent in that time.
        """
        took_s = self._clock() - self._since_s if self._since_s else 0.0
        return self._paused_s + (took_s if took_s > PAUSE_S else 0.0)

    def _note(self, now_s: float) -> None:
        took_s = now_s - self._since_s
        if took_s > PAUSE_S:
            self._paused_s += took_s
        at_s = int(now_s)
        if not self._seconds or self._seconds[-1].at_s != at_s:
            self._forget_before(at_s - WINDOW_S)
            self._seconds.append(_Second(at_s))
        self._counts[self._seconds[-1].add(took_s)] += 1

    def _forget_before(self, at_s: int) -> None:
        while self._seconds and self._seconds[0].at_s < at_s:
            for n, count in enumerate(self._seconds.popleft().counts):
                self._counts[n] -= count


class _Second:
    __slots__ = ("at_s", "counts", "most_s")

    def __init__(self, at_s: int) -> None:
        self.at_s = at_s
        self.most_s = 0.0
        self.counts = [0] * _BINS

    def add(self, took_s: float) -> int:
        """Count a time between two polls, and return its bin."""
        n = min(int(took_s * 1e6).bit_length(), _BINS - 1)
        self.counts[n] += 1
        if took_s > self.most_s:
            self.most_s = took_s
        return n


def run(main: Callable[[Lag], Coroutine[Any, Any, _R]]) -> _R:
    """Run `main` like `asyncio.run`, on a loop that measures its lag. The `Lag` is passed to `main`.

    Unlike `asyncio.run`, this does not wait for work that `main` left in a thread, because work on a hung
    file system may never finish.
    """
    lag = Lag()
    loop = asyncio.SelectorEventLoop(lag)
    beside = ThreadPoolExecutor(thread_name_prefix="beside")
    loop.set_default_executor(beside)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main(lag))
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            beside.shutdown(wait=False, cancel_futures=True)
            asyncio.set_event_loop(None)
            signal.set_wakeup_fd(-1)  # the loop closes the socket that Python writes to when a signal arrives
            loop.close()
