"""Drivers that disappear, return, or are missing."""

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
def test_a_missing_driver_is_reported_until_it_returns_and_then_all_gpus_count_as_reset(
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


def test_another_error_of_nvml_init_is_reported_and_does_not_count_as_a_reload(room: Room) -> None:
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
    assert told(room.read(), "nvml") == [("driver", 2)]  # void handles: the next read reinitialises NVML
    seen = room.read()
    assert told(seen, "nvml") == [("driver", 0)]
    assert len(told(seen, "gpu_reset")) == GPUS


def test_a_reload_while_no_agent_ran_is_noticed_from_the_kernel_module(room: Room) -> None:
    room.read()
    assert told(room.restart().read(), "gpu_reset") == []
    (room.sysfs / "module/nvidia").rename(room.sysfs / "module/before")
    (room.sysfs / "module/nvidia").mkdir()
    assert len(told(room.restart().read(), "gpu_reset")) == GPUS


def test_an_nvml_outage_without_a_reload_of_the_kernel_module_is_no_reset(room: Room) -> None:
    room.read()
    room.fake.reload()
    room.read()
    assert told(room.read(), "gpu_reset") == []


def test_the_branch_of_the_driver_is_known(room: Room) -> None:
    driver = NvmlDriver(room.sysfs)
    assert driver.branch is None
    assert driver.join("me").branch == driver.branch == 575
    driver.leave("me")


def test_polling_is_unavailable_on_a_node_without_gpus_and_driver(tmp_path: Path) -> None:
    with faked(tmp_path / "nvml", 0) as fake:
        fake.driver("missing")
        sensor = NvmlPolling(NvmlDriver(tmp_path), SetClock(), dict.fromkeys(CHECKS, 5.0))
        with pytest.raises(Unavailable, match=r"no NVIDIA driver, and no NVIDIA GPU on the PCI bus"):
            sensor.open()
        with pytest.raises(Unavailable):
            sensor.read()


def test_a_node_that_should_have_gpus_reports_its_driver_even_if_the_bus_shows_none(tmp_path: Path) -> None:
    with faked(tmp_path / "nvml", 0) as fake:
        fake.driver("missing")
        sensor = NvmlPolling(NvmlDriver(tmp_path), SetClock(), dict.fromkeys(CHECKS, 5.0), expected=8)
        sensor.open()
        assert told(sensor.read(), "nvml") == [("driver", 2)]
        fake.driver("loaded")
        assert told(sensor.read(), "gpu_count") == [("node", 8)]
        sensor.close()
