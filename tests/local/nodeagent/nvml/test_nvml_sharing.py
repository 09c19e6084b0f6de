"""The two sensors together, each in its thread: neither waits for the other's calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.events import NvmlEvents
from nodeagent.nvml.library import DriverGone
from nodeagent.nvml.polling import CHECKS, RENEW_S, NvmlPolling
from nodeagent.sensing.sensor import Unavailable
from tests.fakenvml.inprocess import SetClock, bus, faked
from tests.fakenvml.state import Fake

pytestmark = pytest.mark.local

PATIENCE_S = 10.0
T = TypeVar("T")


class Pair:
    """Both sensors on one driver, each called in a separate thread."""

    def __init__(self, fake: Fake, folder: Path) -> None:
        self.fake = fake
        self.clock = SetClock()
        self.driver = NvmlDriver(bus(folder / "sys", fake), patience_s=1.0)
        self.events = NvmlEvents(self.driver, self.clock)
        self.polling = NvmlPolling(self.driver, self.clock, dict.fromkeys(CHECKS, 5.0))
        self._threads = {each: ThreadPoolExecutor(1) for each in ("events", "polling")}

    def start(self, which: str, call: Callable[[], T]) -> Future[T]:
        return self._threads[which].submit(call)

    def do(self, which: str, call: Callable[[], T]) -> T:
        return self.start(which, call).result(PATIENCE_S)

    def open(self) -> None:
        self.do("events", self.events.open)
        self.do("polling", self.polling.open)
        self.poll()

    def poll(self, after_s: float = 5.0) -> dict[str, float]:
        self.clock.at_s += after_s
        return {each.check: each.value for each in self.do("polling", self.polling.read)}

    def close(self) -> None:
        self.do("events", self.events.close)
        self.do("polling", self.polling.close)
        for each in self._threads.values():
            each.shutdown()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Load the fake library into this process, where it is found by its name: see `faked`."""
    with faked(tmp_path / "nvml", 2) as fake:
        found = Pair(fake, tmp_path)
        yield found
        fake.release()
        found.close()


def test_a_blocked_poll_delays_no_event(pair: Pair) -> None:
    pair.open()
    pair.fake.block("nvmlDeviceGetTotalEccErrors", gpu=1)
    pair.clock.at_s += 5
    stuck = pair.start("polling", pair.polling.read)
    pair.fake.until(lambda s: s.blocked == 1)
    for code in (79, 48):
        pair.fake.xid(1, code)
        assert [each.value for each in pair.do("events", pair.events.read)] == [code]
    assert not stuck.done()
    pair.fake.release()
    seen = stuck.result(PATIENCE_S)
    assert [each.value for each in seen if each.check == "gpu_state"] == [0, 0]


def test_an_endless_wait_for_events_delays_no_poll(pair: Pair) -> None:
    pair.open()
    pair.fake.block("nvmlEventSetWait_v2")
    stuck = pair.start("events", pair.events.read)
    pair.fake.until(lambda s: s.blocked == 1)
    assert pair.poll()["gpu_state"] == 0
    pair.clock.at_s += RENEW_S  # not even when NVML should be reinitialised because a GPU is missing
    pair.fake.gpu(0).code = 15
    assert pair.poll()["gpu_state"] == 0  # of the other GPU
    assert pair.poll()["nvml"] == 0
    assert not stuck.done()
    pair.fake.release()
    assert stuck.result(PATIENCE_S) == []  # NVML was not shut down during the call
    assert pair.driver.join("another").number == 1
    pair.driver.leave("another")


def test_a_driver_that_disappears_while_a_call_hangs_is_reported_and_used_again_after_the_call(
    pair: Pair,
) -> None:
    pair.open()
    pair.fake.block("nvmlEventSetWait_v2")
    stuck = pair.start("events", pair.events.read)
    pair.fake.until(lambda s: s.blocked == 1)
    pair.fake.reload()
    assert pair.poll() == {"nvml": 2}
    assert pair.poll() == {"nvml": 2}
    assert pair.fake.state.attached == 1  # a call still uses it
    pair.fake.release()
    with pytest.raises(Unavailable):
        stuck.result(PATIENCE_S)
    assert pair.poll()["nvml"] == 0
    pair.do("events", pair.events.open)
    pair.fake.xid(0, 13)
    assert len(pair.do("events", pair.events.read)) == 1


def test_a_hung_init_is_reported_to_the_other_sensor(pair: Pair) -> None:
    pair.fake.block("nvmlInitWithFlags")
    stuck = pair.start("polling", pair.polling.open)
    pair.fake.until(lambda s: s.blocked == 1)
    with pytest.raises(Unavailable, match="nvml-polling has not returned"):
        pair.do("events", pair.events.open)
    pair.fake.release()
    stuck.result(PATIENCE_S)
    pair.do("events", pair.events.open)


def test_nvml_is_reinitialised_for_both_sensors_and_both_continue(pair: Pair) -> None:
    pair.open()
    pair.fake.gpu(0).code = 15
    pair.poll()
    waiting = pair.start("events", pair.events.read)
    pair.fake.until(lambda s: s.waiting == 1)
    pair.poll(RENEW_S)
    pair.fake.gpu(0).code = 0
    waiting.result(PATIENCE_S)
    rejoined = pair.start("events", pair.events.read)
    assert pair.poll()["nvml"] == 0
    rejoined.result(PATIENCE_S)
    pair.fake.xid(0, 79)
    assert [each.value for each in pair.do("events", pair.events.read)] == [79]
    assert pair.fake.state.attached == 1
    assert pair.driver.join("another").number == 2
    pair.driver.leave("another")


def test_the_gpus_are_no_longer_open_once_both_sensors_are_closed(pair: Pair) -> None:
    pair.open()
    pair.do("events", pair.events.close)
    assert (pair.fake.state.attached, pair.fake.state.event_sets) == (1, 0)
    pair.do("polling", pair.polling.close)
    assert pair.fake.state.attached == 0
    pair.open()
    assert pair.fake.state.attached == 1


def test_concurrent_users_of_the_driver_leave_nothing_open(pair: Pair) -> None:
    failed: list[BaseException] = []

    def come_and_go(who: str) -> None:
        try:
            for turn in range(50):
                session = pair.driver.join(who)
                assert session.branch == 575
                if turn % 7 == 0:
                    pair.driver.renew(session)
                pair.driver.leave(who)
        except (AssertionError, DriverGone) as error:
            failed.append(error)

    threads = [threading.Thread(target=come_and_go, args=(f"user {i}",)) for i in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    assert failed == []
    assert pair.fake.state.attached == 0
