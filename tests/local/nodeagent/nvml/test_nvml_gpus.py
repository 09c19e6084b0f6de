"""GPUs that disappear, return, and are reset."""

from __future__ import annotations

import pytest

from nodeagent.model import Observation
from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.polling import MODES_S, RENEW_S, NvmlPolling
from nodeagent.sensing.baselines import Forgotten
from tests.fakenvml import state
from tests.local.nodeagent.nvml.polling import (
    GPUS,
    LOST,
    OK,
    RESET_REQUIRED,
    UNREADABLE,
    VANISHED,
    Room,
    told,
)

pytestmark = pytest.mark.local


@pytest.mark.parametrize(("code", "value"), [(15, LOST), (16, RESET_REQUIRED)])
def test_a_lost_gpu_that_returns_counts_as_reset(room: Room, code: int, value: int) -> None:
    room.read()
    room.fake.gpu(1).code = code
    seen = room.read()
    assert told(seen, "gpu_state") == [(room.fake.entity(i), value if i == 1 else OK) for i in range(GPUS)]
    assert told(seen, "gpu_count") == [("node", 0)]
    assert len(told(seen, "ecc_dbe")) == GPUS - 1  # the others are read as before
    assert room.values(1) == {"gpu_state": value}
    room.fake.restore(1)
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(1), 0)]
    assert told(room.read(), "gpu_reset") == []


def test_a_gpu_that_is_no_longer_listed_is_reported_as_missing(room: Room) -> None:
    room.read()
    room.fake.vanish(2)
    assert room.values() == {"nvml": 0, "gpu_count": 1}
    assert room.values(2) == {"gpu_state": VANISHED}
    room.fake.restore(2)
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(2), 0)]
    assert room.values(2)["gpu_state"] == OK


def test_a_gpu_that_vanished_while_no_agent_ran_is_reported_as_missing(room: Room) -> None:
    room.read()
    room.fake.vanish(0)
    room.restart()
    seen = room.read()
    assert told(seen, "gpu_count") == [("node", 1)]
    assert told(seen, "gpu_state")[0] == (room.fake.entity(0), VANISHED)
    room.start()  # without a saved state, the bus shows that it is missing
    assert room.values() == {"nvml": 0, "gpu_count": 1}
    assert room.values(0) == {"gpu_state": VANISHED}
    room.fake.restore(0)
    room.read(RENEW_S)
    assert room.values() == {"nvml": 0, "gpu_count": 0}
    assert room.values(0)["gpu_state"] == OK


def test_a_gpu_that_was_given_to_a_virtual_machine_is_not_expected(room: Room) -> None:
    room.fake.vanish(2)
    (room.sysfs / f"bus/pci/devices/{room.fake.entity(2).removeprefix('gpu/')}/driver").unlink()
    room.start()
    assert room.values() == {"nvml": 0, "gpu_count": 0}
    assert room.values(2) == {}


def test_a_container_with_some_of_the_gpus_misses_none_of_the_others(room: Room) -> None:
    for number in range(3):  # only the GPUs of this container have device files
        (room.sysfs / "none").mkdir(exist_ok=True)
        (room.sysfs / f"none/nvidia{number}").touch()
    room.fake.vanish(3)
    room.start()
    assert room.values() == {"nvml": 0, "gpu_count": 0}
    assert room.values(3) == {}
    room.fake.vanish(2)
    assert room.values() == {"nvml": 0, "gpu_count": 1}


@pytest.mark.parametrize("code", [state.UNKNOWN, 4, 8, state.NOT_SUPPORTED])
def test_a_gpu_that_nvml_lists_and_cannot_open_is_unreadable_whatever_the_code(room: Room, code: int) -> None:
    for function in ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByPciBusId_v2"):
        room.fake.fail(function, code, gpu=3)
    room.start()
    seen = room.read()
    assert (room.fake.entity(3), UNREADABLE) in told(seen, "gpu_state")
    assert told(seen, "gpu_count") == [("node", 0)]
    room.fake.release()
    room.read(RENEW_S)
    seen = room.read()
    assert (room.fake.entity(3), OK) in told(seen, "gpu_state")
    assert told(seen, "gpu_reset") == []


def test_an_operators_number_replaces_the_memory_of_gpus_but_not_what_the_bus_shows(room: Room) -> None:
    room.read()
    room.fake.vanish(3)
    room.start(room.sensor.remembered(), expected=3)
    assert room.values()["gpu_count"] == 1
    (room.sysfs / f"bus/pci/devices/{room.fake.entity(3).removeprefix('gpu/')}/driver").unlink()
    assert room.values()["gpu_count"] == 0


def test_a_gpu_moved_to_another_slot_is_not_missing_in_the_old_one(room: Room) -> None:
    room.read()
    old = room.fake.entity(0)
    room.fake.gpu(0).pci = b"00000000:99:00.0"
    room.restart()
    seen = room.read()
    assert told(seen, "gpu_count") == [("node", 0)]
    assert dict(told(seen, "gpu_state")) == dict.fromkeys(
        [old, *(room.fake.entity(i) for i in range(GPUS))], OK
    )


def test_a_gpu_that_is_gone_but_not_missing_has_no_facts_and_a_missing_one_keeps_its_uuid(room: Room) -> None:
    room.read()
    uuid = room.fake.gpu(0).uuid.decode()

    def facts(seen: list[Observation], gpu: str) -> dict[str, str]:
        return next(dict(e.facts) for e in seen if (e.check, e.entity) == ("gpu_state", gpu))

    old = room.fake.entity(0)
    room.fake.vanish(0)
    assert facts(room.read(), old) == {"uuid": uuid}
    room.fake.restore(0)
    room.fake.gpu(0).pci = b"00000000:99:00.0"
    room.restart()
    seen = room.read()
    assert facts(seen, old) == {}
    assert facts(seen, room.fake.entity(0))["uuid"] == uuid


def test_gpus_that_were_removed_on_purpose_are_forgotten_at_an_operators_word(room: Room) -> None:
    room.read()
    old = room.fake.entity(3)
    room.fake.vanish(3)
    (room.sysfs / "bus/pci/devices" / old.removeprefix("gpu/") / "driver").unlink()
    assert room.values() == {"nvml": 0, "gpu_count": 1}
    room.forgets.add(Forgotten("gpus"))
    for _ in range(2):
        seen = room.read()
        assert told(seen, "gpu_count") == [("node", 0)]
        assert (old, OK) in told(seen, "gpu_state")
        assert told(seen, "gpu_reset") == [], "an absent GPU was not reset"
        room.restart()
    room.read(2 * RENEW_S)
    assert room.fake.state.attached == 1, "nobody searches for it"
    room.fake.restore(3)
    assert told(room.read(), "gpu_reset") == [(old, 0)]
    assert told(room.read(), "gpu_reset") == []
    room.fake.vanish(3)
    room.read()
    room.forgets.add(Forgotten("gpus"))
    room.read()
    room.fake.vanish(2)
    assert room.values()["gpu_count"] == 1  # the request takes effect once


def test_links_that_were_removed_on_purpose_are_forgotten_at_an_operators_word(room: Room) -> None:
    room.read()
    for gpu in (0, 1):
        room.fake.gpu(gpu).link_up[3] = 0
        assert room.values(gpu)["nvlink_down"] == 1
    room.forgets.add(Forgotten("nvlinks", room.fake.entity(0)))
    assert room.values(0)["nvlink_down"] == 0
    assert room.values(1)["nvlink_down"] == 1
    room.forgets.add(Forgotten("nvlinks"))
    assert room.values(1)["nvlink_down"] == 0


def test_fewer_gpus_than_configured_are_reported_as_missing(room: Room) -> None:
    room.start(expected=8)
    seen = room.read()
    assert told(seen, "gpu_count") == [("node", 8 - GPUS)]
    assert next(each.text for each in seen if each.check == "gpu_count") == "4 of 8 GPUs"


def test_a_gpu_lost_before_its_first_reading_is_named_from_the_bus(room: Room) -> None:
    room.fake.gpu(3).code = 15
    room.start()
    assert room.values(3) == {"gpu_state": LOST}
    room.fake.restore(3)
    seen = room.read()
    assert told(seen, "gpu_reset") == [(room.fake.entity(3), 0)]
    assert told(seen, "replaced") == []


def test_another_uuid_in_the_same_slot_is_a_replaced_gpu(room: Room) -> None:
    room.fake.gpu(1).link_up[0] = 1
    room.fake.gpu(1).ecc_uncorrected = 9
    room.read()
    room.fake.gpu(1).uuid = b"GPU-another"
    room.fake.gpu(1).ecc_uncorrected = 0
    room.fake.gpu(1).link_up[0] = 0  # not wired on the new GPU
    room.restart()
    seen = room.read()
    assert told(seen, "replaced") == [(room.fake.entity(1), 0)]
    assert told(seen, "gpu_reset") == []
    assert (room.fake.entity(1), 0) in told(seen, "nvlink_down")
    assert told(room.read(), "replaced") == []


def test_nvml_is_reinitialised_periodically_while_a_gpu_is_missing(room: Room) -> None:
    room.read()
    room.fake.gpu(0).code = 15
    room.read()
    room.read(RENEW_S)
    assert room.fake.state.attached == 0
    seen = room.read()
    assert room.fake.state.attached == 1
    assert told(seen, "nvml") == [("driver", 0)]
    assert told(seen, "gpu_reset") == []


def test_a_falling_volatile_counter_shows_a_reset_of_its_gpu(room: Room) -> None:
    room.fake.gpu(1).ecc_uncorrected = 2
    assert told(room.read(), "gpu_reset") == []
    room.fake.gpu(1).ecc_uncorrected = 3
    assert told(room.read(), "gpu_reset") == []
    room.fake.gpu(1).ecc_uncorrected = 0
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(1), 0)]


def test_a_counter_that_falls_without_persistence_mode_shows_no_reset(room: Room) -> None:
    gpu = room.fake.gpu(1)
    for before, after in ((0, 0), (0, 1), (1, 0)):
        gpu.persistence, gpu.ecc_uncorrected = before, 3
        room.start()
        room.read()
        gpu.persistence, gpu.ecc_uncorrected = after, 0
        assert told(room.read(), "gpu_reset") == []


def test_a_counter_that_falls_while_no_agent_ran_shows_no_reset(room: Room) -> None:
    room.fake.gpu(1).ecc_uncorrected = 3
    room.read()
    room.restart()
    room.fake.gpu(1).ecc_uncorrected = 0
    assert told(room.read(), "gpu_reset") == []


@pytest.mark.parametrize(("persistence", "resets"), [(0, 0), (1, 1)])
def test_the_agents_own_renewal_of_nvml_is_no_reset_of_the_other_gpus(
    room: Room, persistence: int, resets: int
) -> None:
    gpu = room.fake.gpu(1)
    gpu.persistence, gpu.ecc_uncorrected, gpu.recovery_action = persistence, 3, 1
    room.start()
    room.read()
    room.fake.gpu(0).code = 15
    room.read()
    room.read(RENEW_S)
    gpu.ecc_uncorrected = gpu.recovery_action = (
        0  # the driver unloaded the state of GPUs that nobody had open
    )
    # With persistence mode on the driver keeps its request, so that its end is the driver's word.
    assert len(told(room.read(), "gpu_reset")) == resets
    gpu.recovery_action = 1
    room.read()
    gpu.recovery_action = 0
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(1), 0)]


def test_a_request_that_ends_with_the_agents_renewal_is_no_reset_whenever_it_is_read(room: Room) -> None:
    room.sensor.close()
    gpu = room.fake.gpu(1)
    gpu.persistence, gpu.recovery_action = 0, 1
    periods_s = {"gpu_state": 5.0, "gpu_throttled": 5.0, "recovery_action": RENEW_S + 30}
    room.sensor = NvmlPolling(NvmlDriver(room.sysfs), room.clock, periods_s)

    def read(after_s: float) -> list[Observation]:
        room.clock.at_s += after_s
        return room.sensor.read()

    read(5)
    room.fake.gpu(0).code = 15
    read(5)
    read(RENEW_S)
    gpu.recovery_action = 0
    for _ in range(3):
        seen = read(5)
        assert told(seen, "recovery_action") == []  # not due yet
    assert (room.fake.entity(1), 0) in told(seen := read(30), "recovery_action")
    assert told(seen, "gpu_reset") == []


@pytest.mark.parametrize("gap", ["restart", "release"])
@pytest.mark.parametrize(
    ("before", "after", "resets"), [(1, 1, 1), (0, 0, 0), (0, 1, 0), (1, 0, 0)]
)  # persistence mode
def test_a_request_that_the_driver_may_have_forgotten_while_nobody_had_nvml_open_shows_no_reset(
    room: Room, gap: str, before: int, after: int, resets: int
) -> None:
    gpu = room.fake.gpu(1)
    gpu.persistence, gpu.recovery_action = before, 1
    room.start()
    room.read()
    if gap == "restart":
        kept = room.sensor.remembered()
        gpu.persistence, gpu.recovery_action = after, 0
        room.start(kept)
    else:
        room.sensor.close()
        gpu.persistence, gpu.recovery_action = after, 0
        room.sensor.open()
    assert len(told(room.read(), "gpu_reset")) == resets
    gpu.recovery_action = 1
    assert told(room.read(), "gpu_reset") == []
    gpu.recovery_action = 0  # while the agent has NVML open, the driver forgets nothing
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(1), 0)]


def test_a_mode_that_was_turned_off_after_the_request_was_read_keeps_no_request(room: Room) -> None:
    gpu = room.fake.gpu(1)
    gpu.recovery_action = 1
    room.read()
    gpu.persistence = 0
    room.read(MODES_S)
    gpu.recovery_action, gpu.persistence = 0, 1
    room.restart()
    assert told(room.read(), "gpu_reset") == []


@pytest.mark.parametrize("is_other_lost", [False, True])
@pytest.mark.parametrize("gap", ["restart", "release", "renewal"])
@pytest.mark.parametrize(
    ("before", "after", "is_reset"), [(1, 1, True), (0, 0, False), (0, 1, False), (1, 0, False)]
)  # persistence mode
def test_a_gpu_whose_need_of_a_reset_the_driver_may_have_forgotten_is_not_reset(
    room: Room, gap: str, before: int, after: int, is_reset: bool, is_other_lost: bool
) -> None:
    gpu, entity = room.fake.gpu(1), room.fake.entity(1)
    gpu.persistence = before
    room.start()
    room.read()
    if is_other_lost:  # so NVML's list is read before each sweep
        room.fake.gpu(2).code = 15
        room.read()
    gpu.code = 16
    room.read()
    if gap == "renewal":
        room.read(RENEW_S)
    else:
        room.sensor.close()
    gpu.persistence, gpu.code = after, 0
    if gap == "restart":
        room.restart()
    elif gap == "release":
        room.sensor.open()
    seen = room.read()
    assert bool(told(seen, "gpu_reset")) is is_reset
    assert told(seen, "gpu_unavailable") == ([] if is_reset else [(entity, 0)])
    seen = room.read()
    assert told(seen, "gpu_reset") + told(seen, "gpu_unavailable") == []


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_mode_that_was_turned_off_around_the_need_of_a_reset_keeps_no_state(room: Room, when: str) -> None:
    """The mode as last read was on, and it is on again when the agent opens NVML again."""
    gpu, entity = room.fake.gpu(1), room.fake.entity(1)
    room.read()
    if when == "before":
        gpu.persistence = 0
        room.read()
    gpu.code = 16
    room.read()
    gpu.persistence = 0
    room.read()
    room.sensor.close()
    gpu.persistence, gpu.code = 1, 0
    room.restart()
    seen = room.read()
    assert (told(seen, "gpu_reset"), told(seen, "gpu_unavailable")) == ([], [(entity, 0)])


@pytest.mark.parametrize("code", [16, 999])
def test_a_mode_that_cannot_be_read_when_a_gpu_needs_a_reset_keeps_no_state(room: Room, code: int) -> None:
    gpu, entity = room.fake.gpu(1), room.fake.entity(1)
    room.read()
    gpu.code = 16
    room.fake.fail("nvmlDeviceGetPersistenceMode", code, gpu=1)
    room.read()
    room.fake.fail("nvmlDeviceGetPersistenceMode", 0, gpu=1)
    room.sensor.close()
    gpu.code = 0
    room.restart()
    seen = room.read()
    assert (told(seen, "gpu_reset"), told(seen, "gpu_unavailable")) == ([], [(entity, 0)])


def test_a_boot_resets_a_gpu_that_needs_a_reset(room: Room) -> None:
    gpu = room.fake.gpu(1)
    gpu.code = 16
    room.read()
    gpu.code = 0
    kept = {**room.sensor.remembered(), "boot": "the boot before"}
    room.start(kept)
    assert told(room.read(), "gpu_unavailable") == []


def test_a_gpu_that_needs_a_reset_and_then_fails_otherwise_or_gets_a_new_driver(room: Room) -> None:
    gpu, entity = room.fake.gpu(1), room.fake.entity(1)
    gpu.persistence = 0
    for load in ("", "another"):
        room.start()
        room.read()
        gpu.code = 16
        room.read()
        gpu.code = 999
        room.restart()
        room.read()
        if load:
            (room.sysfs / "module/nvidia").rename(room.sysfs / "module/before")
            (room.sysfs / "module/nvidia").mkdir()
        gpu.code = 0
        room.restart()
        seen = room.read()
        assert told(seen, "gpu_unavailable") == ([] if load else [(entity, 0)])
        assert ((entity, 0) in told(seen, "gpu_reset")) is bool(load)


@pytest.mark.parametrize(("action", "resets"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 0), (6, 1), (7, 1)])
def test_a_reset_is_reported_once_the_driver_no_longer_requests_one(
    room: Room, action: int, resets: int
) -> None:
    room.fake.gpu(2).recovery_action = action
    assert told(room.read(), "gpu_reset") == []
    room.fake.gpu(2).recovery_action = 0
    assert len(told(room.read(), "gpu_reset")) == resets
