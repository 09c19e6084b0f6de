from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.model import Observation
from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.events import MAX_FAILED, REGISTER_S, NvmlEvents
from nodeagent.sensing.sensor import WAIT_S, Unavailable
from tests.fakenvml import state
from tests.fakenvml.inprocess import SetClock, bus, faked
from tests.fakenvml.state import Fake

pytestmark = pytest.mark.local


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    """Load the fake library into this process, where it is found by its name: see `faked`."""
    with faked(tmp_path / "nvml") as found:
        yield found


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def sensor(fake: Fake, tmp_path: Path, pauses: list[float]) -> Iterator[NvmlEvents]:
    found = NvmlEvents(NvmlDriver(tmp_path), SetClock(), pauses.append)
    found.open()
    yield found
    fake.release()
    found.close()


def brief(seen: list[Observation]) -> list[tuple[str, str, float]]:
    return [(each.check, each.entity, each.value) for each in seen]


def test_an_xid_ends_the_wait_and_is_reported_with_its_gpu(fake: Fake, sensor: NvmlEvents) -> None:
    seen: list[Observation] = []
    thread = threading.Thread(target=lambda: seen.extend(sensor.read()))
    thread.start()
    fake.until(lambda s: s.waiting == 1)
    began_s = time.monotonic()
    fake.xid(3, 79)
    thread.join()
    assert time.monotonic() - began_s < WAIT_S / 2  # it takes a millisecond; the machine may be busy
    assert brief(seen) == [("xid", "gpu/0000:4b:00.0", 79.0)]
    assert (seen[0].source, seen[0].variant, seen[0].at_s) == ("nvml-events", "", 1000.0)


def test_a_burst_is_reported_completely_and_in_order(fake: Fake, sensor: NvmlEvents) -> None:
    codes = [*range(60), 79]
    for number, code in enumerate(codes):
        fake.xid(number % 8, code)
    told = brief(sensor.read())
    assert told == [("xid", fake.entity(number % 8), float(code)) for number, code in enumerate(codes)]


def test_a_read_without_events_returns_within_its_limit(sensor: NvmlEvents) -> None:
    began_s = time.monotonic()
    assert sensor.read() == []
    assert time.monotonic() - began_s < 2 * WAIT_S


def test_an_event_of_a_mig_instance_names_it(fake: Fake, sensor: NvmlEvents) -> None:
    fake.send(0, state.XID, 43, gi=3, ci=0)
    (seen,) = sensor.read()
    assert dict(seen.facts) == {
        "uuid": "GPU-00000000-0000-4000-8000-000000000000",
        "gpu_instance": "3",
        "compute_instance": "0",
    }


def test_each_kind_of_event_is_reported_by_its_check(fake: Fake, sensor: NvmlEvents) -> None:
    fake.gpu(2).ecc_uncorrected = 5
    fake.gpu(2).ecc_corrected = 7000
    for kind in (state.GPU_UNAVAILABLE, state.FATAL_POISON, state.DOUBLE_BIT, state.SBE_STORM):
        fake.send(2, kind)
    where = fake.entity(2)
    assert brief(sensor.read()) == [
        ("gpu_unavailable", where, 0.0),
        ("poison_fatal", where, 0.0),
        ("ecc_dbe", where, 5.0),
        ("ecc_sbe", where, 7000.0),
    ]


@pytest.mark.parametrize("how", [(state.RECOVERY_ACTION, 0), (state.XID, 154)])
def test_the_recovery_action_is_read_when_it_changes(
    fake: Fake, sensor: NvmlEvents, how: tuple[int, int]
) -> None:
    fake.gpu(1).recovery_action = 4
    fake.send(1, *how)
    assert ("recovery_action", fake.entity(1), 4.0) in brief(sensor.read())
    fake.gpu(1).recovery_action = 0
    fake.send(1, *how)
    told = brief(sensor.read())
    assert ("recovery_action", fake.entity(1), 0.0) in told
    assert ("gpu_reset", fake.entity(1), 0.0) in told


def test_events_are_registered_again_after_a_reload_of_the_driver(fake: Fake, sensor: NvmlEvents) -> None:
    fake.reload()
    with pytest.raises(Unavailable, match="UNINITIALIZED"):
        sensor.read()
    assert fake.state.attached == 0
    sensor.open()
    fake.xid(5, 48)
    assert brief(sensor.read()) == [("xid", fake.entity(5), 48.0)]


def test_a_driver_that_is_unloaded_ends_the_wait_at_once(fake: Fake, sensor: NvmlEvents) -> None:
    said: list[str] = []

    def read() -> None:
        with pytest.raises(Unavailable) as caught:
            sensor.read()
        said.append(str(caught.value))

    thread = threading.Thread(target=read)
    thread.start()
    fake.until(lambda s: s.waiting == 1)
    fake.driver("reloading")
    thread.join()
    assert "DRIVER_NOT_LOADED" in said[0]
    with pytest.raises(Unavailable, match="DRIVER_NOT_LOADED"):
        sensor.open()


def test_an_event_that_arrives_with_the_end_of_the_driver_is_not_lost(fake: Fake, sensor: NvmlEvents) -> None:
    fake.xid(0, 79)
    fake.fail("nvmlDeviceGetFieldValues", 9)
    fake.send(0, state.RECOVERY_ACTION)
    assert brief(sensor.read()) == [("xid", fake.entity(0), 79.0)]


def test_an_old_driver_reports_its_xids(fake: Fake, sensor: NvmlEvents) -> None:
    sensor.close()
    fake.old()
    sensor.open()
    fake.send(4, state.GPU_UNAVAILABLE)
    fake.xid(4, 31)
    assert brief(sensor.read()) == [("xid", fake.entity(4), 31.0)]


def test_xids_are_registered_if_the_driver_does_not_report_what_it_supports(
    fake: Fake, sensor: NvmlEvents
) -> None:
    sensor.close()
    fake.fail("nvmlDeviceGetSupportedEventTypes", state.NOT_SUPPORTED)
    sensor.open()
    fake.xid(4, 31)
    assert brief(sensor.read()) == [("xid", fake.entity(4), 31.0)]


def test_a_lost_gpu_does_not_silence_the_others(fake: Fake, sensor: NvmlEvents, pauses: list[float]) -> None:
    fake.fail("nvmlEventSetWait_v2", state.GPU_IS_LOST)
    fake.gpu(0).code = state.GPU_IS_LOST
    assert sensor.read() == []
    assert pauses == [WAIT_S]  # not a tight loop
    fake.release()
    assert sensor.read() == []
    fake.xid(1, 13)
    assert brief(sensor.read()) == [("xid", fake.entity(1), 13.0)]


def test_a_wait_that_always_fails_is_reported(fake: Fake, sensor: NvmlEvents) -> None:
    fake.fail("nvmlEventSetWait_v2", state.UNKNOWN)
    for _ in range(MAX_FAILED):
        assert sensor.read() == []
    with pytest.raises(Unavailable, match="UNKNOWN"):
        sensor.read()


@pytest.mark.parametrize("function", ["nvmlDeviceRegisterEvents", "nvmlDeviceGetHandleByIndex_v2"])
def test_if_no_gpu_can_be_registered_the_sensor_is_blind_and_closes_the_driver(
    fake: Fake, sensor: NvmlEvents, function: str
) -> None:
    sensor.close()
    fake.fail(function, state.NOT_SUPPORTED)
    with pytest.raises(Unavailable, match="NVML reports the Xids of none of 8 GPUs") as caught:
        sensor.open()
    assert not caught.value.nothing_there
    assert (fake.state.attached, fake.state.event_sets, sensor.left_out()) == (0, 0, ())
    fake.release()
    sensor.open()
    fake.xid(7, 79)
    assert brief(sensor.read()) == [("xid", fake.entity(7), 79.0)]


def test_gpus_that_report_no_xids_make_the_sensor_blind(fake: Fake, sensor: NvmlEvents) -> None:
    sensor.close()
    for number in range(8):
        fake.gpu(number).supported_events &= ~state.XID
    with pytest.raises(Unavailable, match=r"gpu/0000:1b:00\.0: its Xids are not reported: NOT_SUPPORTED"):
        sensor.open()


def test_a_gpu_that_cannot_be_registered_is_left_out(fake: Fake, sensor: NvmlEvents) -> None:
    assert sensor.left_out() == ()
    sensor.close()
    fake.fail("nvmlDeviceRegisterEvents", state.NOT_SUPPORTED, gpu=2)
    fake.fail("nvmlDeviceGetHandleByIndex_v2", state.UNKNOWN, gpu=3)
    sensor.open()
    fake.xid(1, 13)
    assert brief(sensor.read()) == [("xid", fake.entity(1), 13.0)]
    assert [(each.what, each.why) for each in sensor.left_out()] == [
        (fake.entity(2), "its Xids are not reported: NOT_SUPPORTED"),
        ("xid", "NVML cannot open 1 of 8 GPUs"),
    ]


@pytest.mark.parametrize(("code", "later"), [(state.UNKNOWN, 1), (state.NOT_SUPPORTED, 0)])
def test_a_registration_that_failed_is_repeated_unless_the_gpu_does_not_support_it(
    fake: Fake, tmp_path: Path, code: int, later: int
) -> None:
    clock = SetClock()
    sensor = NvmlEvents(NvmlDriver(tmp_path), clock)
    fake.fail("nvmlDeviceRegisterEvents", code, gpu=2)
    sensor.open()
    fake.release()
    for after_s, registered in ((REGISTER_S - 1, 0), (1, later)):
        clock.at_s += after_s
        fake.xid(1, 13)  # ends the wait
        sensor.read()
        assert len(sensor.left_out()) == 1 - registered
    fake.xid(2, 79)
    fake.xid(1, 13)
    assert (("xid", fake.entity(2), 79.0) in brief(sensor.read())) == bool(later)
    sensor.close()


@pytest.mark.parametrize("has_gpus", [True, False])
def test_a_driver_that_lists_no_gpu_is_blind_only_if_it_has_claimed_one(
    tmp_path: Path, has_gpus: bool
) -> None:
    pauses: list[float] = []
    with faked(tmp_path / "nvml", gpus=1) as fake:
        sysfs = bus(tmp_path / "sys", fake) if has_gpus else tmp_path
        fake.vanish(0)
        sensor = NvmlEvents(NvmlDriver(sysfs, devices=tmp_path / "none"), SetClock(), pauses.append)
        if has_gpus:
            with pytest.raises(Unavailable, match="NVML lists no GPU"):
                sensor.open()
        else:
            sensor.open()
            assert (sensor.read(), pauses) == ([], [WAIT_S])
        sensor.close()


def test_without_event_sets_the_sensor_is_unavailable_and_closes_the_driver(
    fake: Fake, sensor: NvmlEvents
) -> None:
    sensor.close()
    fake.fail("nvmlEventSetCreate", state.NOT_SUPPORTED)
    with pytest.raises(Unavailable, match="nvmlEventSetCreate: NOT_SUPPORTED"):
        sensor.open()


def test_a_request_that_ended_between_two_sessions_shows_no_reset(fake: Fake, sensor: NvmlEvents) -> None:
    fake.gpu(1).recovery_action = 4
    fake.xid(1, 154)
    assert ("recovery_action", fake.entity(1), 4.0) in brief(sensor.read())
    sensor.close()
    fake.gpu(1).recovery_action = 0
    sensor.open()
    fake.xid(1, 154)
    found = brief(sensor.read())
    assert ("recovery_action", fake.entity(1), 0.0) in found
    assert "gpu_reset" not in {check for check, *_ in found}
