"""The values that are read from GPUs, and queries that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.polling import NvmlPolling
from tests.fakenvml import state
from tests.fakenvml.inprocess import SetClock, faked
from tests.local.nodeagent.nvml.polling import GPUS, OK, UNREADABLE, Room, told

pytestmark = pytest.mark.local


def test_a_healthy_gpu_has_a_value_for_every_check_that_it_supports(room: Room) -> None:
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
        "pcie_generation": 0,
        "pcie_replay": 0,
        "nvlink_down": 0,
        "nvlink_errors": 0,
        "fabric": 0,
    }
    assert room.values() == {"nvml": 0, "gpu_count": 0}


def test_faults_of_a_gpu_are_read_as_they_are(room: Room) -> None:
    gpu = room.fake.gpu(1)
    gpu.recovery_action, gpu.ecc_uncorrected, gpu.ecc_corrected, gpu.sram_exceeded = 2, 3, 1000, 1
    gpu.remap_pending = gpu.remap_failure = 1
    gpu.inforom = 14
    gpu.margin = -2
    gpu.clocks_event_reasons = 0x40
    gpu.pcie_width, gpu.pcie_generation, gpu.pcie_replays = 4, 1, 77
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
        "pcie_generation": 4,
        "pcie_replay": 77,
        "nvlink_down": 0,
        "nvlink_errors": 23,
        "fabric": 2,
    }


def test_each_check_is_reported_at_its_own_period(room: Room) -> None:
    room.sensor.close()
    slow = NvmlPolling(NvmlDriver(room.sysfs), room.clock, {"gpu_throttled": 5, "ecc_sbe": 15, "load": 5})
    counts: dict[str, int] = {}
    for _ in range(12):
        room.clock.at_s += 5.03
        for each in slow.read():
            counts[each.check] = counts.get(each.check, 0) + 1
    slow.close()
    # When it is not due, a GPU's state is reported only if it has changed.
    assert counts == {"gpu_throttled": 12 * GPUS, "ecc_sbe": 4 * GPUS}


def test_the_state_of_a_gpu_is_reported_with_its_facts(room: Room) -> None:
    seen = next(each for each in room.read() if each.check == "gpu_state")
    assert dict(seen.facts) == {
        "uuid": "GPU-00000000-0000-4000-8000-000000000000",
        "name": "NVIDIA H100 80GB HBM3",
        "serial": "1652223000000",
        "persistence": "on",
        "mig": "off",
    }
    nvml = next(each for each in room.read() if each.check == "nvml")
    assert dict(nvml.facts) == {"driver": "575.57.08", "nvml": "12.575.57.08"}


def test_an_unsupported_query_disables_only_its_check_and_is_not_repeated(room: Room) -> None:
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


def test_a_query_that_failed_with_a_passing_error_is_repeated(room: Room) -> None:
    room.fake.fail("nvmlDeviceGetMarginTemperature", state.UNKNOWN, gpu=0)
    room.fake.fail("nvmlDeviceGetTemperature", state.UNKNOWN, gpu=0)
    values = room.values(0)
    assert "gpu_temperature_margin" not in values
    assert values["gpu_state"] == OK
    room.fake.release()
    assert room.values(0)["gpu_temperature_margin"] == 37


@pytest.mark.parametrize("code", [state.UNKNOWN, state.INVALID_ARGUMENT])
def test_a_gpu_that_answers_no_query_for_an_unknown_reason_is_unreadable(room: Room, code: int) -> None:
    room.read()
    room.fake.gpu(3).code = code
    seen = room.read()
    assert (room.fake.entity(3), UNREADABLE) in told(seen, "gpu_state")
    assert told(seen, "nvml") == [("driver", 0)]
    room.fake.restore(3)
    seen = room.read()
    assert (room.fake.entity(3), OK) in told(seen, "gpu_state")
    assert told(seen, "gpu_reset") == []


def test_an_old_driver_is_queried_with_the_old_functions(room: Room) -> None:
    room.fake.old()
    room.fake.gpu(0).clocks_event_reasons = 0x80
    room.start()
    values = room.values(0)
    assert values["gpu_temperature_margin"] == 87 - 50
    assert values["gpu_throttled"] == 1
    assert not values.keys() & {"recovery_action", "ecc_sram_threshold", "fabric"}
    assert values["gpu_state"] == OK


def test_clocks_that_are_reduced_at_idle_are_not_reported_as_throttled(room: Room) -> None:
    room.fake.gpu(0).clocks_event_reasons = 0x8 | 0x1
    assert room.values(0)["gpu_throttled"] == 0


def test_a_narrow_link_is_reported_only_under_load_and_a_full_one_always(room: Room) -> None:
    gpu = room.fake.gpu(0)
    gpu.pcie_width, gpu.utilization = 8, 0
    assert "pcie_link" not in room.values(0)
    gpu.utilization = 50
    assert room.values(0)["pcie_link"] == 0.5
    gpu.clocks_event_reasons = 1  # idle
    assert "pcie_link" not in room.values(0)
    gpu.pcie_width, gpu.utilization = 16, 0
    assert room.values(0)["pcie_link"] == 1.0


def test_a_slow_link_is_reported_only_under_load_and_a_fast_one_always(room: Room) -> None:
    gpu = room.fake.gpu(0)
    gpu.pcie_generation, gpu.utilization = 1, 0
    assert "pcie_generation" not in room.values(0)
    gpu.utilization = 50
    seen = next(each for each in room.read() if each.check == "pcie_generation")
    assert (seen.value, seen.text) == (4, "generation 1 of 5")
    gpu.pcie_generation, gpu.utilization = 5, 0
    assert room.values(0)["pcie_generation"] == 0


def test_links_that_mig_makes_inactive_are_not_down_and_those_that_stay_down_after_it_are(
    room: Room,
) -> None:
    gpu = room.fake.gpu(0)
    room.read()
    gpu.mig = gpu.mig_pending = 1
    for link in range(18):
        gpu.link_up[link] = 0
    assert room.values(0)["nvlink_down"] == 0
    room.restart()
    assert room.values(0)["nvlink_down"] == 0
    gpu.mig = gpu.mig_pending = 0
    for link in range(17):
        gpu.link_up[link] = 1
    assert room.values(0)["nvlink_down"] == 1
    gpu.link_up[17] = 1
    assert room.values(0)["nvlink_down"] == 0
    gpu.mig = gpu.mig_pending = 1  # what was up without MIG is not expected with it
    for link in range(18):
        gpu.link_up[link] = 0
    assert room.values(0)["nvlink_down"] == 0


def test_a_link_that_was_up_with_mig_on_is_down(room: Room) -> None:
    gpu = room.fake.gpu(0)
    gpu.mig = gpu.mig_pending = 1
    room.start()
    assert room.values(0)["nvlink_down"] == 0
    gpu.link_up[3] = 0
    assert room.values(0)["nvlink_down"] == 1


@pytest.mark.parametrize(
    ("mig", "pending", "said"), [(1, 1, "on"), (0, 1, "off, on pending"), (-1, -1, None)]
)
def test_the_modes_of_a_gpu_are_facts(room: Room, mig: int, pending: int, said: str | None) -> None:
    gpu = room.fake.gpu(0)
    gpu.mig, gpu.mig_pending, gpu.persistence = mig, pending, 0
    room.start()
    facts = dict(next(each for each in room.read() if each.check == "gpu_state").facts)
    assert (facts["persistence"], facts.get("mig")) == ("off", said)


def test_links_that_were_up_before_a_restart_are_reported_as_down(room: Room) -> None:
    gpu = room.fake.gpu(0)
    gpu.link_up[17] = 0  # never up: not wired
    assert room.values(0)["nvlink_down"] == 0
    gpu.link_up[3] = gpu.link_up[4] = 0
    room.restart()
    seen = next(
        each for each in room.read() if (each.check, each.entity) == ("nvlink_down", room.fake.entity(0))
    )
    assert (seen.value, seen.text) == (2, "of 17 links down: 3, 4")


def test_a_link_that_is_down_stays_down_while_it_does_not_answer(room: Room) -> None:
    gpu = room.fake.gpu(0)
    assert room.values(0)["nvlink_down"] == 0
    gpu.link_up[5] = 0
    assert room.values(0)["nvlink_down"] == 1
    gpu.links = 3  # the others answer INVALID_ARGUMENT: one is down, and nothing is known of the rest
    assert [room.values(0)["nvlink_down"] for _ in range(2)] == [1, 1]
    gpu.links = 0  # none answers, so nothing is known
    assert "nvlink_down" not in room.values(0)
    gpu.links = 18
    assert room.values(0)["nvlink_down"] == 1
    gpu.link_up[7] = 0
    assert room.values(0)["nvlink_down"] == 2, "a link that did not answer once is asked again"
    gpu.link_up[5] = gpu.link_up[7] = 1
    assert room.values(0)["nvlink_down"] == 0


def test_a_link_that_was_up_before_a_restart_is_asked_again_after_it_did_not_answer(room: Room) -> None:
    gpu = room.fake.gpu(0)
    gpu.link_up[17] = 0  # not wired
    assert room.values(0)["nvlink_down"] == 0
    gpu.links = 3  # the others answer INVALID_ARGUMENT
    room.restart()
    assert "nvlink_down" not in room.values(0), (
        "what has never answered in this session is not known to be up"
    )
    gpu.links = 18
    assert room.values(0)["nvlink_down"] == 0
    gpu.link_up[7] = 0
    assert room.values(0)["nvlink_down"] == 1


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
        sensor = NvmlPolling(NvmlDriver(tmp_path), SetClock(), {"nvlink_errors": 5.0})
        assert [each.value for each in sensor.read()] == [total]
        sensor.close()


@pytest.mark.parametrize("code", [state.UNKNOWN, state.INVALID_ARGUMENT])
def test_a_counter_of_links_that_is_unreadable_for_one_poll_adds_no_errors(room: Room, code: int) -> None:
    gpu = room.fake.gpu(0)
    gpu.nvlink_replay, gpu.nvlink_crc = 2000, 5
    before = room.values(0)["nvlink_errors"]
    room.fake.field(0, 52, code=code)
    assert "nvlink_errors" not in room.values(0)
    room.fake.field(0, 52, 2001)
    assert room.values(0)["nvlink_errors"] - before == 1


def test_counters_of_links_that_are_all_unreadable_are_not_replaced_by_others(room: Room) -> None:
    gpu = room.fake.gpu(0)
    gpu.nvlink_replay = 4
    assert room.values(0)["nvlink_errors"] == 4
    for field in (38, 45, 52, 59):
        room.fake.field(0, field, code=state.UNKNOWN)
    for link in range(2):
        room.fake.field(0, 161, 700, scope=link)
    assert "nvlink_errors" not in room.values(0)
    room.restart()
    assert "nvlink_errors" not in room.values(0)
    for field in (38, 45, 59):
        room.fake.field(0, field, 0)
    room.fake.field(0, 52, 5)
    assert room.values(0)["nvlink_errors"] == 5


def test_a_sweep_makes_a_known_number_of_calls(room: Room) -> None:
    room.read()
    before = room.fake.state.calls
    room.read()
    assert room.fake.state.calls - before == 1 + GPUS * 31  # 18 of them for its links
