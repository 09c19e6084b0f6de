"""Sensors in their threads: calls that do not return or are only slow, and releases of the GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from nodeagent.agent import sensor_threads
from nodeagent.agent.inbox import Inbox
from nodeagent.agent.sensor_threads import (
    NOT_YET,
    FittedSensor,
    SensorStatus,
    SensorThread,
    stuck_calls,
    xids_are_unseen,
)
from nodeagent.model import Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.progress import CallProgress

PATIENCE_S = 20.0
LONG_S = 90.0
SEES = SensorStatus("kmsg", True, "", 1, 1, 0.0, False)
BLIND = SensorStatus("nvml-events", False, "no right", 1, 0, 0.0, False)


class Counting:
    """A sensor that announces each of its calls."""

    name, period_s = "counting", 3600.0

    def __init__(self, baseline: str) -> None:
        self.baseline = baseline
        self.opened, self.closed = threading.Semaphore(0), threading.Semaphore(0)

    def open(self) -> None:
        self.opened.release()

    def close(self) -> None:
        self.closed.release()

    def read(self) -> Iterable[Observation]:
        return []


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
    watched = SensorThread(FittedSensor(sensor), Inbox(shipped()), lambda: 0.0)
    watched.start()
    assert sensor.reading.wait(PATIENCE_S)
    watched._began = time.monotonic() - LONG_S
    try:
        yield watched
    finally:
        watched.stop()
        sensor.release.set()
        assert watched.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensor_threads, "WAIT_S", 0.05)


def test_a_sensor_is_closed_while_the_gpus_are_released_and_opened_again_after_that() -> None:
    sensor, released = Counting("old"), threading.Event()
    watched = SensorThread(
        FittedSensor(sensor, releases=True), Inbox(shipped()), lambda: 1.0, lambda: released.is_set()
    )
    watched.start()
    assert sensor.opened.acquire(timeout=PATIENCE_S)
    released.set()
    watched.nudge()
    assert sensor.closed.acquire(timeout=PATIENCE_S)
    released.clear()
    assert sensor.opened.acquire(timeout=PATIENCE_S)
    watched.stop()
    assert watched.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((), False),
        ((SEES, BLIND), False),
        ((BLIND,), True),
        ((BLIND, SensorStatus("kmsg", False, NOT_YET, 0, 0, 0.0, False)), None),
        ((SensorStatus("nvml-events", False, "closed", 1, 0, 0.0, False, released=True),), None),
        ((SensorStatus("nvml-events", False, "no GPU", 1, 0, 0.0, False, nothing_there=True),), False),
    ],
)
def test_xids_are_unseen_if_every_sensor_of_them_is_blind(
    statuses: tuple[SensorStatus, ...], expected: bool | None
) -> None:
    assert xids_are_unseen(statuses) is expected


def test_a_disk_that_hangs_while_requests_are_read_is_no_hung_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = SensorStatus("operator", False, "", 1, 0, 99.0, True, step_s=99.0)
    monkeypatch.setattr(SensorThread, "status", lambda _: stuck)
    for reads_state, check in ((True, "memory_lost"), (False, "sensor_stuck")):
        watched = SensorThread(
            FittedSensor(Counting(""), reads_state=reads_state), Inbox(shipped()), lambda: 1.0
        )
        [found] = stuck_calls([watched], [watched.status()], set(), 1.0)
        assert (found.check, found.entity) == (check, "sensor/operator")


def test_a_call_that_does_not_return_is_reported_with_its_duration() -> None:
    reported: set[str] = set()
    with in_a_long_call(Blocking()) as watched:
        (seen,) = stuck_calls([watched], [watched.status()], reported, 5.0)
        assert (seen.check, seen.entity, seen.text) == ("sensor_stuck", "sensor/blocking", "")
        assert seen.value >= LONG_S
        assert reported == {"blocking"}


def test_a_sensor_sees_nothing_while_its_call_does_not_return() -> None:
    sensor = Blocking()
    sensor.release.set()
    watched = SensorThread(FittedSensor(sensor), Inbox(shipped()), lambda: 0.0)
    watched._sees, watched._why, watched._began = True, "", time.monotonic() - LONG_S
    assert (watched.status().sees, watched.status().why) == (False, "a call has not returned")
    watched._began = 0.0
    assert watched.status().sees
    watched._sees, watched._nothing_there, watched._began = False, True, time.monotonic() - LONG_S
    assert not watched.status().nothing_there


def test_a_slow_sweep_that_progresses_is_not_stuck() -> None:
    sensor = Marking()
    with in_a_long_call(sensor) as watched:
        sensor.progress.mark("nvmlDeviceGetTotalEccErrors", "0000:3b:00.0")
        assert list(stuck_calls([watched], [watched.status()], set(), 5.0)) == []
        assert watched.status().call_s >= LONG_S  # the report shows that the sweep is slow


def test_a_driver_call_that_does_not_return_is_named() -> None:
    sensor, reported = Marking(), set[str]()
    with in_a_long_call(sensor) as watched:
        since = time.monotonic() - LONG_S / 2
        sensor.progress.marked = ("nvmlDeviceGetTotalEccErrors", "0000:3b:00.0", since)
        (seen,) = stuck_calls([watched], [watched.status()], reported, 5.0)
        assert seen.text == "in nvmlDeviceGetTotalEccErrors of 0000:3b:00.0"
        assert watched.status().why == "a call has not returned: nvmlDeviceGetTotalEccErrors of 0000:3b:00.0"
        assert LONG_S / 2 <= seen.value < LONG_S
        sensor.progress.mark("nvmlDeviceGetTotalEccErrors", "0000:4b:00.0")
        (seen,) = stuck_calls([watched], [watched.status()], reported, 6.0)
        assert (seen.value, seen.text) == (0.0, "")


def test_a_mark_of_an_earlier_call_says_nothing_about_this_one() -> None:
    sensor = Marking()
    sensor.progress.marked = ("nvmlShutdown", "", time.monotonic() - 2 * LONG_S)
    with in_a_long_call(sensor) as watched:
        (seen,) = stuck_calls([watched], [watched.status()], set(), 5.0)
        assert (seen.value >= LONG_S, seen.text) == (True, "")
