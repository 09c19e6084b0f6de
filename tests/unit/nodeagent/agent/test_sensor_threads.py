"""Sensors in their threads: calls that do not return or are only slow, and releases of the GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from nodeagent.agent import sensor_threads
from nodeagent.agent.inbox import Inbox
from nodeagent.agent.sensor_threads import (
    NOT_YET,
    FittedSensor,
    SensorStatus,
    SensorThread,
    slow_sensors,
    stuck_calls,
    xids_are_unseen,
)
from nodeagent.model import Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.pauses import LoopPauses
from nodeagent.sensing.progress import CallProgress
from nodeagent.sensing.sensor import Omission

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


# -- slow sweeps


def read_for(watched: SensorThread, *durations_s: float) -> SensorStatus:
    watched._sees, watched._why = True, ""
    for each in durations_s:
        watched._note_duration(each)
    return watched.status()


@pytest.mark.parametrize(
    ("durations_s", "is_slow"),
    [
        ((), None),
        ((14.9,), False),
        ((15.1,), None),
        ((15.1, 15.1), None),
        ((90.0, 90.0, 90.0), True),
        ((90.0, 90.0, 0.1, 90.0), None),
        ((90.0, 90.0, 90.0, 0.1), False),
    ],
)
def test_a_sensor_whose_sweeps_take_too_long_three_times_in_a_row_is_slow(
    durations_s: tuple[float, ...], is_slow: bool | None
) -> None:
    status = read_for(SensorThread(FittedSensor(Blocking()), Inbox(shipped()), lambda: 1.0), *durations_s)
    assert (status.is_slow, status.sees) == (is_slow, is_slow is not True)
    assert ("took more than 15 s, the last one 90 s" in status.why) is (is_slow is True)


def test_a_slow_sensor_is_reported_once_and_again_when_it_is_known_to_be_in_time() -> None:
    watched, reported = SensorThread(FittedSensor(Blocking()), Inbox(shipped()), lambda: 1.0), set[str]()

    def seen(*durations_s: float) -> list[float]:
        return [each.value for each in slow_sensors([read_for(watched, *durations_s)], reported, 1.0)]

    assert [seen(), seen(90.0, 90.0), seen(90.0), seen(90.0), seen(0.1), seen(0.1)] == [
        [],
        [],
        [1.0],
        [],
        [0.0],
        [],
    ]
    after_restart = {"blocking"}
    watched = SensorThread(FittedSensor(Blocking()), Inbox(shipped()), lambda: 1.0)
    assert list(slow_sensors([watched.status()], after_restart, 1.0)) == []
    assert [each.value for each in slow_sensors([read_for(watched, 0.1)], after_restart, 1.0)] == [0.0]


def test_a_slow_disk_of_the_state_or_a_sensor_that_waits_for_events_is_no_slow_sensor() -> None:
    waits = Blocking()
    waits.period_s = 0.0
    for fitted in (FittedSensor(Blocking(), reads_state=True), FittedSensor(waits)):
        watched = SensorThread(fitted, Inbox(shipped()), lambda: 1.0)
        assert read_for(watched, 90.0, 90.0, 90.0).is_slow is False


# -- an agent that did not run


def test_time_in_which_the_agent_did_not_run_is_no_time_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = LoopPauses(2.5)
    watched = SensorThread(FittedSensor(Blocking()), Inbox(shipped()), lambda: 1.0, pauses=pauses)
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pauses.note_cycle(now)
    watched._began = now + 0.5
    now += 70.0
    pauses.note_cycle(now)
    assert list(stuck_calls([watched], [watched.status()], set(), 1.0)) == []
    for _ in range(30):  # the driver really hangs
        now += 2.5
        pauses.note_cycle(now)
    [found] = stuck_calls([watched], [watched.status()], set(), 1.0)
    assert found.check == "sensor_stuck"
    assert found.value == pytest.approx(77.0)
    watched._began = 0.0
    watched._read_s = 0.0
    watched._note_duration(147.0)
    assert watched._slow_reads == 1, "75 s of it were the sensor's"


def test_a_loop_that_is_a_little_late_has_run() -> None:
    pauses = LoopPauses(2.5)
    for now in (0.0, 2.5, 7.0, 12.0):
        pauses.note_cycle(now)
    assert pauses.within_s(0.0, 12.0) == 0.0
    pauses.note_cycle(112.0)
    assert pauses.within_s(0.0, 200.0) == 97.5
    assert pauses.within_s(20.0, 60.0) == 40.0


# -- Xids that no sensor sees


def events_without(*gpus: str) -> SensorStatus:
    left_out = tuple(Omission(each, "its Xids are not reported: NOT_SUPPORTED") for each in gpus)
    return SensorStatus("nvml-events", True, "", 1, 1, 0.0, False, left_out)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((events_without(),), False),
        ((events_without("gpu/0000:3b:00.0"),), True),
        ((events_without("xid"),), True),
        ((events_without("gpu/0000:3b:00.0"), SEES), False),
        ((events_without("gpu/0000:3b:00.0"), replace(BLIND, name="kmsg")), True),
        ((events_without("gpu/0000:3b:00.0"), replace(BLIND, name="kmsg", why=NOT_YET)), None),
    ],
)
def test_xids_are_unseen_if_no_sensor_sees_those_of_one_gpu(
    statuses: tuple[SensorStatus, ...], expected: bool | None
) -> None:
    assert xids_are_unseen(statuses) is expected
