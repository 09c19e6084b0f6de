"""Sensor calls that do not return, and those that are only slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nodeagent.agent.inbox import Inbox
from nodeagent.agent.sensor_threads import SensorThread, stuck_calls
from nodeagent.model import Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.progress import CallProgress

PATIENCE_S = 10.0
LONG_S = 90.0


class Blocking:
    """A sensor whose `read` blocks until it is released."""

    name, period_s = "blocking", 1.0

    def __init__(self) -> None:
        self.reading, self.release = threading.Event(), threading.Event()

    def open(self) -> None: ...

    def close(self) -> None: ...

    def read(self) -> Iterable[Observation]:
        self.reading.set()
        self.release.wait(PATIENCE_S)
        return ()


class Marking(Blocking):
    name = "marking"

    def __init__(self) -> None:
        super().__init__()
        self.progress = CallProgress()


@contextmanager
def in_a_long_call(sensor: Blocking) -> Iterator[SensorThread]:
    """Return the thread of a sensor whose current call began long ago."""
    watched = SensorThread(sensor, Inbox(shipped()), lambda: 0.0)
    watched.start()
    assert sensor.reading.wait(PATIENCE_S)
    watched._began = time.monotonic() - LONG_S
    try:
        yield watched
    finally:
        watched.stop()
        sensor.release.set()
        assert watched.join(PATIENCE_S)


def test_a_call_that_does_not_return_is_reported_with_its_duration() -> None:
    reported: set[str] = set()
    with in_a_long_call(Blocking()) as watched:
        (seen,) = stuck_calls([watched], reported, 5.0)
        assert (seen.check, seen.entity, seen.text) == ("sensor_stuck", "sensor/blocking", "")
        assert seen.value >= LONG_S
        assert reported == {"blocking"}


def test_a_slow_sweep_that_progresses_is_not_stuck() -> None:
    sensor = Marking()
    with in_a_long_call(sensor) as watched:
        sensor.progress.mark("nvmlDeviceGetTotalEccErrors", "0000:3b:00.0")
        assert list(stuck_calls([watched], set(), 5.0)) == []
        assert watched.status().call_s >= LONG_S  # the report shows that the sweep is slow


def test_a_driver_call_that_does_not_return_is_named() -> None:
    sensor, reported = Marking(), set[str]()
    with in_a_long_call(sensor) as watched:
        since = time.monotonic() - LONG_S / 2
        sensor.progress.marked = ("nvmlDeviceGetTotalEccErrors", "0000:3b:00.0", since)
        (seen,) = stuck_calls([watched], reported, 5.0)
        assert seen.text == "in nvmlDeviceGetTotalEccErrors of 0000:3b:00.0"
        assert LONG_S / 2 <= seen.value < LONG_S
        sensor.progress.mark("nvmlDeviceGetTotalEccErrors", "0000:4b:00.0")
        (seen,) = stuck_calls([watched], reported, 6.0)
        assert (seen.value, seen.text) == (0.0, "")


def test_a_mark_of_an_earlier_call_says_nothing_about_this_one() -> None:
    sensor = Marking()
    sensor.progress.marked = ("nvmlShutdown", "", time.monotonic() - 2 * LONG_S)
    with in_a_long_call(sensor) as watched:
        (seen,) = stuck_calls([watched], set(), 5.0)
        assert (seen.value >= LONG_S, seen.text) == (True, "")
