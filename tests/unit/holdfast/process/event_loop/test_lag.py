"""An event loop measures its lag, and ends its remaining tasks."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time

import pytest

from holdfast.process import event_loop


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def looked(measured: event_loop.Lag, clock: Clock, *busy_s: float) -> None:
    measured.select(0)
    for each in busy_s:
        clock.now_s += each
        measured.select(0)


def test_the_longest_lag_and_a_high_percentile_are_reported() -> None:
    clock = Clock()
    with event_loop.Lag(clock) as measured:
        looked(measured, clock, *[0.001] * 500, 0.3, *[0.001] * 500)
        most_s, p99_s = measured.over_last_minute()
    assert round(most_s, 6) == 0.3
    assert 0.001 <= p99_s <= 0.002


def test_pauses_add_up_and_the_present_one_counts_before_the_next_poll() -> None:
    clock = Clock()
    with event_loop.Lag(clock) as measured:
        assert measured.paused_s() == 0.0
        looked(measured, clock, 0.3, 5.0, *[0.001] * 500, 2.0)
        assert round(measured.paused_s(), 6) == 7.0
        clock.now_s += 0.4
        assert round(measured.paused_s(), 6) == 7.0
        clock.now_s += 0.6
        assert round(measured.paused_s(), 6) == 8.0
        looked(measured, clock)
        assert round(measured.paused_s(), 6) == 8.0


def test_measurements_older_than_a_minute_are_forgotten() -> None:
    clock = Clock()
    with event_loop.Lag(clock) as measured:
        looked(measured, clock, 0.3)
        clock.now_s += 61
        measured._since_s = clock.now_s
        looked(measured, clock, 0.001)
        assert round(measured.over_last_minute()[0], 6) == 0.001


def test_without_measurements_there_is_no_lag() -> None:
    with event_loop.Lag() as measured:
        assert measured.over_last_minute() == (0.0, 0.0)


def test_a_loop_measures_its_lag_and_ends_the_remaining_tasks() -> None:
    ended = []

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main(measured: event_loop.Lag) -> float:
        task = asyncio.create_task(for_ever())
        await asyncio.sleep(0)
        began = time.monotonic()
        while time.monotonic() - began < 0.02:
            pass
        await asyncio.sleep(0)
        assert not task.done()
        return measured.over_last_minute()[0]

    assert event_loop.run(main) >= 0.02
    assert ended == [True]


def test_work_in_a_thread_that_never_ends_does_not_keep_the_loop_from_ending() -> None:
    """A checkpoint is read in such a thread, and its storage may hang."""
    over = threading.Event()

    async def main(_: event_loop.Lag) -> str:
        began = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hang() -> None:
            loop.call_soon_threadsafe(began.set)
            over.wait(60)

        task = asyncio.ensure_future(loop.run_in_executor(None, hang))
        await began.wait()
        assert not task.done()
        return "done"

    try:
        assert event_loop.run(main) == "done"
        assert not over.is_set()
    finally:
        over.set()


def test_a_signal_while_the_loop_is_closed_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its parent ends, a part gets a signal even if it is already ending by itself."""
    told: list[object] = []
    closes = asyncio.SelectorEventLoop._close_self_pipe  # type: ignore[attr-defined]

    def close(loop: asyncio.SelectorEventLoop) -> None:
        closes(loop)
        signal.raise_signal(signal.SIGTERM)

    async def main(_: event_loop.Lag) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "_close_self_pipe", close)
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    event_loop.run(main)
    assert told == []
