"""Drivers that go, come, and are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.polling import CHECKS, NvmlPolling
from nodeagent.sensing.sensor import Unavailable
from tests.fakenvml import state
from tests.fakenvml.inprocess import SetClock, faked
from tests.local.nodeagent.nvml.polling import GPUS, OK, Room, told

pytestmark = pytest.mark.local


@pytest.mark.parametrize(("driver", "value"), [("missing", 2), ("reloading", 2), ("mismatch", 3)])
def test_a_driver_that_is_away_is_reported_until_it_is_back_and_then_all_gpus_were_reset(
    room: Room, driver: str, value: int
) -> None:
    room.read()
    room.fake.driver(driver)
    for _ in range(3):
        assert room.values() == {"nvml": value}
    room.fake.driver("loaded")
    (room.sysfs / "module/nvidia").rename(room.sysfs / "module/before")
    (room.sysfs / "module/nvidia").mkdir()
    seen = room.read()
    assert told(seen, "nvml") == [("driver", 0)]
    assert told(seen, "gpu_reset") == [(room.fake.entity(i), 0) for i in range(GPUS)]
    assert told(seen, "gpu_state") == [(room.fake.entity(i), OK) for i in range(GPUS)]
    assert told(room.read(), "gpu_reset") == []


def test_an_error_of_init_that_is_none_of_those_is_an_error_and_no_reload(room: Room) -> None:
    room.sensor.close()
    room.fake.fail("nvmlInitWithFlags", state.UNKNOWN)
    seen = room.read()
    assert told(seen, "nvml") == [("driver", 4)]
    assert "nvmlInit: UNKNOWN" in seen[0].text
    room.fake.release()
    assert told(room.read(), "gpu_reset") == []


def test_a_reload_between_two_sweeps_is_noticed(room: Room) -> None:
    room.read()
    room.fake.reload()
    (room.sysfs / "module/nvidia").rename(room.sysfs / "module/before")
    (room.sysfs / "module/nvidia").mkdir()
    assert told(room.read(), "nvml") == [("driver", 2)]  # handles are void: NVML is reinitialised at the next
    seen = room.read()
    assert told(seen, "nvml") == [("driver", 0)]
    assert len(told(seen, "gpu_reset")) == GPUS


def test_a_reload_while_no_agent_ran_is_noticed_by_the_kernels_module(room: Room) -> None:
    room.read()
    assert told(room.restart().read(), "gpu_reset") == []
    (room.sysfs / "module/nvidia").rename(room.sysfs / "module/before")
    (room.sysfs / "module/nvidia").mkdir()
    assert len(told(room.restart().read(), "gpu_reset")) == GPUS


def test_nvml_that_was_away_without_another_load_of_the_module_is_no_reset(room: Room) -> None:
    room.read()
    room.fake.reload()
    room.read()
    assert told(room.read(), "gpu_reset") == []


def test_the_branch_of_the_driver_is_known(room: Room) -> None:
    driver = NvmlDriver(room.sysfs)
    assert driver.branch is None
    assert driver.join("me").branch == driver.branch == 575
    driver.leave("me")


def test_a_node_without_gpus_and_driver_has_nothing_to_tell(tmp_path: Path) -> None:
    with faked(tmp_path / "nvml", 0) as fake:
        fake.driver("missing")
        sensor = NvmlPolling(NvmlDriver(tmp_path), SetClock(), dict.fromkeys(CHECKS, 5.0))
        with pytest.raises(Unavailable, match=r"no NVIDIA driver, and no NVIDIA GPU on the PCI bus"):
            sensor.open()
        with pytest.raises(Unavailable):
            sensor.read()


def test_a_node_that_should_have_gpus_reports_its_driver_though_the_bus_shows_none(tmp_path: Path) -> None:
    with faked(tmp_path / "nvml", 0) as fake:
        fake.driver("missing")
        sensor = NvmlPolling(NvmlDriver(tmp_path), SetClock(), dict.fromkeys(CHECKS, 5.0), expected=8)
        sensor.open()
        assert told(sensor.read(), "nvml") == [("driver", 2)]
        fake.driver("loaded")
        assert told(sensor.read(), "gpu_count") == [("node", 8)]
        sensor.close()
