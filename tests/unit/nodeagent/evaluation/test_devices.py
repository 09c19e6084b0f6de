"""Evidence follows the GPU, by its UUID, and is not held against another GPU in the same slot."""

from __future__ import annotations

import json

import pytest

from nodeagent.evaluation import devices
from nodeagent.evaluation.devices import DeviceSlots
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.model import Action, HealthFinding, Level, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import DAY_S

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"
SLOT, OTHER = "gpu/0000:3b:00.0", "gpu/0000:4b:00.0"


def seen(uuid: str, at_s: float, slot: str = SLOT) -> Observation:
    facts = (("uuid", uuid), ("name", "NVIDIA H100"))
    return Observation(at_s, "gpu_state", slot, "nvml-polling", 0.0, facts=facts)


def gone(uuid: str, at_s: float, slot: str = SLOT) -> Observation:
    """Return what the sensor says of a GPU that it cannot open."""
    return Observation(at_s, "gpu_state", slot, "nvml-polling", 1.0, facts=(("uuid", uuid),))


def xid(code: int, at_s: float, slot: str = SLOT) -> Observation:
    return Observation(at_s, "xid", slot, "kmsg", float(code))


def mark(name: str, at_s: float, slot: str = SLOT) -> Observation:
    return Observation(at_s, name, "node" if name == "boot" else slot, "nvml-polling")


def evaluator(*observations: Observation) -> Evaluator:
    made = Evaluator(shipped(), 575)
    for each in observations:
        made.add(each)
    restored = Evaluator(shipped(), 575)
    restored.load(json.loads(json.dumps(made.dump())))
    assert restored.findings(1000 * DAY_S) == made.findings(1000 * DAY_S)
    return restored


def events(made: Evaluator, now_s: float) -> list[HealthFinding]:
    return [each for each in made.findings(now_s) if each.check == "xid"]


def test_a_finding_names_the_gpu_in_its_slot() -> None:
    made = evaluator(seen(A, 0.0), xid(79, 10.0), gone(A, 20.0))
    assert {(each.check, each.device) for each in made.findings(21.0)} == {("xid", A), ("gpu_state", A)}
    assert [each.device for each in events(evaluator(xid(79, 10.0)), 11.0)] == [""]


def test_a_new_gpu_inherits_neither_the_findings_nor_the_record_of_the_old_one() -> None:
    first = [seen(A, 0.0), xid(79, 10.0), gone(A, 20.0), mark("boot", 30.0), xid(79, 900.0), gone(A, 3000.0)]
    [found] = events(evaluator(*first), 3001.0)
    assert (found.action, found.device) == (Action.REPLACE, A)
    exchanged = [*first, mark("boot", 4000.0), mark("replaced", 4010.0), seen(B, 4010.1)]
    assert events(evaluator(*exchanged), 4011.0) == []
    [found] = events(evaluator(*exchanged, xid(79, DAY_S)), DAY_S)
    assert (found.action, found.device, found.since_s) == (Action.REBOOT_NODE, B, DAY_S)


def test_what_a_new_gpu_does_between_the_boot_and_its_first_sighting_is_its_own() -> None:
    made = evaluator(
        seen(A, 0.0), xid(95, 10.0), gone(A, 20.0),
        mark("boot", 4000.0), xid(95, 4005.0), mark("replaced", 4010.0), seen(B, 4010.1),
    )  # fmt: skip
    [found] = events(made, 5000.0)
    assert (found.since_s, found.device, found.lasting) == (4005.0, B, True)


@pytest.mark.parametrize("sighted", [20.0, 31 * DAY_S])
def test_the_boot_of_an_exchange_is_kept_as_long_as_the_new_gpus_fault(sighted: float) -> None:
    boot_s, begin = DAY_S, [seen(A, 0.0), seen(A, DAY_S - 60.0)]
    made = evaluator(*begin, mark("boot", boot_s), xid(95, boot_s + 10.0))
    for now_s in (boot_s + sighted, boot_s + 32 * DAY_S, boot_s + 99 * DAY_S):
        made.forget(now_s - 1.0 - FORGET_S)
        made.add(seen(B, now_s))
        restored = Evaluator(shipped())
        restored.load(made.dump())
        for each in (made, restored):
            [found] = events(each, now_s + 1.0)
            assert (found.device, found.since_s, found.lasting) == (B, boot_s + 10.0, True)


def test_a_bad_gpu_that_was_moved_takes_its_findings_along() -> None:
    made = evaluator(
        seen(A, 0.0), seen(B, 0.0, OTHER), xid(64, 10.0), mark("gpu_reset", 500.0),
        xid(64, 1000.0), seen(A, 1100.0), seen(B, 1100.0, OTHER),
        mark("boot", 1200.0),
        mark("replaced", 1210.0), mark("replaced", 1210.0, OTHER), seen(B, 1210.1), seen(A, 1210.1, OTHER),
    )  # fmt: skip
    [found] = events(made, 1300.0)
    assert (found.entity, found.device, found.action) == (OTHER, A, Action.REPLACE)
    assert (found.since_s, found.lasting) == (10.0, True)
    made.add(mark("cleared", 1400.0, OTHER))
    assert events(made, 1401.0) == []


def test_recurrence_follows_the_gpu_to_another_slot() -> None:
    made = evaluator(
        seen(A, 0.0), xid(79, 10.0), mark("boot", 200.0), seen(A, 210.0, OTHER), gone(A, 220.0),
        xid(79, DAY_S, OTHER),
    )  # fmt: skip
    [found] = events(made, DAY_S)
    assert (found.entity, found.action, found.since_s) == (OTHER, Action.REPLACE, DAY_S)


def test_a_gpu_that_comes_back_has_its_record_again() -> None:
    made = evaluator(
        seen(A, 0.0),
        xid(64, 10.0),
        mark("gpu_reset", 500.0),
        xid(64, 1000.0),
        seen(A, 1020.0),
        mark("boot", 1100.0),
        mark("replaced", 1110.0),
        seen(B, 1110.1),
    )
    assert events(made, 1200.0) == []
    made.forget(100 * DAY_S - FORGET_S)
    for each in (mark("boot", 100 * DAY_S), mark("replaced", 100 * DAY_S + 10), seen(A, 100 * DAY_S + 10.1)):
        made.add(each)
    [found] = events(made, 101 * DAY_S)
    assert (found.device, found.action, found.since_s) == (A, Action.REPLACE, 10.0)


def test_the_samples_of_a_gpu_say_nothing_of_its_successor_nor_of_an_empty_slot() -> None:
    bad = [seen(A, 0.0), Observation(0.0, "row_remap_failure", SLOT, "nvml-polling", 1.0)]
    assert [each.check for each in evaluator(*bad).findings(1.0)] == ["row_remap_failure"]
    assert evaluator(*bad, seen(B, 100.0)).findings(101.0) == ()
    assert evaluator(*bad, seen(A, 100.0, OTHER)).findings(101.0) == ()
    kept = Observation(99.9, "row_remap_failure", SLOT, "nvml-polling", 1.0)
    assert [each.device for each in evaluator(*bad, kept, seen(B, 100.0)).findings(101.0)] == [B]


def test_an_exchange_that_only_the_sensor_has_noticed_ends_what_was_before_it() -> None:
    """A memory of an older agent has no sightings."""
    made = evaluator(xid(64, 10.0), mark("replaced", 100.0), seen(B, 100.1))
    assert events(made, 1000.0) == []
    assert [each.level for each in events(evaluator(xid(64, 10.0), seen(B, 100.1)), 1e3)] == [Level.UNHEALTHY]


def test_a_gpu_that_has_no_uuid_is_known_by_its_serial_number() -> None:
    facts = (("name", "NVIDIA H100"), ("serial", "1652"))
    named = Observation(0.0, "gpu_state", SLOT, "nvml-polling", 0.0, facts=facts)
    assert [each.device for each in events(evaluator(named, xid(79, 1.0)), 2.0)] == ["1652"]


def test_the_history_of_the_slots_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "MAX_PLACEMENTS", 4)
    slots = DeviceSlots()
    slots.see(seen(C, 0.0, OTHER))
    for n in range(50):
        slots.see(seen(f"GPU-{n}", float(n)))
    assert [row[:2] for row in slots.dump()] == [
        [OTHER, C], [SLOT, "GPU-47"], [SLOT, "GPU-48"], [SLOT, "GPU-49"]
    ]  # fmt: skip


def margin(at_s: float, slot: str) -> Observation:
    return Observation(at_s, "gpu_temperature_margin", slot, "nvml-polling", -5.0)


def test_two_gpus_with_one_name_do_not_take_each_other_for_one_that_has_moved() -> None:
    made = evaluator()
    for n in range(60):
        for slot in (SLOT, OTHER):
            made.add(seen(A, 100.0 + 10 * n, slot))
            made.add(margin(100.1 + 10 * n, slot))
        if n % 10 == 5:
            made = evaluator_of(made)
    made.add(xid(79, 700.0))
    found = {(each.entity, each.check, each.level) for each in made.findings(710.0)}
    assert found == {
        (SLOT, "gpu_temperature_margin", Level.UNHEALTHY),
        (OTHER, "gpu_temperature_margin", Level.UNHEALTHY),
        (SLOT, "xid", Level.UNHEALTHY),
    }
    assert len({each.device for each in made.findings(710.0)}) == 2


def test_a_gpu_that_was_moved_back_while_the_node_was_off_is_still_one() -> None:
    made = evaluator(
        seen(A, 0.0),
        xid(79, 10.0),
        mark("boot", 200.0),
        seen(A, 210.0, OTHER),
        mark("boot", 400.0),
        seen(A, 410.0),
        xid(79, 500.0),
    )
    [found] = events(made, 501.0)
    assert (found.action, found.device) == (Action.REPLACE, A)


def evaluator_of(made: Evaluator) -> Evaluator:
    again = Evaluator(shipped())
    again.load(json.loads(json.dumps(made.dump())))
    return again


def test_whether_a_sampled_fault_lasts_follows_the_marks_of_each_slot_that_its_gpu_was_in() -> None:
    lost = [Observation(at_s, "gpu_state", OTHER, "nvml-polling", 1.0) for at_s in (300.0, 330.0, 360.0)]
    made = evaluator(seen(A, 0.0), mark("boot", 100.0), seen(A, 110.0, OTHER), *lost)

    def lasting(now_s: float) -> list[bool]:
        found = [each.lasting for each in made.findings(now_s) if each.check == "gpu_state"]
        assert found == [
            each.lasting for each in evaluator_of(made).findings(now_s) if each.check == "gpu_state"
        ]
        return found

    assert lasting(361.0) == [True]
    made.add(mark("replaced", 370.0, OTHER))
    assert lasting(371.0) == [False]
    made.add(seen(B, 400.0, SLOT))
    assert lasting(401.0) == [False], "the exchange in the slot that it has left is another one"


@pytest.mark.parametrize("slots", [2, 3])
def test_the_names_that_are_shared_are_told_apart_in_every_slot(slots: int) -> None:
    places = [f"gpu/0000:{n}b:00.0" for n in range(slots)]
    made = evaluator()
    for n in range(3):
        for k, slot in enumerate(places):
            made.add(seen(A, 10.0 * n + k, slot))
    for slot in places:
        made.add(xid(79, 100.0, slot))
    assert {(each.entity, each.device) for each in made.findings(101.0)} == {
        (slot, f"{A}@{slot}") for slot in places
    }
