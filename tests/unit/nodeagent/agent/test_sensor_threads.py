from __future__ import annotations

import threading
from collections.abc import Iterable

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
from nodeagent.policy import loading

POLICY = loading.load()
PATIENCE_S = 20.0
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


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensor_threads, "WAIT_S", 0.05)


def test_a_sensor_is_closed_while_the_gpus_are_released_and_opened_again_after_that() -> None:
    sensor, released = Counting("old"), threading.Event()
    watched = SensorThread(
        FittedSensor(sensor, releases=True), Inbox(POLICY), lambda: 1.0, lambda: released.is_set()
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
    stuck = SensorStatus("operator", False, "", 1, 0, 99.0, True)
    monkeypatch.setattr(SensorThread, "status", lambda _: stuck)
    for reads_state, check in ((True, "memory_lost"), (False, "sensor_stuck")):
        watched = SensorThread(
            FittedSensor(Counting(""), reads_state=reads_state), Inbox(POLICY), lambda: 1.0
        )
        [found] = stuck_calls([watched], set(), 1.0)
        assert (found.check, found.entity) == (check, "sensor/operator")
