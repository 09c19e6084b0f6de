from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.nvml.driver import Driver
from nodeagent.nvml.polling import RENEW_S, NvmlPolling
from nodeagent.nvml.probes import CHECKS
from nodeagent.observation import Observation
from nodeagent.sensor import Unavailable
from tests.fakenvml import state
from tests.fakenvml.inprocess import SetClock, bus, faked
from tests.fakenvml.state import Fake

pytestmark = pytest.mark.local

GPUS = 4
OK, LOST, RESET_REQUIRED, VANISHED, UNREADABLE = range(5)


class Room:
    """A node with a polling sensor, whose every check is due at every read."""

    def __init__(self, fake: Fake, folder: Path) -> None:
        self.fake = fake
        self.sysfs = bus(folder / "sys", fake)
        self.clock = SetClock()
        self.sensors: list[NvmlPolling] = []
        self.sensor = self.start()

    def start(self, remembered: dict[str, Any] | None = None, expected: int | None = None) -> NvmlPolling:
        """Start an agent anew, as after an exit."""
        for each in self.sensors:
            each.close()
        periods_s = dict.fromkeys(CHECKS, 5.0)
        self.sensor = NvmlPolling(Driver(self.sysfs), self.clock, periods_s, remembered, expected)
        self.sensors.append(self.sensor)
        self.sensor.open()
        return self.sensor

    def restart(self) -> NvmlPolling:
        """Start it with what it remembers, as a file keeps it."""
        return self.start(json.loads(json.dumps(self.sensor.remembered())))

    def read(self, after_s: float = 5.0) -> list[Observation]:
        self.clock.at_s += after_s
        return list(self.sensor.read())

    def values(self, gpu: int | None = None, after_s: float = 5.0) -> dict[str, float]:
        """Read, and return what is told of one GPU, or of everything else."""
        where = {self.fake.entity(gpu)} if gpu is not None else {"driver", "node"}
        return {each.check: each.value for each in self.read(after_s) if each.entity in where}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    """Use the fake library in this process, found by its name since it is loaded: see `faked`."""
    with faked(tmp_path / "nvml", GPUS) as fake:
        found = Room(fake, tmp_path)
        yield found
        fake.release()
        found.sensor.close()


def told(seen: Iterable[Observation], check: str) -> list[tuple[str, float]]:
    return [(each.entity, each.value) for each in seen if each.check == check]


def test_a_gpu_that_is_well_has_a_value_for_every_check_that_it_supports(room: Room) -> None:
    assert room.values(2) == {
        "gpu_state": 0,
        "recovery_action": 0,
        "ecc_dbe": 0,
        "ecc_sbe": 0,
        "ecc_sram_threshold": 0,
        "row_remap_pending": 0,
        "row_remap_failure": 0,
        "inforom": 0,
        "gpu_temperature_margin": 37,
        "gpu_throttled": 0,
        "pcie_link": 1.0,
        "pcie_replay": 0,
        "nvlink_down": 0,
        "nvlink_errors": 0,
        "fabric": 0,
    }
    assert room.values() == {"nvml": 0, "gpu_count": 0}


def test_what_is_wrong_is_read_as_it_is(room: Room) -> None:
    gpu = room.fake.gpu(1)
    gpu.recovery_action, gpu.ecc_uncorrected, gpu.ecc_corrected, gpu.sram_exceeded = 2, 3, 1000, 1
    gpu.remap_pending = gpu.remap_failure = 1
    gpu.inforom = 14
    gpu.margin = -2
    gpu.clocks_event_reasons = 0x40
    gpu.pcie_width, gpu.pcie_replays = 4, 77
    gpu.nvlink_replay, gpu.nvlink_crc = 20, 3
    gpu.fabric_summary = 3
    room.fake.field(1, 29, 30)
    room.fake.field(1, 30, 25)
    room.fake.field(1, 31, 1)
    assert room.values(1) == {
        "gpu_state": 0,
        "recovery_action": 2,
        "ecc_dbe": 3,
        "ecc_sbe": 1000,
        "ecc_sram_threshold": 1,
        "row_remap_pending": 1,
        "row_remap_failure": 1,
        "retired_pages": 55,
        "retired_pages_pending": 1,
        "inforom": 1,
        "gpu_temperature_margin": -2,
        "gpu_throttled": 1,
        "pcie_link": 0.25,
        "pcie_replay": 77,
        "nvlink_down": 0,
        "nvlink_errors": 23,
        "fabric": 2,
    }


def test_each_check_is_told_at_its_own_period(room: Room) -> None:
    room.sensor.close()
    slow = NvmlPolling(Driver(room.sysfs), room.clock, {"gpu_throttled": 5, "ecc_sbe": 15, "load": 5})
    counts: dict[str, int] = {}
    for _ in range(12):
        room.clock.at_s += 5.03
        for each in slow.read():
            counts[each.check] = counts.get(each.check, 0) + 1
    slow.close()
    # The state of a GPU is told without being due only when it changes.
    assert counts == {"gpu_throttled": 12 * GPUS, "ecc_sbe": 4 * GPUS}


def test_what_tells_a_gpu_to_people_goes_with_its_state(room: Room) -> None:
    seen = next(each for each in room.read() if each.check == "gpu_state")
    assert dict(seen.facts) == {
        "uuid": "GPU-00000000-0000-4000-8000-000000000000",
        "name": "NVIDIA H100 80GB HBM3",
        "serial": "1652223000000",
    }
    nvml = next(each for each in room.read() if each.check == "nvml")
    assert dict(nvml.facts) == {"driver": "575.57.08", "nvml": "12.575.57.08"}


# -- the driver


@pytest.mark.parametrize(("driver", "value"), [("missing", 2), ("reloading", 2), ("mismatch", 3)])
def test_a_driver_that_is_away_is_told_until_it_is_back_and_then_all_gpus_were_reset(
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
    assert told(room.read(), "nvml") == [("driver", 2)]  # handles are void: initialised anew at the next
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
    driver = Driver(room.sysfs)
    assert driver.branch is None
    assert driver.join("me").branch == driver.branch == 575
    driver.leave("me")


def test_a_node_without_gpus_and_driver_has_nothing_to_tell(tmp_path: Path) -> None:
    with faked(tmp_path / "nvml", 0) as fake:
        fake.driver("missing")
        sensor = NvmlPolling(Driver(tmp_path), SetClock(), dict.fromkeys(CHECKS, 5.0))
        with pytest.raises(Unavailable, match=r"no NVIDIA driver, and no NVIDIA GPU on the PCI bus"):
            sensor.open()
        with pytest.raises(Unavailable):
            sensor.read()


def test_a_node_that_should_have_gpus_tells_of_its_driver_though_the_bus_shows_none(tmp_path: Path) -> None:
    with faked(tmp_path / "nvml", 0) as fake:
        fake.driver("missing")
        sensor = NvmlPolling(Driver(tmp_path), SetClock(), dict.fromkeys(CHECKS, 5.0), expected=8)
        sensor.open()
        assert told(sensor.read(), "nvml") == [("driver", 2)]
        fake.driver("loaded")
        assert told(sensor.read(), "gpu_count") == [("node", 8)]
        sensor.close()


# -- GPUs that go and come


@pytest.mark.parametrize(("code", "value"), [(15, LOST), (16, RESET_REQUIRED)])
def test_a_gpu_that_is_lost_and_back_was_reset(room: Room, code: int, value: int) -> None:
    room.read()
    room.fake.gpu(1).code = code
    seen = room.read()
    assert told(seen, "gpu_state") == [(room.fake.entity(i), value if i == 1 else OK) for i in range(GPUS)]
    assert told(seen, "gpu_count") == [("node", 0)]
    assert len(told(seen, "ecc_dbe")) == GPUS - 1  # the others are read as ever
    assert room.values(1) == {"gpu_state": value}
    room.fake.restore(1)
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(1), 0)]
    assert told(room.read(), "gpu_reset") == []


def test_a_gpu_that_is_listed_no_more_has_vanished_and_is_missed(room: Room) -> None:
    room.read()
    room.fake.vanish(2)
    assert room.values() == {"nvml": 0, "gpu_count": 1}
    assert room.values(2) == {"gpu_state": VANISHED}
    room.fake.restore(2)
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(2), 0)]
    assert room.values(2)["gpu_state"] == OK


def test_a_gpu_that_vanished_while_no_agent_ran_is_missed(room: Room) -> None:
    room.read()
    room.fake.vanish(0)
    room.restart()
    seen = room.read()
    assert told(seen, "gpu_count") == [("node", 1)]
    assert told(seen, "gpu_state")[0] == (room.fake.entity(0), VANISHED)
    room.start()  # and without a memory it is not
    assert room.values() == {"nvml": 0, "gpu_count": 0}


def test_a_gpu_in_another_slot_is_not_missed_in_the_old_one(room: Room) -> None:
    room.read()
    old = room.fake.entity(0)
    room.fake.gpu(0).pci = b"00000000:99:00.0"
    room.restart()
    seen = room.read()
    assert told(seen, "gpu_count") == [("node", 0)]
    assert dict(told(seen, "gpu_state")) == dict.fromkeys(
        [old, *(room.fake.entity(i) for i in range(GPUS))], OK
    )


def test_fewer_gpus_than_configured_are_missed(room: Room) -> None:
    room.start(expected=8)
    seen = room.read()
    assert told(seen, "gpu_count") == [("node", 8 - GPUS)]
    assert next(each.text for each in seen if each.check == "gpu_count") == "4 of 8 GPUs"


def test_a_gpu_that_was_lost_before_it_was_ever_seen_is_named_by_the_bus(room: Room) -> None:
    room.fake.gpu(3).code = 15
    room.start()
    assert room.values(3) == {"gpu_state": LOST}
    room.fake.restore(3)
    seen = room.read()
    assert told(seen, "gpu_reset") == [(room.fake.entity(3), 0)]
    assert told(seen, "replaced") == []


def test_another_uuid_in_the_same_place_is_another_gpu(room: Room) -> None:
    room.fake.gpu(1).link_up[0] = 1
    room.fake.gpu(1).ecc_uncorrected = 9
    room.read()
    room.fake.gpu(1).uuid = b"GPU-another"
    room.fake.gpu(1).ecc_uncorrected = 0
    room.fake.gpu(1).link_up[0] = 0  # of the new one it is not wired
    room.restart()
    seen = room.read()
    assert told(seen, "replaced") == [(room.fake.entity(1), 0)]
    assert told(seen, "gpu_reset") == []
    assert (room.fake.entity(1), 0) in told(seen, "nvlink_down")
    assert told(room.read(), "replaced") == []


def test_while_a_gpu_is_away_nvml_is_initialised_anew_now_and_then(room: Room) -> None:
    room.read()
    room.fake.gpu(0).code = 15
    room.read()
    room.read(RENEW_S)
    assert room.fake.state.attached == 0
    seen = room.read()
    assert room.fake.state.attached == 1
    assert told(seen, "nvml") == [("driver", 0)]
    assert told(seen, "gpu_reset") == []


# -- resets


def test_a_volatile_counter_that_falls_was_reset_with_its_gpu(room: Room) -> None:
    room.fake.gpu(1).ecc_uncorrected = 2
    assert told(room.read(), "gpu_reset") == []
    room.fake.gpu(1).ecc_uncorrected = 3
    assert told(room.read(), "gpu_reset") == []
    room.restart()
    room.fake.gpu(1).ecc_uncorrected = 0
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(1), 0)]


@pytest.mark.parametrize(("action", "resets"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 0), (6, 1), (7, 1)])
def test_a_driver_that_asks_for_no_reset_any_more_has_had_it(room: Room, action: int, resets: int) -> None:
    room.fake.gpu(2).recovery_action = action
    assert told(room.read(), "gpu_reset") == []
    room.fake.gpu(2).recovery_action = 0
    assert len(told(room.read(), "gpu_reset")) == resets


# -- answers that do not come


def test_what_is_not_supported_costs_nothing_else_and_is_not_asked_again(room: Room) -> None:
    room.fake.gpu(0).links = 0
    room.read()
    room.restart()
    room.fake.fail("nvmlDeviceGetTotalEccErrors", state.NOT_SUPPORTED, gpu=0)
    room.fake.fail("nvmlDeviceGetGpuFabricInfoV", state.FUNCTION_NOT_FOUND, gpu=0)
    room.fake.field(0, 230, code=state.NOT_SUPPORTED)
    without = {"ecc_dbe", "ecc_sbe", "fabric", "recovery_action", "nvlink_down", "nvlink_errors"}
    values = room.values(0)
    assert not values.keys() & without
    assert values["gpu_temperature_margin"] == 37
    assert values["gpu_state"] == OK
    before = room.fake.state.calls
    room.read()
    all_four = room.fake.state.calls - before
    room.fake.release()
    room.fake.gpu(0).links = 18
    before = room.fake.state.calls
    assert not room.values(0).keys() & without
    assert room.fake.state.calls - before == all_four
    room.fake.reload()
    room.read()
    assert room.values(0).keys() > without - {"recovery_action"}


def test_an_error_that_may_pass_is_asked_again(room: Room) -> None:
    room.fake.fail("nvmlDeviceGetMarginTemperature", state.UNKNOWN, gpu=0)
    room.fake.fail("nvmlDeviceGetTemperature", state.UNKNOWN, gpu=0)
    values = room.values(0)
    assert "gpu_temperature_margin" not in values
    assert values["gpu_state"] == OK
    room.fake.release()
    assert room.values(0)["gpu_temperature_margin"] == 37


@pytest.mark.parametrize("code", [state.UNKNOWN, state.INVALID_ARGUMENT])
def test_a_gpu_that_answers_nothing_for_no_known_reason_is_unreadable(room: Room, code: int) -> None:
    room.read()
    room.fake.gpu(3).code = code
    seen = room.read()
    assert (room.fake.entity(3), UNREADABLE) in told(seen, "gpu_state")
    assert told(seen, "nvml") == [("driver", 0)]
    room.fake.restore(3)
    seen = room.read()
    assert (room.fake.entity(3), OK) in told(seen, "gpu_state")
    assert told(seen, "gpu_reset") == []


def test_an_old_driver_is_asked_in_the_old_way(room: Room) -> None:
    room.fake.old()
    room.fake.gpu(0).clocks_event_reasons = 0x80
    room.start()
    values = room.values(0)
    assert values["gpu_temperature_margin"] == 87 - 50
    assert values["gpu_throttled"] == 1
    assert not values.keys() & {"recovery_action", "ecc_sram_threshold", "fabric"}
    assert values["gpu_state"] == OK


# -- load and links


def test_clocks_that_are_cut_at_rest_are_not_told_as_cut(room: Room) -> None:
    room.fake.gpu(0).clocks_event_reasons = 0x8 | 0x1
    assert room.values(0)["gpu_throttled"] == 0


def test_a_narrow_link_is_told_only_at_work_and_a_full_one_always(room: Room) -> None:
    gpu = room.fake.gpu(0)
    gpu.pcie_width, gpu.utilization = 8, 0
    assert "pcie_link" not in room.values(0)
    gpu.utilization = 50
    assert room.values(0)["pcie_link"] == 0.5
    gpu.clocks_event_reasons = 1  # idle
    assert "pcie_link" not in room.values(0)
    gpu.pcie_width, gpu.utilization = 16, 0
    assert room.values(0)["pcie_link"] == 1.0


def test_links_are_down_that_were_up_also_before_the_agent(room: Room) -> None:
    gpu = room.fake.gpu(0)
    gpu.link_up[17] = 0  # never up: not wired
    assert room.values(0)["nvlink_down"] == 0
    gpu.link_up[3] = gpu.link_up[4] = 0
    room.restart()
    seen = next(
        each for each in room.read() if (each.check, each.entity) == ("nvlink_down", room.fake.entity(0))
    )
    assert (seen.value, seen.text) == (2, "of 17 links down: 3, 4")


@pytest.mark.parametrize(
    ("fields", "total"),
    [({161: 5, 162: 1, 163: 2}, 16), ({215: 3, 208: 4}, 14)],
)
def test_errors_of_newer_links_are_summed_over_the_links(
    tmp_path: Path, fields: dict[int, int], total: int
) -> None:
    with faked(tmp_path / "nvml", 1, links=2) as fake:
        for field in (38, 45, 52, 59):
            fake.field(0, field, code=state.NOT_SUPPORTED)
        for field, value in fields.items():
            for link in range(2):
                fake.field(0, field, value, scope=link)
        sensor = NvmlPolling(Driver(tmp_path), SetClock(), {"nvlink_errors": 5.0})
        assert [each.value for each in sensor.read()] == [total]
        sensor.close()
