"""GPUs that disappear, return, and are reset."""

from __future__ import annotations

import pytest

from nodeagent.nvml.polling import RENEW_S
from tests.local.nodeagent.nvml.polling import GPUS, LOST, OK, RESET_REQUIRED, VANISHED, Room, told

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
    room.start()  # without a saved state it is not missed
    assert room.values() == {"nvml": 0, "gpu_count": 0}


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
    room.restart()
    room.fake.gpu(1).ecc_uncorrected = 0
    assert told(room.read(), "gpu_reset") == [(room.fake.entity(1), 0)]


@pytest.mark.parametrize(("action", "resets"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 0), (6, 1), (7, 1)])
def test_a_reset_is_reported_once_the_driver_no_longer_requests_one(
    room: Room, action: int, resets: int
) -> None:
    room.fake.gpu(2).recovery_action = action
    assert told(room.read(), "gpu_reset") == []
    room.fake.gpu(2).recovery_action = 0
    assert len(told(room.read(), "gpu_reset")) == resets
